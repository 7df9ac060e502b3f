"""What does a plan cost? Fill, waste by cause and imbalance; O(N log N), about 3 ms for 5,000 samples.

Legend: N samples, P packs, M microbatches, D data-parallel ranks. Slots are places for tokens: packs x capacity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np

from megatron_packing.errors import PackingError
from megatron_packing.schedule.bounds import grouped_lower_bound, lockstep_lower_bound, packs_lower_bound
from megatron_packing.schedule.items import Items
from megatron_packing.schedule.plan import Int64Array, Lengths, Plan, as_lengths, digest_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a plan costs; of several plans (`mean_metrics`), the mean over steps unless a field says otherwise.

    Every slot is accounted for: packs x capacity = real tokens + alignment_waste + tail_waste + dummy_waste. Where the
    planner chose groups, each pack counts with the capacity of its own.
    """

    steps: int
    """Optimizer steps: 1 for one plan; summed."""
    microbatches_per_rank: float
    packs: float
    """Packs that run, dummies included."""
    packs_lower_bound: float
    """Packs that any plan needs to hold the samples, before rounding up to even counts."""
    fill: float
    """Real tokens / slots of all packs, dummies included. 1.0 is perfect."""
    max_pack_load: float
    """The largest padded pack / capacity: never above 1. Over several plans the largest."""
    padding_tokens: float
    """Tokens that run and are not real: alignment, and one unit of alignment for each dummy."""
    step_imbalance: float
    """The busiest rank's cost over the step / the mean rank's: what dense data parallelism waits for. 1.0: perfect.
    What ranks send each other is in the busiest rank's cost and not in the mean, as it is no work of the samples."""
    lockstep_imbalance: float
    """Sum over microbatches of the busiest rank's cost / the mean rank's cost. What a step takes where ranks meet in
    every microbatch: expert parallelism, sharded parameters. 1.0: perfect."""
    lockstep_lower_bound: float
    """No plan of these samples has a smaller lockstep imbalance."""
    dropped: int
    """Samples that were left out before planning; summed."""
    plan_ms: float = field(compare=False)
    """Milliseconds that planning took."""
    alignment_waste: float
    """Slots between a sample's length and its padded length. Not in `as_dict`."""
    tail_waste: float
    """Slots that packs with samples leave free. They do not run. Not in `as_dict`."""
    dummy_waste: float
    """Slots of dummies, of which one unit of alignment each runs. Not in `as_dict`."""

    def as_dict(self) -> dict[str, int | float]:
        """The twelve figures that reports carry, by name."""
        return {
            "steps": self.steps,
            "microbatches_per_rank": self.microbatches_per_rank,
            "packs": self.packs,
            "packs_lower_bound": self.packs_lower_bound,
            "fill": self.fill,
            "max_pack_load": self.max_pack_load,
            "padding_tokens": self.padding_tokens,
            "step_imbalance": self.step_imbalance,
            "lockstep_imbalance": self.lockstep_imbalance,
            "lockstep_lower_bound": self.lockstep_lower_bound,
            "dropped": self.dropped,
            "plan_ms": self.plan_ms,
        }


def measure(plan: Plan, lengths: Lengths, *, dropped: int = 0) -> Metrics:
    """The metrics of one plan, whose samples have these lengths in tokens.

    Raises:
        PackingError: these are not the lengths that were planned.
    """
    lengths_N = as_lengths(lengths)
    if plan.lengths_digest != digest_lengths(lengths_N):
        raise PackingError(f"The plan was made of other lengths than these {lengths_N.size}; hand in the same.")
    packs = plan.packs
    slots = plan.num_microbatches * plan.topology.dp * plan.capacity
    real, running = int(lengths_N.sum()), sum(pack.padded_tokens for pack in packs)
    dummies = [pack for pack in packs if pack.is_dummy]
    padded = running - sum(pack.padded_tokens for pack in dummies)
    dummy_waste = sum(plan.capacity_of(pack) for pack in dummies)
    step, lockstep = _imbalance(plan, lengths_N)
    packs_bound, lockstep_bound = _bounds(plan, lengths_N)
    return Metrics(
        steps=1,
        microbatches_per_rank=plan.num_microbatches,
        packs=len(packs),
        packs_lower_bound=packs_bound,
        fill=real / slots,
        max_pack_load=max(pack.padded_tokens / plan.capacity_of(pack) for pack in packs),
        padding_tokens=running - real,
        step_imbalance=step,
        lockstep_imbalance=lockstep,
        lockstep_lower_bound=lockstep_bound,
        dropped=dropped,
        plan_ms=plan.plan_ms,
        alignment_waste=padded - real,
        tail_waste=slots - dummy_waste - padded,
        dummy_waste=dummy_waste,
    )


def _imbalance(plan: Plan, lengths_N: Int64Array) -> tuple[float, float]:
    """Step and lockstep imbalance; 1.0 both where nothing costs anything."""
    sizes_P = [len(pack.sample_ids) for pack in plan.packs]
    ranks_P = np.array([plan.cp_size_of(pack) for pack in plan.packs])
    ids_N = np.fromiter(chain.from_iterable(pack.sample_ids for pack in plan.packs), dtype=np.int64)
    pack_of_N = np.repeat(np.arange(len(sizes_P)), sizes_P)
    costs_N = plan.cost.of(lengths_N)
    total_P = np.bincount(pack_of_N, weights=costs_N[ids_N], minlength=len(sizes_P))
    tokens_P = np.bincount(pack_of_N, weights=lengths_N[ids_N], minlength=len(sizes_P))
    costs_P = total_P / ranks_P + np.where(ranks_P > 1, plan.cost.communication * tokens_P, 0.0)
    # Of every rank in every microbatch; DP ranks stand for their CP ranks where all groups are theirs.
    width = plan.topology.dp if plan.group_sizes is None else plan.topology.dp * plan.topology.cp
    costs_MR = np.repeat(costs_P, 1 if plan.group_sizes is None else ranks_P).reshape(plan.num_microbatches, width)
    mean = total_P.sum() / (plan.topology.dp * plan.topology.cp)
    if mean == 0:
        return 1.0, 1.0
    return float(costs_MR.sum(axis=0).max() / mean), float(costs_MR.max(axis=1).sum() / mean)


def _bounds(plan: Plan, lengths_N: Int64Array) -> tuple[int, float]:
    """Lower bounds on packs and on lockstep imbalance, for plans of this kind."""
    items, topology = Items(lengths=lengths_N, units=plan.units), plan.topology
    costs_N = items.work(plan.cost)
    by_count = -(-len(lengths_N) // plan.max_seqs) if plan.max_seqs else 0
    if plan.group_sizes is not None:
        sizes, tokens_N = plan.group_sizes.of(topology.dp * topology.cp), items.tokens()
        room = plan.max_tokens_per_rank * sizes[-1]
        return max(-(-int(lengths_N.sum()) // room), by_count), grouped_lower_bound(
            tokens_N,
            costs_N,
            plan.cost.communication * tokens_N.astype(np.float64),
            sizes=sizes,
            max_tokens_per_rank=plan.max_tokens_per_rank,
        )
    padded_N = items.padded(topology.alignment)
    most = None if plan.max_seqs is None else plan.max_seqs // items.fewest_samples
    return max(packs_lower_bound(padded_N, plan.capacity, most), by_count), lockstep_lower_bound(
        padded_N, costs_N, dp=topology.dp, capacity=plan.capacity, max_seqs=most
    )


def mean_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """One `Metrics` for several steps: means, except that steps and dropped add up and max_pack_load is the largest.

    Raises:
        PackingError: there are none.
    """
    if not metrics:
        raise PackingError("mean_metrics was given 0 metrics; it needs at least 1.")
    combine: dict[str, Callable[[list[Any]], Any]] = {"steps": sum, "dropped": sum, "max_pack_load": max}
    names = [one.name for one in fields(Metrics)]
    return Metrics(**{name: combine.get(name, _mean)([getattr(one, name) for one in metrics]) for name in names})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
