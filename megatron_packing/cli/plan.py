"""What would packing make of these lengths? Plans every step of an epoch; loads neither torch nor Megatron.

Cost: 3 to 6 s for a million lengths, a scheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.table import Table

from megatron_packing.cli.lengths import load_lengths
from megatron_packing.cli.output import console, print_json, say
from megatron_packing.cli.padded import PaddedAccount, padded_account
from megatron_packing.data.progress import progress_bar
from megatron_packing.errors import CapacityError, ConfigError
from megatron_packing.schedule import (
    CHOOSES_GROUPS,
    NOT_IN_TRAINING,
    SCHEDULERS,
    CostModel,
    GroupSizes,
    Metrics,
    check_scheduler,
    imbalance,
    make_plan,
    mean_metrics,
    objective,
    warm_up,
)
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
class _Setting:
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

    @property
    def capacity(self) -> int:
        return self.max_tokens_per_rank * self.widest_cp

    @property
    def capacity_of(self) -> str:
        """The capacity, in words."""
        return f"{self.capacity:,} = {self.max_tokens_per_rank:,} per rank x CP {self.widest_cp}"

    def metrics(self, lengths: Int64Array, scheduler: str) -> Metrics:
        """The metrics of one step."""
        plan = make_plan(
            lengths,
            scheduler=scheduler,
            topology=self.topology,
            max_tokens_per_rank=self.max_tokens_per_rank,
            max_seqs=self.max_seqs,
            cost=self.cost,
            group_sizes=self.group_sizes,
            balance=self.balance,
        )
        return plan.metrics(lengths)


def plan(
    lengths: Annotated[
        Path,
        typer.Option(help='Sample lengths in tokens: .npy, .txt (one a line), .json (a list, or {"length": count}).'),
    ],
    dp: Annotated[int, typer.Option("--dp", "--data-parallel-size", min=1, help="Data-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option("--cp", "--context-parallel-size", min=1, help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option("--ep", "--expert-model-parallel-size", min=1, help="Expert-parallel ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Pad to multiples of TP too, as sequence parallelism asks for.")
    ] = False,
    max_seqlen_per_dp_cp_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that a rank holds in one microbatch. Default: --seq-length / CP, rounded up."),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="The longest sample; what is padded to without packing. Default: a pack.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of an optimizer step. Default: all of them in one step.")
    ] = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler",
            "--sequence-packing-scheduler",
            help=f"One of {', '.join(SCHEDULERS)}; repeat to compare. Default: first_fit.",
        ),
    ] = None,
    packing_balance: Annotated[
        str,
        typer.Option(
            help="What balanced keeps small: the busiest rank's work over the step, or in each microbatch (lockstep). "
            "auto: lockstep with --pp or --ep above 1, else step."
        ),
    ] = "auto",
    max_seqs: Annotated[
        int | None, typer.Option("--max-seqs", "--thd-max-packed-sequences", min=1, help="Most samples in one pack.")
    ] = None,
    cost_linear: Annotated[
        float, typer.Option(help="Work of a token, in query-key pairs; 24576 is about a dense model of 7B parameters.")
    ] = 0.0,
    cost_quadratic: Annotated[float, typer.Option(help="Work of a query-key pair.")] = 1.0,
    cost_communication: Annotated[
        float, typer.Option(help="Work of a token, on every rank, where several ranks share its pack.")
    ] = 0.0,
    min_dynamic_context_parallel_size: Annotated[
        int, typer.Option(help="dynamic_cp: ranks of the smallest group; groups have 1, 2, 4, ... times as many.")
    ] = 1,
    any_group_size: Annotated[
        bool, typer.Option("--any-group-size", help="dynamic_cp: groups have any multiple of the smallest's ranks.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Shuffles lengths given as counts; a list keeps its order.")] = 1234,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables.")] = False,
) -> None:
    """Show what packing would make of a file of lengths, next to padding.

    Steps are consecutive global batches; an incomplete last one is left out. Needs neither torch nor a GPU.
    """
    names = list(dict.fromkeys(map(check_scheduler, scheduler or ["first_fit"])))
    setting = _setting(
        topology=Topology(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, sequence_parallel=sequence_parallel),
        max_tokens_per_rank=max_seqlen_per_dp_cp_rank,
        seq_length=seq_length,
        max_seqs=max_seqs,
        cost=CostModel(linear=cost_linear, quadratic=cost_quadratic, communication=cost_communication),
        group_sizes=GroupSizes(smallest=min_dynamic_context_parallel_size, any_size=any_group_size),
        schedulers=names,
        balance=packing_balance,
    )
    for name in names:  # no samples are a valid step: it refuses a wrong setting before a large file is read
        setting.metrics(np.zeros(0, dtype=np.int64), name)
    if setting.topology.pad(setting.seq_length) > setting.capacity:
        say(
            "note",
            f"a run would refuse this setting: a pack holds {setting.capacity:,} tokens, and --seq-length lets a "
            f"sample have {setting.seq_length:,}.",
        )
    all_lengths = load_lengths(lengths, seed)
    _check_fit(all_lengths, lengths, setting, seq_length_given=seq_length is not None)
    for name in names:
        if name in NOT_IN_TRAINING:
            say("note", f"training refuses {name}: {NOT_IN_TRAINING[name]}.")
    steps = _steps(all_lengths, lengths, global_batch_size)
    account = padded_account(np.concatenate(steps), setting.seq_length)
    metrics = _metrics_by_scheduler(steps, names, setting)
    recommended = _recommended(steps, metrics, setting)
    if as_json:
        by_name = {name: one.as_dict() for name, one in metrics.items()}
        print_json(
            {
                "padded": account.as_dict(),
                "schedulers": by_name,
                "recommended": None if recommended is None else asdict(recommended),
            }
        )
    else:
        _print_tables(account, metrics, setting, samples=len(steps) * len(steps[0]))
        if recommended is not None:
            console().print(recommended.in_words())


def _setting(
    *,
    topology: Topology,
    max_tokens_per_rank: int | None,
    seq_length: int | None,
    max_seqs: int | None,
    cost: CostModel,
    group_sizes: GroupSizes,
    schedulers: Sequence[str],
    balance: str,
) -> _Setting:
    """The setting with its defaults filled in, as training fills them in."""
    if max_tokens_per_rank is None:
        if seq_length is None:
            raise ConfigError(
                "--max-seqlen-per-dp-cp-rank is missing: the tokens that a rank holds in one microbatch. Give it, or "
                "--seq-length to take it from."
            )
        max_tokens_per_rank = topology.pad(seq_length) // topology.cp
    widest_cp = topology.cp * (topology.dp if CHOOSES_GROUPS.issuperset(schedulers) else 1)
    return _Setting(
        topology=topology,
        max_tokens_per_rank=max_tokens_per_rank,
        widest_cp=widest_cp,
        seq_length=seq_length or max_tokens_per_rank * widest_cp,
        max_seqs=max_seqs,
        cost=cost,
        group_sizes=group_sizes,
        balance=balance,
    )


def _check_fit(lengths: Int64Array, path: Path, setting: _Setting, *, seq_length_given: bool) -> None:
    """No length is above what a sample or a pack may have; checked before planning, to name the place in the file."""
    sample = f"--seq-length is {setting.seq_length:,}"
    pack = f"a pack holds {setting.capacity_of}"
    limits = [(setting.seq_length, sample, "Raise --seq-length")] if seq_length_given else []
    for limit, what, remedy in [*limits, (setting.capacity, pack, "Raise --max-seqlen-per-dp-cp-rank")]:
        too_long = np.flatnonzero(lengths > limit)
        if too_long.size:
            first = int(too_long[0])
            raise CapacityError(
                f"{path}: length {first}, counted from 0, is {int(lengths[first]):,} tokens; {what} ({too_long.size:,} "
                f"of {lengths.size:,} are too long). {remedy}, or take these lengths out."
            )


def _steps(lengths: Int64Array, path: Path, global_batch_size: int | None) -> list[Int64Array]:
    """Consecutive global batches, at least one."""
    size = global_batch_size or len(lengths)
    num_steps, left_out = divmod(len(lengths), size)
    if not num_steps:
        raise ConfigError(
            f"{path} holds {len(lengths):,} lengths; one step takes {size:,} (--global-batch-size). Lower it, or give "
            "more lengths."
        )
    if left_out:
        say(
            "note",
            f"{left_out:,} of {len(lengths):,} lengths are left out: they fill no global batch of {size:,} "
            f"({num_steps:,} steps are planned).",
        )
    return np.split(lengths[: num_steps * size], num_steps)


def _metrics_by_scheduler(steps: Sequence[Int64Array], names: Sequence[str], setting: _Setting) -> dict[str, Metrics]:
    means = {}
    with progress_bar(wanted=len(names) * len(steps) * len(steps[0]) >= _LONG_WORK) as progress:
        for name in names:
            warm_up(name)
            of_steps = progress.track(steps, description=f"planning with {name}")
            means[name] = mean_metrics([setting.metrics(step, name) for step in of_steps])
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recommended:
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
        return (
            f"Recommended: --sequence-packing-scheduler {self.scheduler}. A step takes {self.imbalance:.3f} times the "
            f"mean rank's work; with {self.in_place_of} {self.its_imbalance:.3f} times ({self.balance} imbalance), so "
            f"that {1 - self.imbalance / self.its_imbalance:.0%} of a step goes."
        )


def _recommended(steps: Sequence[Int64Array], metrics: dict[str, Metrics], setting: _Setting) -> _Recommended | None:
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
    return _Recommended(
        scheduler="balanced", balance=kept_small, imbalance=ours, in_place_of=best, its_imbalance=theirs
    )


# --- for humans -----------------------------------------------------------------------------------

# Figure of a scheduler -> how it is written. What padding does in its place is in `_padded_column`.
_ROWS: tuple[tuple[str, Callable[[Metrics], str]], ...] = (
    ("microbatches per rank", lambda m: f"{m.microbatches_per_rank:,.2f}"),
    ("packs", lambda m: f"{m.packs:,.2f}"),
    ("  at least", lambda m: f"{m.packs_lower_bound:,.2f}"),
    ("fill", lambda m: f"{m.fill:.1%}"),
    ("largest pack / capacity", lambda m: f"{m.max_pack_load:.1%}"),
    ("padding tokens that run", lambda m: f"{m.padding_tokens:,.1f}"),
    ("step imbalance", lambda m: f"{m.step_imbalance:.3f}"),
    ("lockstep imbalance", lambda m: f"{m.lockstep_imbalance:.3f}"),
    ("  at least", lambda m: f"{m.lockstep_lower_bound:.3f}"),
    ("planning, ms", lambda m: f"{m.plan_ms:.2f}"),
)


def _print_tables(account: PaddedAccount, metrics: dict[str, Metrics], setting: _Setting, *, samples: int) -> None:
    num_steps = next(iter(metrics.values())).steps
    out = console()
    out.print(_comparison(account, metrics, setting, samples=samples, num_steps=num_steps))
    out.print(_padding_table(account, setting.seq_length, samples=samples))


def _comparison(
    account: PaddedAccount, metrics: dict[str, Metrics], setting: _Setting, *, samples: int, num_steps: int
) -> Table:
    table = Table(
        title=f"Mean of a step (steps: {num_steps:,}, samples in each: {samples // num_steps:,}); "
        f"packs of {setting.capacity:,} tokens, alignment {setting.topology.alignment}",
        title_justify="left",
    )
    table.add_column("")
    for name in ("padded", *metrics):
        table.add_column(name, justify="right")
    padded = _padded_column(account, setting.topology.dp, samples=samples, num_steps=num_steps)
    for label, write in _ROWS:
        table.add_row(label, padded.get(label, "-"), *(write(one) for one in metrics.values()))
    return table


def _padded_column(account: PaddedAccount, dp: int, *, samples: int, num_steps: int) -> dict[str, str]:
    """What one sample a microbatch, padded to --seq-length, makes of the same steps. Every row of it costs the same."""
    return {
        "microbatches per rank": f"{-(-samples // num_steps // dp):,.2f}",
        "packs": f"{samples / num_steps:,.2f}",
        "fill": f"{1 - account.waste:.1%}",
        "padding tokens that run": f"{account.padding_tokens / num_steps:,.1f}",
    }


def _padding_table(account: PaddedAccount, seq_length: int, *, samples: int) -> Table:
    table = Table(title=f"{samples:,} samples padded to {seq_length:,} tokens each, in all", title_justify="left")
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    table.add_row("slots", f"{account.slots:,}", "")
    table.add_row("real tokens", f"{account.real_tokens:,}", f"{1 - account.waste:.1%}")
    table.add_row("padding", f"{account.padding_tokens:,}", f"{account.waste:.1%}")
    table.add_row(f"slots of {account.bound_packs:,} full packs, the least", f"{account.bound_slots:,}", "")
    table.add_row(
        "  padding left in them", f"{account.tail_padding:,}", f"{account.tail_padding / account.bound_slots:.1%}"
    )
    table.add_row("  slots saved, the most", f"{account.saved:,}", f"{account.saved / account.slots:.1%}")
    table.add_section()
    share = account.score_half_squares / account.padded_half_squares
    table.add_row("attention scores / 2, padded", f"{account.padded_half_squares:,}", "")
    table.add_row("attention scores / 2, packed", f"{account.score_half_squares:,}", f"{share:.1%}")
    table.add_row("causal pairs, packed", f"{account.causal_pairs:,}", "")
    return table
