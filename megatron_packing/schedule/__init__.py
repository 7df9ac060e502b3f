"""Which rank runs which sample, and when? A pure function of lengths and topology, the same on every rank.

`make_plan` takes 10 to 25 ms for 5,000 samples. Nothing here imports torch or Megatron, so a plan can be made and
looked at anywhere. To add a planner, write a function from `Problem` to packs and name it in `SCHEDULERS`; if it has
compiled loops (`jit.py`), import them on use and name in `_WARM_UPS` what compiles them.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from megatron_packing.errors import CapacityError, ConfigError
from megatron_packing.schedule.advice import BalanceAdvice, imbalance
from megatron_packing.schedule.balanced import BALANCES, balanced, objective
from megatron_packing.schedule.balanced import warm_up as _warm_up_balanced
from megatron_packing.schedule.cost import CostModel, LatentAttention, TransformerShape
from megatron_packing.schedule.dp_balanced import dp_balanced
from megatron_packing.schedule.dynamic_cp import dynamic_cp
from megatron_packing.schedule.dynamic_cp import warm_up as _warm_up_dynamic_cp
from megatron_packing.schedule.first_fit import first_fit
from megatron_packing.schedule.groups import GroupSizes
from megatron_packing.schedule.items import Items, Units
from megatron_packing.schedule.metrics import Metrics, mean_metrics
from megatron_packing.schedule.offline import PackedSet, offline, pack_set
from megatron_packing.schedule.offline import warm_up as _warm_up_offline
from megatron_packing.schedule.plan import (
    GroupedPacks,
    Int64Array,
    Lengths,
    Microbatch,
    Pack,
    Plan,
    Planner,
    Problem,
    as_lengths,
    build_plan,
    check_plan,
    even_counts,
)
from megatron_packing.topology import Topology

__all__ = [
    "ATTENTION_ONLY",
    "BALANCES",
    "CHOOSES_GROUPS",
    "SCHEDULERS",
    "BalanceAdvice",
    "CostModel",
    "GroupSizes",
    "GroupedPacks",
    "LatentAttention",
    "Metrics",
    "Microbatch",
    "Pack",
    "PackedSet",
    "Plan",
    "Planner",
    "Problem",
    "TransformerShape",
    "check_plan",
    "check_scheduler",
    "check_trainable",
    "even_counts",
    "imbalance",
    "make_plan",
    "mean_metrics",
    "objective",
    "pack_set",
    "warm_up",
]

SCHEDULERS: dict[str, Planner] = {
    "first_fit": first_fit,
    "dp_balanced": dp_balanced,
    "balanced": balanced,
    "offline": offline,
    "dynamic_cp": dynamic_cp,
}
"""Every planner by name."""

_ALIASES = {"default_dynamic_cp": "dynamic_cp"}
"""Upstream's names for what a planner of ours does."""

CHOOSES_GROUPS = frozenset({"dynamic_cp"})
"""Planners that choose which DP x CP ranks share a pack: it may hold as much as all of them together."""

NOT_IN_TRAINING = {"offline": "it packs a whole set ahead of time, not a step's samples"}
"""Planners that training refuses, and why: `megatron-packing plan` still shows what they would do."""

_WARM_UPS: dict[str, Callable[[], None]] = {
    "balanced": _warm_up_balanced,
    "offline": _warm_up_offline,
    "dynamic_cp": _warm_up_dynamic_cp,
}
"""Planners with compiled loops, and what compiles them."""

# Sequence boundaries are int32 from Megatron-Core down to the attention kernels.
_BOUNDARY_LIMIT = 2**31

_ONE_RANK = Topology()
ATTENTION_ONLY = CostModel(linear=0, quadratic=1)
"""What counts as work where nothing is known of the model."""
_POWERS_OF_TWO = GroupSizes()


def make_plan(
    lengths: Lengths,
    scheduler: str = "first_fit",
    topology: Topology = _ONE_RANK,
    max_tokens_per_rank: int = 4096,
    max_seqs: int | None = None,
    microbatch_multiple: int = 1,
    cost: CostModel = ATTENTION_ONLY,
    balance: str = "auto",
    group_sizes: GroupSizes = _POWERS_OF_TWO,
    units: Lengths | None = None,
) -> Plan:
    """The checked plan of one optimizer step; equal arguments give equal plans on every rank and machine.

    Args:
        lengths: tokens of each sample, shape [N], in gather order. None at all gives a plan of dummies.
        scheduler: a name in `SCHEDULERS`, or upstream's for one of them.
        topology: gives the DP ranks to plan for and the alignment to pad to.
        max_tokens_per_rank: padded tokens that one rank may hold of a pack; a pack's capacity is CP times that.
        max_seqs: samples that a pack may hold; None means any number.
        microbatch_multiple: what the number of microbatches must be a multiple of.
        cost: what counts as work, for planners that balance and for the plan's metrics.
        balance: what planners that balance keep small, of `BALANCES`: the dearest rank's cost over the whole step, or
            in each microbatch. auto: the latter where ranks meet in every microbatch (PP, EP, FSDP).
        group_sizes: how many ranks may share a pack, for planners that choose them.
        units: how many samples, one after the other, must share a pack: shape [U], N in all; None: none must.

    Raises:
        ConfigError: an unknown scheduler or balance, a size below 1, a capacity that is no multiple of the alignment,
            or fewer `max_seqs` than a unit has samples.
        CapacityError: a sample or unit that fits in no pack, or a pack that could outgrow int32 boundaries.
        PackingError: lengths that are not integers of at least 1, units of other samples, or a planner that made a
            wrong plan.
    """
    started = perf_counter()
    scheduler = check_scheduler(scheduler)
    _check_sizes(max_tokens_per_rank=max_tokens_per_rank, microbatch_multiple=microbatch_multiple)
    if max_seqs is not None:
        _check_sizes(max_seqs=max_seqs)
    widest = topology
    if scheduler in CHOOSES_GROUPS:  # smaller groups then hold what fits them, too
        group_sizes.of(topology.dp * topology.cp)  # refuses a smallest group that does not divide the ranks
        widest = topology.widest
    widest.check_capacity(max_tokens_per_rank)
    objective(balance, topology)  # refuses an unknown one whatever the scheduler
    lengths = as_lengths(lengths)
    _check_fit(lengths, widest, max_tokens_per_rank)
    items = Items(lengths=lengths, units=None if units is None else Units.of(units, len(lengths)))
    if items.units is not None:
        _check_units_fit(items, items.units, widest, max_tokens_per_rank, max_seqs)
    tokens, padded = items.tokens(), items.padded(topology.alignment)
    for read_only in (tokens, padded):
        read_only.setflags(write=False)
    problem = Problem(
        items=items,
        lengths=tokens,
        padded=padded,
        topology=topology,
        capacity=max_tokens_per_rank * topology.cp,
        max_seqs=None if max_seqs is None else max_seqs // items.most_samples,
        microbatch_multiple=microbatch_multiple,
        cost=cost,
        group_sizes=group_sizes,
        balance=balance,
    )
    plan = build_plan(SCHEDULERS[scheduler](problem), problem, scheduler, max_seqs=max_seqs)
    check_plan(plan, lengths, max_seqs, microbatch_multiple)
    return replace(plan, plan_ms=(perf_counter() - started) * 1e3)


def warm_up(scheduler: str) -> None:
    """Do at start-up what `make_plan` would otherwise do in the first step: compile or load a planner's loops."""
    if scheduler in _WARM_UPS:
        _WARM_UPS[scheduler]()


def check_scheduler(name: str) -> str:
    """The name in `SCHEDULERS` of a planner.

    Args:
        name: that name, or upstream's.

    Raises:
        ConfigError: there is no such planner; lists those that there are.
    """
    return _planner(name, sorted(SCHEDULERS))


def check_trainable(name: str) -> str:
    """The name in `SCHEDULERS` of a planner that a run may use.

    Args:
        name: that name, or upstream's.

    Raises:
        ConfigError: there is no such planner, or training refuses it; says why, and which there are.
    """
    usable = sorted(SCHEDULERS.keys() - NOT_IN_TRAINING.keys())
    planner = _ALIASES.get(name, name)
    if planner in NOT_IN_TRAINING:
        raise ConfigError(
            f"--sequence-packing-scheduler {name}: {NOT_IN_TRAINING[planner]}. `megatron-packing plan --scheduler "
            f"{planner}` shows what it would do; train with one of: {', '.join(usable)}."
        )
    return _planner(name, usable)


def _planner(name: str, known: list[str]) -> str:
    planner = _ALIASES.get(name, name)
    if planner not in known:
        raise ConfigError(
            f"scheduler is {name!r}; it must be one of: {', '.join(known)}. Set --sequence-packing-scheduler to one of "
            "them."
        )
    return planner


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1.")


def _check_fit(lengths: Int64Array, topology: Topology, max_tokens_per_rank: int) -> None:
    """Every sample fits in a pack, and no pack can outgrow the boundaries. Nothing in here can wrap around."""
    capacity = max_tokens_per_rank * topology.cp
    # The capacity is a multiple of the alignment, so a length above it is a padded length above it and the reverse.
    too_long = (lengths > capacity).nonzero()[0]
    if too_long.size:
        first = int(too_long[0])
        tokens = int(lengths[first])
        raise CapacityError(
            f"Sample {first} has {tokens:,} tokens ({topology.pad(tokens):,} padded); a pack holds {capacity:,} = "
            f"{max_tokens_per_rank:,} per rank x CP {topology.cp} ({too_long.size:,} of {lengths.size:,} samples are "
            f"too long). Raise --max-seqlen-per-dp-cp-rank or set --packing-overlong truncate."
        )
    if capacity < _BOUNDARY_LIMIT:
        return
    total = sum(map(topology.pad, lengths.tolist()))  # Python integers: this sum may not fit in 64 bits
    if total >= _BOUNDARY_LIMIT:
        raise CapacityError(
            f"A pack could hold {min(total, capacity):,} padded tokens; its boundaries are int32 and end at "
            f"{_BOUNDARY_LIMIT - 1:,}. Lower --max-seqlen-per-dp-cp-rank (now {max_tokens_per_rank:,}, times CP "
            f"{topology.cp})."
        )


def _check_units_fit(
    items: Items, units: Units, topology: Topology, max_tokens_per_rank: int, max_seqs: int | None
) -> None:
    """Every unit fits in a pack; sums of samples that fit each cannot wrap around."""
    if max_seqs is not None and max_seqs < items.most_samples:
        raise ConfigError(
            f"--thd-max-packed-sequences {max_seqs}: {items.most_samples} samples of one row must share a pack. Raise "
            f"it to at least {items.most_samples}."
        )
    padded, capacity = items.padded(topology.alignment), max_tokens_per_rank * topology.cp
    too_long = (padded > capacity).nonzero()[0]
    if too_long.size:
        first = int(too_long[0])
        end, size = units.ends[first], units.sizes[first]
        raise CapacityError(
            f"Samples {end - size} to {end - 1}, which must share a pack, have {int(padded[first]):,} padded tokens; a "
            f"pack holds {capacity:,} = {max_tokens_per_rank:,} per rank x CP {topology.cp} ({too_long.size:,} such). "
            "Raise --max-seqlen-per-dp-cp-rank."
        )
