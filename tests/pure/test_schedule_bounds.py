"""Do the bounds hold, and are they worth having? Against every plan of small instances."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from megatron_packing.schedule import CostModel, make_plan
from megatron_packing.schedule.bounds import lockstep_lower_bound, packs_lower_bound, step_lower_bound
from megatron_packing.topology import Topology
from tests.strategies import PlanningCase, plan_case, planning_cases

type Partition = list[list[int]]


def partitions(tokens: list[int], capacity: int, max_seqs: int | None) -> Iterator[Partition]:
    """Every way to put the samples in packs that may be run, packs unordered."""

    def place(sample: int, packs: Partition) -> Iterator[Partition]:
        if sample == len(tokens):
            yield [list(pack) for pack in packs]
            return
        for pack in packs:
            if sum(tokens[s] for s in pack) + tokens[sample] <= capacity and (max_seqs is None or len(pack) < max_seqs):
                pack.append(sample)
                yield from place(sample + 1, packs)
                pack.pop()
        packs.append([sample])
        yield from place(sample + 1, packs)
        packs.pop()

    return place(0, [])


def best_lockstep(tokens: list[int], costs: list[float], dp: int, capacity: int, max_seqs: int | None) -> float:
    """Of one partition, rows of the dearest packs together are best: the sum of every dp-th pack's cost."""
    best = float("inf")
    for packs in partitions(tokens, capacity, max_seqs):
        dearest = sorted((sum(costs[s] for s in pack) for pack in packs), reverse=True)
        best = min(best, sum(dearest[::dp]))
    return best / (sum(costs) / dp)


def best_step(tokens: list[int], costs: list[float], dp: int, capacity: int, num_microbatches: int) -> float:
    """Every assignment of samples to ranks whose samples fit in num_microbatches packs."""
    fits: dict[tuple[int, ...], bool] = {}

    def fit(ids: tuple[int, ...]) -> bool:
        if ids not in fits:
            ways = partitions([tokens[s] for s in ids], capacity, None)
            fits[ids] = any(len(packs) <= num_microbatches for packs in ways)
        return fits[ids]

    best = float("inf")

    def place(sample: int, ranks: list[tuple[int, ...]]) -> None:
        nonlocal best
        if sample == len(tokens):
            if all(map(fit, ranks)):
                best = min(best, max(sum(costs[s] for s in ids) for ids in ranks))
            return
        for r in range(dp):
            place(sample + 1, [*ranks[:r], (*ranks[r], sample), *ranks[r + 1 :]])
            if not ranks[r]:
                break  # the ranks that are still empty are alike

    place(0, [()] * dp)
    return best / (sum(costs) / dp)


small = st.lists(st.one_of(st.integers(1, 12), st.sampled_from([4, 5, 6, 7, 12])), min_size=1, max_size=7)
some_costs = st.sampled_from([CostModel(linear=0, quadratic=1), CostModel(linear=20, quadratic=1)])
alignments = st.sampled_from([1, 1, 3, 4])  # 12 is a multiple of each


def padded(lengths: list[int], alignment: int) -> np.ndarray:
    return -(-np.array(lengths) // alignment) * alignment


@settings(max_examples=80)
@given(small, st.sampled_from([None, None, 1, 2, 3]))
def test_packs_bound_holds(tokens: list[int], max_seqs: int | None) -> None:
    best = min(len(packs) for packs in partitions(tokens, 12, max_seqs))
    bound = packs_lower_bound(np.array(tokens), 12, max_seqs)
    event(f"exact: {bound == best}")
    assert 1 <= bound <= best
    assert bound >= -(-sum(tokens) // 12)


@settings(max_examples=80)
@given(small, alignments, some_costs, st.integers(1, 3), st.sampled_from([None, None, 1, 2]))
def test_lockstep_bound_holds(
    lengths: list[int], alignment: int, cost: CostModel, dp: int, max_seqs: int | None
) -> None:
    tokens, costs = padded(lengths, alignment), cost.of(lengths)
    best = best_lockstep(tokens.tolist(), costs.tolist(), dp, 12, max_seqs)
    bound = lockstep_lower_bound(tokens, costs, dp=dp, capacity=12, max_seqs=max_seqs)
    event(f"exact: {bound > best - 1e-9}, above 1: {best > 1 + 1e-9}")
    assert 1 - 1e-9 <= bound <= best + 1e-9
    # Stopping early weakens the bound and no more.
    bounds = [
        lockstep_lower_bound(tokens, costs, dp=dp, capacity=12, max_seqs=max_seqs, num_microbatches=m)
        for m in range(1, 9)
    ]
    assert bounds == sorted(bounds)
    assert 1 - 1e-9 <= bounds[0] <= bounds[-1] == bound


@settings(max_examples=80)
@given(small, alignments, some_costs, st.integers(1, 3), st.integers(1, 3))
def test_step_bound_holds(lengths: list[int], alignment: int, cost: CostModel, dp: int, microbatches: int) -> None:
    tokens, costs = padded(lengths, alignment), cost.of(lengths)
    best = best_step(tokens.tolist(), costs.tolist(), dp, 12, microbatches)
    assume(best < float("inf"))
    bound = step_lower_bound(tokens, costs, dp=dp, capacity=12, num_microbatches=microbatches)
    event(f"exact: {bound > best - 1e-9}, above 1: {best > 1 + 1e-9}")
    assert 1 - 1e-9 <= bound <= best + 1e-9


@settings(max_examples=40)
@given(planning_cases(), st.sampled_from(["first_fit", "dp_balanced", "balanced"]))
def test_no_plan_beats_the_bounds(case: PlanningCase, scheduler: str) -> None:
    plan = plan_case(case, scheduler)
    metrics = plan.metrics(case.lengths)
    assert metrics.packs_lower_bound <= metrics.packs
    assert metrics.lockstep_lower_bound <= metrics.lockstep_imbalance + 1e-9
    if case.lengths:
        step = step_lower_bound(
            padded(case.lengths, case.topology.alignment),
            plan.cost.of(case.lengths),
            dp=case.topology.dp,
            capacity=plan.capacity,
            num_microbatches=plan.num_microbatches,
        )
        assert step <= metrics.step_imbalance + 1e-9


# A bound of 1 would pass everything above: what the bounds must see


@pytest.mark.parametrize(
    ("tokens", "max_seqs", "bound"),
    [
        ([4, 4, 4], None, 1),  # total tokens
        ([7, 7, 7], None, 3),  # no two share a pack
        ([8, 8, 5, 5], None, 3),  # 5 fits beside no 8, and total tokens say 3 as well
        ([9, 9, 9, 6, 6, 6], None, 5),  # total tokens say 4: the 6s pair up beside nothing else
        ([6, 6, 6], None, 2),  # exactly half fits twice
        ([1] * 7, 2, 4),  # samples a pack
        ([12], None, 1),
        ([], None, 0),
    ],
)
def test_packs_bound_sees(tokens: list[int], max_seqs: int | None, bound: int) -> None:
    assert packs_lower_bound(np.array(tokens, dtype=np.int64), 12, max_seqs) == bound


SQUARES = CostModel(linear=0, quadratic=1)


@pytest.mark.parametrize(
    ("tokens", "dp", "max_seqs", "bound"),
    [
        ([6, 6], 2, None, 1.0),
        ([12, 1], 2, None, 144 / 72.5),  # one long sample: its row takes as long as it
        # The three of 9 take two rows of two ranks: 81 + 81 over the mean, although no sample is dearer than 81.
        ([9, 9, 9], 2, None, 2 * 81 / (3 * 81 / 2)),
        # One row with the 12 carries 216 of 432 at most; two ranks share the rest, in rows of their own.
        ([12] + [6] * 8, 2, None, (144 + 216 / 2) / 216),
        ([2, 2, 2], 2, 1, 2 * 4 / (3 * 4 / 2)),  # max_seqs alone makes two rows
        ([3, 3, 3, 3, 3], 1, None, 1.0),
    ],
)
def test_lockstep_bound_sees(tokens: list[int], dp: int, max_seqs: int | None, bound: float) -> None:
    array = np.array(tokens)
    got = lockstep_lower_bound(array, SQUARES.of(array), dp=dp, capacity=12, max_seqs=max_seqs)
    assert got == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize(
    ("tokens", "dp", "num_microbatches", "bound"),
    [
        ([6, 6], 2, 1, 1.0),
        ([12, 1], 2, 1, 144 / 72.5),
        # The other rank holds 12 tokens, so the rank of the 8 must hold 4 more: 64 + 4 at least, of 80 in all.
        ([8] + [1] * 16, 2, 1, (64 + 4) / 40),
        ([8] + [1] * 16, 2, 2, 64 / 40),
        ([9, 8, 7, 1], 2, 2, (64 + 49) / 97.5),  # of three that are dearer than the rest two are on one rank
        ([9, 9, 9, 9, 9, 1], 2, 4, 3 * 81 / 203),  # of five three are
    ],
)
def test_step_bound_sees(tokens: list[int], dp: int, num_microbatches: int, bound: float) -> None:
    array = np.array(tokens)
    got = step_lower_bound(array, SQUARES.of(array), dp=dp, capacity=12, num_microbatches=num_microbatches)
    assert got == pytest.approx(bound, rel=1e-9)


def test_nothing_to_do_is_perfect() -> None:
    array = np.array([3, 4])
    assert lockstep_lower_bound(array, np.zeros(2), dp=2, capacity=12) == 1.0
    assert step_lower_bound(array, np.zeros(2), dp=2, capacity=12, num_microbatches=1) == 1.0


def test_whole_corpora_are_bounded_in_no_time() -> None:
    lengths = np.arange(1, 200_001) % 4096 + 1
    plan = make_plan(lengths[:20_000], topology=Topology(dp=8))
    assert plan.metrics(lengths[:20_000]).lockstep_lower_bound >= 1
    assert packs_lower_bound(lengths, 4096) >= -(-lengths.sum() // 4096)
