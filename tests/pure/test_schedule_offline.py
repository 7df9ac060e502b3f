"""Are whole sets packed validly, by the rule that is claimed, and as tightly?"""

from collections import Counter
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_packing.schedule import best_fit, depth_capped
from megatron_packing.schedule.best_fit import best_fit_decreasing
from megatron_packing.schedule.bounds import packs_lower_bound
from megatron_packing.schedule.offline import PackedSet, pack_set
from tests import strategies

needs_scipy = pytest.mark.skipif(
    not depth_capped.has_scipy(), reason="SciPy is not installed (pip install 'megatron-packing[lp]')"
)


def as_int64(lengths: list[int]) -> np.ndarray:
    return np.array(lengths, dtype=np.int64)


@st.composite
def sets(draw: st.DrawFn, max_size: int = 60, max_capacity: int = 200) -> tuple[list[int], int]:
    """Lengths and a capacity that holds each; rooms cross words of the bitmap."""
    capacity = draw(st.integers(1, max_capacity))
    return draw(strategies.lengths(max_length=capacity, max_size=max_size)), capacity


def assert_valid(packed: PackedSet, lengths: list[int], capacity: int, max_seqs: int | None) -> None:
    packs = [pack.tolist() for pack in packed]
    assert len(packs) == len(packed)
    assert Counter(s for pack in packs for s in pack) == Counter(range(len(lengths)))
    for pack in packs:
        assert pack == sorted(pack) != []
        assert sum(lengths[s] for s in pack) <= capacity
        assert max_seqs is None or len(pack) <= max_seqs


def by_definition(lengths: list[int], capacity: int) -> list[int]:
    """The tokens of each pack, ascending, of best fit by looking at every pack. Packs of equal room are alike."""
    packs: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [pack for pack, tokens in enumerate(packs) if tokens + length <= capacity]
        if fitting:
            packs[max(fitting, key=packs.__getitem__)] += length
        else:
            packs.append(length)
    return sorted(packs)


def fewest_packs(lengths: list[int], capacity: int, max_seqs: int) -> int:
    """By trying: the longest sample that is left goes into each pack that could take it, or a new one."""
    ordered = sorted(lengths, reverse=True)
    best = len(lengths)

    def place(i: int, packs: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(packs) >= best:
            return
        if i == len(ordered):
            best = len(packs)
            return
        for k, (tokens, count) in enumerate(packs):
            if (tokens, count) not in packs[:k] and tokens + ordered[i] <= capacity and count < max_seqs:
                place(i + 1, [*packs[:k], (tokens + ordered[i], count + 1), *packs[k + 1 :]])
        place(i + 1, [*packs, (ordered[i], 1)])

    place(0, [])
    return best


# Best fit


@settings(max_examples=150)
@given(sets())
def test_best_fit_is_best_fit_by_definition(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packed = pack_set(as_int64(lengths), capacity)
    assert_valid(packed, lengths, capacity, None)
    assert sorted(sum(lengths[s] for s in pack.tolist()) for pack in packed) == by_definition(lengths, capacity)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=40), st.integers(300_000, 700_000))
def test_rooms_far_apart_are_found(lengths: list[int], capacity: int) -> None:
    # Three levels of the bitmap: a room may be 64 * 64 * 64 away from the next.
    pack_of, packs = best_fit_decreasing(as_int64(lengths), capacity)
    loads = np.bincount(pack_of, weights=lengths).astype(int).tolist()
    assert len(loads) == packs
    assert sorted(loads) == by_definition(lengths, capacity)


@pytest.mark.parametrize(("longest", "capacity"), [(300, 1000), (6000, 20_000), (100_000, 300_000)])
def test_many_open_packs_are_told_apart(longest: int, capacity: int) -> None:
    # Rooms share words of the bitmap, and a word must not be forgotten with one of its rooms.
    lengths = np.random.default_rng(longest).integers(1, longest, 1200)
    pack_of, packs = best_fit_decreasing(lengths, capacity)
    assert sorted(np.bincount(pack_of, weights=lengths, minlength=packs)) == by_definition(lengths.tolist(), capacity)


@settings(max_examples=60)
@given(sets(), st.integers(1, 4))
def test_a_cap_on_samples_holds_in_best_fit(case: tuple[list[int], int], max_seqs: int) -> None:
    lengths, capacity = case
    pack_of, packs = best_fit_decreasing(as_int64(lengths), capacity, max_seqs)
    assert_valid(
        PackedSet(**dict(zip(("sample_ids", "ends"), best_fit.by_pack(pack_of, packs), strict=True))),
        lengths,
        capacity,
        max_seqs,
    )
    assert packs >= packs_lower_bound(as_int64(lengths), capacity, max_seqs)


@settings(max_examples=60)
@given(sets(), st.integers(1, 3), st.data())
def test_open_packs_are_filled_up_before_new_ones_open(
    case: tuple[list[int], int], open_packs: int, data: st.DataObject
) -> None:
    lengths, capacity = case
    pack_of = np.full(len(lengths), -1, dtype=np.int32)
    room = [capacity] * open_packs
    for sample, length in enumerate(lengths):
        pack = data.draw(st.integers(-1, open_packs - 1))
        if pack >= 0 and room[pack] >= length:
            pack_of[sample], room[pack] = pack, room[pack] - length
    before = pack_of.copy()
    packs = best_fit.fill_up(as_int64(lengths), capacity, len(lengths) + 1, pack_of, open_packs)
    assert (pack_of[before >= 0] == before[before >= 0]).all()
    assert ((pack_of >= 0) & (pack_of < packs)).all()
    loads = np.bincount(pack_of, weights=lengths, minlength=packs)
    assert loads.max(initial=0) <= capacity
    longest_of_new = [max(lengths[s] for s in np.flatnonzero(pack_of == p)) for p in range(open_packs, packs)]
    assert all(capacity - loads[p] < longest for p in range(open_packs) for longest in longest_of_new)


@settings(max_examples=8)
@given(sets(max_size=20, max_capacity=50), st.integers(2**23, 2**40))
def test_packs_beyond_the_tables_are_counted_in_units(case: tuple[list[int], int], factor: int) -> None:
    lengths, capacity = [s * factor for s in case[0]], case[1] * factor
    assert_valid(pack_set(as_int64(lengths), capacity), lengths, capacity, None)
    assert len(pack_set(as_int64([capacity] * 3), capacity)) == 3


@pytest.mark.parametrize("lengths", [[], [5]])
def test_few_samples(lengths: list[int]) -> None:
    assert [pack.tolist() for pack in pack_set(as_int64(lengths), 5)] == [[0]][: len(lengths)]


# Few samples to a pack


@needs_scipy
@settings(max_examples=40)
@given(sets(), st.integers(1, 4))
def test_every_cap_holds_in_the_program(case: tuple[list[int], int], max_seqs: int) -> None:
    lengths, capacity = case
    if not lengths:
        return
    pack_of, packs = depth_capped.depth_capped(as_int64(lengths), capacity, max_seqs)
    sample_ids, ends = best_fit.by_pack(pack_of, packs)
    assert_valid(PackedSet(sample_ids=sample_ids, ends=ends), lengths, capacity, max_seqs)


@needs_scipy
@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(20, 30), st.integers(1, 4))
def test_the_programs_bound_is_one(lengths: list[int], capacity: int, max_seqs: int) -> None:
    strategy = depth_capped.solve(np.bincount(lengths, minlength=capacity + 1), max_seqs)
    fewest = fewest_packs(lengths, capacity, max_seqs)
    event(f"above the rounded bound: {fewest - np.ceil(strategy.lower_bound - 1e-6):.0f}")
    assert strategy.lower_bound <= fewest + 1e-6
    assert strategy.lower_bound >= packs_lower_bound(as_int64(lengths), capacity, max_seqs) - 1 - 1e-6
    assert fewest <= len(pack_set(as_int64(lengths), capacity, max_seqs))


@needs_scipy
@pytest.mark.parametrize("max_seqs", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_program_reaches_the_optimum_over_all_patterns(seed: int, max_seqs: int) -> None:
    from scipy.optimize import linprog

    capacity = 20
    rng = np.random.default_rng(seed)
    counts = np.concatenate([[0], rng.integers(0, 100, capacity) * rng.integers(0, 2, capacity)])
    patterns = [
        np.bincount(chosen, minlength=capacity + 1)[1:]
        for chosen in combinations_with_replacement(range(capacity + 1), max_seqs)
        if 0 < sum(chosen) <= capacity
    ]
    every = linprog(np.ones(len(patterns)), A_ub=-np.array(patterns).T, b_ub=-counts[1:], method="highs")
    strategy = depth_capped.solve(counts, max_seqs)
    assert strategy.value == pytest.approx(every.fun, rel=1e-5)
    assert strategy.lower_bound == pytest.approx(strategy.value, rel=1e-5)


@needs_scipy
def test_a_bound_of_a_search_that_is_cut_short_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.concatenate([[0], np.random.default_rng(0).integers(1, 100, 60)])
    optimum = depth_capped.solve(counts, 3)
    monkeypatch.setattr(depth_capped, "_ROUNDS", 1)
    short = depth_capped.solve(counts, 3)
    assert short.lower_bound <= optimum.value * (1 + 1e-9) <= short.value * (1 + 1e-6)
    assert short.lower_bound < short.value * (1 - 1e-4)  # cut short indeed
    lengths = np.repeat(np.arange(61), counts)
    pack_of, packs = depth_capped.depth_capped(lengths, 60, 3)
    assert np.bincount(pack_of, weights=lengths).max() <= 60
    assert optimum.value <= packs


@needs_scipy
def test_the_program_beats_best_fit_where_the_cap_binds() -> None:
    # Best fit pairs the two longest that fit; three of a pack then never fill it.
    lengths = as_int64([60] * 30 + [30] * 30 + [10] * 30)
    assert best_fit_decreasing(lengths, 100, 3)[1] == 30
    lengths = as_int64([6, 5, 4, 3, 3, 3] * 20)
    assert len(pack_set(lengths, 12, 3)) == packs_lower_bound(lengths, 12, 3) == 40


@needs_scipy
def test_coarse_units_still_use_the_room_that_rounding_leaves() -> None:
    lengths = np.random.default_rng(0).integers(1, 60_000, 3000)
    packed = pack_set(lengths, 100_000, 3)
    assert_valid(packed, lengths.tolist(), 100_000, 3)
    assert len(packed) <= best_fit_decreasing(lengths, 100_000, 3)[1]
