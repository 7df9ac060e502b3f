"""Which capacity, CP and scheduler? The same ranks, cut otherwise, plan some of the steps; what each costs, in words.

Memory is what a rank holds of a microbatch, in tokens, in proportion to which a run's activations grow; in bytes where
the model is known. Balance is what
a step takes over the mean rank's work. A larger CP also exchanges keys and values in every layer: counted only where
the cost model says what that costs. Cost: a few seconds at most, see `_STEPS`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_packing.cli.model_flags import in_gib
from megatron_packing.cli.planning import Setting
from megatron_packing.data.progress import progress_bar
from megatron_packing.schedule import Metrics, imbalance, mean_metrics, objective, warm_up

type Int64Array = npt.NDArray[np.int64]

SCHEDULERS = ("first_fit", "balanced")
"""What is tried: the default, and the one that balances."""
_STEPS = 8
"""Steps that every choice plans, at most, spread over all."""
_MOST_SAMPLES = 20_000
"""Samples of these steps together. A step of more is a whole set, for which there is no advice."""
_LONG_WORK = 100_000
"""Samples to plan, all choices together, from which a progress bar is worth its place: about a second."""
_ALIKE = 1.01
"""Steps that take at most this many times as long as the shortest are as good."""
_WORTH_A_LARGER_CP = 1.05
"""A larger CP must make steps this many times shorter: what its ranks exchange in every layer takes time, too."""
_MOST_CP = 8
"""The largest CP that is tried, over the smallest that holds the longest sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way to run these steps on the same DP x CP ranks, and what it costs."""

    scheduler: str
    cp: int
    dp: int
    max_tokens_per_rank: int
    memory: float
    """Tokens that a rank may hold, over those of the setting that was asked for."""
    activation_bytes: int | None
    """What a rank keeps for the backward pass, an estimate; None where no model is known."""
    imbalance: float
    """A step takes this many times the mean rank's work; mean over the steps looked at."""
    fill: float
    microbatches_per_rank: float

    def flags(self) -> str:
        """As on a command line."""
        return (
            f"--max-seqlen-per-dp-cp-rank {self.max_tokens_per_rank} --context-parallel-size {self.cp} "
            f"--sequence-packing-scheduler {self.scheduler}"
        )

    def cost(self) -> str:
        """Memory and balance, in words."""
        size = "" if self.activation_bytes is None else f", {in_gib(self.activation_bytes)}"
        return (
            f"{self.max_tokens_per_rank:,} tokens a rank ({self.memory:g}x the memory for activations{size}), "
            f"steps of {self.imbalance:.3f} times the mean rank's work, {self.microbatches_per_rank:,.1f} microbatches "
            f"{self.fill:.0%} full"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to choose, and what was looked at."""

    balance: str
    """What decides how long a step takes here: `step` or `lockstep`."""
    best: Choice
    """Of those that need no more memory than was asked for: the smallest CP whose steps come within 5 % of the
    shortest, and of its choices that are alike within 1 % the one with the fewest microbatches."""
    less_memory: Choice | None
    """The same with half the memory; None: the longest sample does not fit, or it would be no less."""
    more_memory: Choice | None
    """The same with up to twice the memory, where CP is smaller or steps are shorter by more than 1 % for it."""
    choices: tuple[Choice, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def in_words(self) -> list[str]:
        """One sentence each."""
        words = [f"Advice ({self.balance} imbalance): {self.best.flags()}: {self.best.cost()}."]
        if self.less_memory is not None:
            words.append(f"With half the memory: {self.less_memory.flags()}: {self.less_memory.cost()}.")
        if self.more_memory is not None:
            words.append(f"With twice the memory: {self.more_memory.flags()}: {self.more_memory.cost()}.")
        elif len({choice.memory for choice in self.choices}) > 1:
            words.append("Twice the memory would make no step shorter by more than 1 % and no CP smaller.")
        if self.best.cp > 1:
            words.append(
                f"CP {self.best.cp} exchanges keys and values between its ranks in every layer; --cost-communication "
                "counts that."
            )
        return words


def advise(steps: Sequence[Int64Array], setting: Setting) -> Advice | None:
    """Advice for these steps; None where the steps are whole sets, or the longest sample fits in no choice."""
    if len(steps[0]) > _MOST_SAMPLES:
        return None
    looked_at = steps[:: -(-len(steps) // min(_STEPS, _MOST_SAMPLES // len(steps[0])))]
    kept_small = objective(setting.balance, setting.topology)
    tried = [(one, scheduler) for one in _settings(setting, steps) for scheduler in SCHEDULERS]
    choices = []
    with progress_bar(wanted=len(tried) * len(looked_at) * len(steps[0]) >= _LONG_WORK) as progress:
        for one, scheduler in progress.track(tried, description="trying other capacities and CPs"):
            warm_up(scheduler)
            mean = mean_metrics([one.metrics(step, scheduler) for step in looked_at])
            choices.append(_choice(one, scheduler, mean, kept_small, asked=setting.max_tokens_per_rank))
    affordable = [choice for choice in choices if choice.memory <= 1]
    if not affordable:
        return None
    best = _best(affordable)
    half = [choice for choice in choices if choice.memory <= 0.5]
    more = _best([*choices, best])
    worth_it = more.memory > 1 and (more.imbalance * _ALIKE < best.imbalance or more.cp < best.cp)
    return Advice(
        balance=kept_small,
        best=best,
        less_memory=_best(half) if half and best.memory > 0.5 else None,
        more_memory=more if worth_it else None,
        choices=tuple(choices),
    )


def _settings(setting: Setting, steps: Sequence[Int64Array]) -> Iterator[Setting]:
    """Half, all and twice the tokens a rank, at a few CPs that are powers of two, where the longest sample fits."""
    ranks = setting.topology.dp * setting.topology.cp
    most_cp = ranks
    for cp in (2**power for power in range(ranks.bit_length()) if ranks % 2**power == 0):
        topology = replace(setting.topology, dp=ranks // cp, cp=cp)
        unit = topology.alignment // cp  # of tokens a rank
        cut = replace(setting, topology=topology, widest_cp=cp)
        largest = max(map(cut.largest_unit, steps))
        for tokens in (setting.max_tokens_per_rank // 2, setting.max_tokens_per_rank, 2 * setting.max_tokens_per_rank):
            if cp <= most_cp and tokens and tokens % unit == 0 and largest <= tokens * cp:
                most_cp = min(most_cp, _MOST_CP * cp)
                yield replace(cut, max_tokens_per_rank=tokens)


def _choice(setting: Setting, scheduler: str, mean: Metrics, kept_small: str, *, asked: int) -> Choice:
    return Choice(
        scheduler=scheduler,
        cp=setting.topology.cp,
        dp=setting.topology.dp,
        max_tokens_per_rank=setting.max_tokens_per_rank,
        memory=setting.max_tokens_per_rank / asked,
        activation_bytes=setting.activation_bytes,
        imbalance=imbalance(mean, kept_small),
        fill=mean.fill,
        microbatches_per_rank=mean.microbatches_per_rank,
    )


def _best(choices: Sequence[Choice]) -> Choice:
    """See `Advice.best`; of equals the default scheduler."""
    shortest = min(choice.imbalance for choice in choices)
    cp = min(choice.cp for choice in choices if choice.imbalance <= _WORTH_A_LARGER_CP * shortest)
    of_this_cp = [choice for choice in choices if choice.cp == cp]
    alike = _ALIKE * min(choice.imbalance for choice in of_this_cp)
    return min(
        (choice for choice in of_this_cp if choice.imbalance <= alike),
        key=lambda one: (one.microbatches_per_rank, SCHEDULERS.index(one.scheduler)),
    )
