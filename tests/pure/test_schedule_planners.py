"""Does each planner do what its name says?"""

import time

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_packing.schedule import make_plan
from megatron_packing.topology import Topology
from tests.strategies import PlanningCase, plan_case, planning_cases


def groups(
    lengths: list[int], scheduler: str, dp: int = 1, capacity: int = 8, max_seqs: int | None = None, multiple: int = 1
) -> list[list[int]]:
    plan = make_plan(lengths, scheduler, Topology(dp=dp), capacity, max_seqs, multiple)
    return [list(pack.sample_ids) for pack in plan.packs]


def padded_of(case: PlanningCase) -> list[int]:
    return [case.topology.pad(length) for length in case.lengths]


def case_groups(case: PlanningCase, scheduler: str) -> list[list[int]]:
    plan = plan_case(case, scheduler)
    return [list(pack.sample_ids) for pack in plan.packs]


# First fit


def first_fit_by_definition(padded: list[int], capacity: int, max_seqs: int | None) -> list[list[int]]:
    """Look at every open pack from the first on."""
    packs: list[list[int]] = []
    for sample, tokens in enumerate(padded):
        for pack in packs:
            if sum(padded[s] for s in pack) + tokens <= capacity and (max_seqs is None or len(pack) < max_seqs):
                pack.append(sample)
                break
        else:
            packs.append([sample])
    return packs


@settings(max_examples=100)
@given(planning_cases())
def test_first_fit_takes_the_lowest_pack_with_room(case: PlanningCase) -> None:
    expected = first_fit_by_definition(padded_of(case), case.capacity, case.max_seqs)
    got = case_groups(case, "first_fit")
    unsplit = len(got) == len(expected)
    event(f"without a split: {unsplit}")
    if unsplit:
        assert got == expected
    # Splitting cuts packs in two and reorders nothing: the parts of a pack put together are the pack.
    whole = {sample: i for i, pack in enumerate(expected) for sample in pack}
    parts: dict[int, list[int]] = {i: [] for i in range(len(expected))}
    for pack in sorted(filter(None, got)):
        assert len({whole[s] for s in pack}) == 1
        parts[whole[pack[0]]] += pack
    assert [parts[i] for i in range(len(expected))] == expected


def test_first_fit_fills_the_gaps_of_earlier_packs() -> None:
    assert groups([5, 6, 3, 2, 1], "first_fit") == [[0, 2], [1, 3], [4]]


def test_first_fit_halves_the_fullest_pack_first() -> None:
    # Packs before the split: [0, 1] of 8 tokens and [2, 3, 4, 5] of 7; the third and fourth come off the end.
    assert groups([4, 4, 1, 2, 2, 2], "first_fit", dp=4) == [[0], [2, 3], [1], [4, 5]]


def test_first_fit_halves_the_halves_again() -> None:
    assert sorted(groups([1] * 8, "first_fit", dp=8)) == [[i] for i in range(8)]


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([1, 1, 1, 5], [[0, 1, 2], [3]]),
        ([5, 1, 1, 1], [[0], [1, 2, 3]]),
        ([2, 2, 2, 2], [[0, 1], [2, 3]]),
        ([2, 2, 2], [[0], [1, 2]]),  # two cuts are equally good: the earlier one
    ],
)
def test_first_fit_cuts_where_the_parts_are_most_alike(lengths: list[int], parts: list[list[int]]) -> None:
    assert groups(lengths, "first_fit", dp=2) == parts


# dp_balanced


def megatron_groups(padded: list[int], capacity: int, max_seqs: int | None, multiple: int) -> list[list[int]] | None:
    """Megatron-LM's grouping, said once more: None where it stops for want of samples to move."""
    closed, start = [], 0
    while start < len(padded):
        end = start + 1
        while (
            end < len(padded)
            and sum(padded[start : end + 1]) <= capacity
            and (max_seqs is None or end - start < max_seqs)
        ):
            end += 1
        closed.append(list(range(start, end)))
        start = end
    movable = [s for pack in reversed(closed) for s in reversed(pack[1:])]
    missing = -len(closed) % multiple
    if missing > len(movable):
        return None
    moved = movable[:missing]
    return [[s for s in pack if s not in moved] for pack in closed] + [[s] for s in moved]


@settings(max_examples=150)
@given(planning_cases())
def test_dp_balanced_makes_upstreams_groups(case: PlanningCase) -> None:
    multiple = case.topology.dp * case.microbatch_multiple
    expected = megatron_groups(padded_of(case), case.capacity, case.max_seqs, multiple)
    got = case_groups(case, "dp_balanced")
    event(f"upstream stops: {expected is None}")
    if not case.lengths:
        assert got == [[]] * multiple
    elif expected is None:
        # Every sample is alone and the rest are dummies.
        assert [len(pack) for pack in got] == [1] * len(case.lengths) + [0] * (len(got) - len(case.lengths))
    else:
        assert got == expected


def test_dp_balanced_never_looks_back() -> None:
    assert groups([5, 6, 2, 1], "dp_balanced") == [[0], [1, 2], [3]]


def test_dp_balanced_moves_single_samples_from_the_end() -> None:
    # Before: [0, 1, 2, 3], [4, 5]. The last pack gives one, then the first gives two.
    assert groups([2] * 4 + [4, 4], "dp_balanced", dp=5) == [[0, 1], [4], [5], [3], [2]]


# Both


@pytest.mark.parametrize("scheduler", ["first_fit", "dp_balanced"])
def test_max_seqs_closes_a_pack_with_room(scheduler: str) -> None:
    assert groups([1, 1, 1, 1, 1], scheduler, max_seqs=2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("scheduler", ["first_fit", "dp_balanced"])
def test_microbatch_multiple(scheduler: str) -> None:
    assert len(groups([8] * 5, scheduler, dp=2)) == 6
    assert len(groups([8] * 5, scheduler, dp=2, multiple=4)) == 8


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_five_thousand_samples_take_no_second(seed: int) -> None:
    lengths = [1 + (seed * (i + 1) * 2654435761) % 4096 for i in range(5000)]
    start = time.process_time()
    make_plan(lengths, "first_fit", Topology(dp=8))
    # About 20 ms; a scan over all packs for each sample would take seconds.
    assert time.process_time() - start < 1
