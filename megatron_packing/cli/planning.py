"""What do schedulers make of the same steps? Planned one after the other, with every figure of every step kept.

Cost: 3 to 6 s for a million lengths, a scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_packing.data.progress import progress_bar
from megatron_packing.schedule import (
    CHOOSES_GROUPS,
    NOT_IN_TRAINING,
    CostModel,
    GroupSizes,
    Metrics,
    Plan,
    imbalance,
    make_plan,
    mean_metrics,
    objective,
    warm_up,
)
from megatron_packing.schedule.items import Items, Units
from megatron_packing.schedule.memory import ActivationMemory
from megatron_packing.topology import Topology

type Int64Array = npt.NDArray[np.int64]

_LONG_WORK = 200_000
"""Lengths to plan, all schedulers together, from which a progress bar is worth its place: about a second."""

_MOST_TO_RECOMMEND = 100_000
"""Samples of a step up to which `balanced` is looked at: more are a whole set and no step."""
_STEPS_TO_RECOMMEND = 50
"""Steps that are planned to look at it, spread over all: less than a second, as a rule."""
_WORTH_RECOMMENDING = 1.01
"""How many times longer steps must be for another scheduler to be recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every step is planned under."""

    topology: Topology
    max_tokens_per_rank: int
    seq_length: int
    """Tokens that the padded baseline pads to; also the longest sample."""
    max_seqs: int | None
    cost: CostModel
    balance: str
    """What `balanced` keeps small."""
    group_sizes: GroupSizes
    widest_cp: int
    """Ranks that share the largest pack which every scheduler can make."""
    memory: ActivationMemory | None = None
    """Of the model that will run; None: it is not known."""
    together: int = 1
    """Samples, one after the other, that must share a pack: 2 for preference pairs."""

    @property
    def capacity(self) -> int:
        """Padded tokens of the largest pack that every scheduler can make."""
        return self.max_tokens_per_rank * self.widest_cp

    @property
    def capacity_of(self) -> str:
        """The capacity, in words."""
        return f"{self.capacity:,} = {self.max_tokens_per_rank:,} per rank x CP {self.widest_cp}"

    @property
    def activation_bytes(self) -> int | None:
        """What a rank keeps of a full microbatch for the backward pass, an estimate; None where no model is known."""
        return None if self.memory is None else self.memory.of(self.max_tokens_per_rank, self.topology)

    def largest_unit(self, lengths: Int64Array) -> int:
        """Padded tokens of the samples that must share a pack, the most of all."""
        return int(
            Items(lengths=lengths, units=Units.of(self._sizes(lengths), len(lengths)))
            .padded(self.topology.alignment)
            .max()
        )

    def _sizes(self, lengths: Int64Array) -> list[int]:
        return [self.together] * (len(lengths) // self.together)

    def plan(self, lengths: Int64Array, scheduler: str) -> Plan:
        """The plan of one step."""
        return make_plan(
            lengths,
            scheduler=scheduler,
            topology=self.topology,
            max_tokens_per_rank=self.max_tokens_per_rank,
            max_seqs=self.max_seqs,
            cost=self.cost,
            group_sizes=self.group_sizes,
            balance=self.balance,
            units=None if self.together == 1 else self._sizes(lengths),
        )

    def metrics(self, lengths: Int64Array, scheduler: str) -> Metrics:
        """The metrics of one step."""
        return self.plan(lengths, scheduler).metrics(lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """What one scheduler makes of all steps."""

    first: Plan
    """Of the first step."""
    of_steps: Sequence[Metrics]
    mean: Metrics
    """See `mean_metrics`."""


def plan_steps(
    steps: Sequence[Int64Array], names: Sequence[str], setting: Setting, *, dropped: int = 0
) -> dict[str, Planned]:
    """What each of the named schedulers makes of all steps; with a progress bar where that takes long.

    Args:
        steps: the lengths of each step's samples.
        names: of schedulers.
        setting: what they are planned under.
        dropped: rows of the data that make no sample.
    """
    planned = {}
    with progress_bar(wanted=len(names) * len(steps) * len(steps[0]) >= _LONG_WORK) as progress:
        for name in names:
            warm_up(name)
            first = setting.plan(steps[0], name)
            rest = progress.track(steps[1:], description=f"planning with {name}")
            of_steps = [first.metrics(steps[0]), *(setting.metrics(step, name) for step in rest)]
            mean = replace(mean_metrics(of_steps), dropped=dropped)
            planned[name] = Planned(first=first, of_steps=of_steps, mean=mean)
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """A scheduler under which steps are shorter than under those that were asked for."""

    scheduler: str
    balance: str
    """What decides how long a step takes here: `step` or `lockstep`."""
    imbalance: float
    """A step takes this many times the mean rank's work; mean over steps."""
    in_place_of: str
    """The best of those asked for."""
    its_imbalance: float

    def in_words(self) -> str:
        """A sentence with the flag and the figures."""
        return (
            f"Recommended: --sequence-packing-scheduler {self.scheduler}. A step takes {self.imbalance:.3f} times the "
            f"mean rank's work; with {self.in_place_of} {self.its_imbalance:.3f} times ({self.balance} imbalance): "
            f"{self.its_imbalance / self.imbalance - 1:.0%} longer."
        )


def recommended(steps: Sequence[Int64Array], metrics: Mapping[str, Metrics], setting: Setting) -> Recommended | None:
    """`balanced`, asked for or not, if steps are shorter with it. None for one rank, which waits for nobody."""
    kept_small = objective(setting.balance, setting.topology)
    replaceable = metrics.keys() - {"balanced", *NOT_IN_TRAINING, *CHOOSES_GROUPS}
    others = {name: imbalance(one, kept_small) for name, one in metrics.items() if name in replaceable}
    if setting.topology.dp == 1 or not others or len(steps[0]) > _MOST_TO_RECOMMEND:
        return None
    best = min(others, key=lambda name: others[name])
    looked_at = steps[:: -(-len(steps) // _STEPS_TO_RECOMMEND)]
    warm_up("balanced")
    ours, theirs = (
        imbalance(mean_metrics([setting.metrics(step, name) for step in looked_at]), kept_small)
        for name in ("balanced", best)
    )
    if theirs < _WORTH_RECOMMENDING * ours:
        return None
    return Recommended(scheduler="balanced", balance=kept_small, imbalance=ours, in_place_of=best, its_imbalance=theirs)
