"""A shuffled epoch holds each row once, in an order of its own, and each order is as likely as another."""

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data.order import describe_epochs, shuffled_row


def epoch_of(rows: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return [shuffled_row(place, rows, seed=seed, epoch=epoch) for place in range(rows)]


@given(rows=st.integers(1, 300), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_each_row_once(rows: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(rows, seed=seed, epoch=epoch)) == list(range(rows))


@given(st.data(), st.integers(2, 2**40))
def test_rows_of_a_huge_file_need_no_memory_and_do_not_collide(data: st.DataObject, rows: int) -> None:
    places = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=20))
    found = [shuffled_row(place, rows, seed=1, epoch=2) for place in places]
    assert len(set(found)) == len(places)
    assert all(0 <= row < rows for row in found)


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_every_order_is_about_as_likely(rows: int) -> None:
    """Each of the rows! orders, some 60 times over the epochs; Python's own shuffle is the yardstick."""
    orders = math.factorial(rows)
    ours = Counter(tuple(epoch_of(rows, epoch=epoch)) for epoch in range(60 * orders))
    plain = random.Random(1)
    theirs = Counter(tuple(plain.sample(range(rows), rows)) for _ in range(60 * orders))
    assert len(ours) == orders
    assert _unevenness(ours) < 2 * _unevenness(theirs) + 1


def _unevenness(counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square over its degrees of freedom: about 1 for even odds."""
    return sum((count - 60) ** 2 / 60 for count in counts.values()) / (len(counts) - 1)


def test_epochs_seeds_and_neighbours_are_unlike_each_other() -> None:
    rows = 1000
    some = [epoch_of(rows, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0))]
    for number, order in enumerate([list(range(rows)), *some]):
        for other in some[number:]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 10  # 1 on average
    for order in some:
        assert sum(after == before + 1 for before, after in itertools.pairwise(order)) < 10


def test_the_order_is_the_same_for_ever() -> None:
    """A run that resumes under another version must go on with its own order."""
    assert epoch_of(10, seed=1234, epoch=0) == [int(x) for x in "5368714290"]
    assert epoch_of(10, seed=1234, epoch=1) == [int(x) for x in "2174083659"]


@pytest.mark.parametrize("place", [-1, 5])
def test_no_place_outside_the_epoch(place: int) -> None:
    with pytest.raises(IndexError, match="epoch of 5 rows"):
        shuffled_row(place, 5, seed=0, epoch=0)


def test_the_tail_of_an_epoch_is_told() -> None:
    assert describe_epochs(8_000, 8) == "an epoch of 8,000 rows is 1,000 steps of 8"
    assert "10 rows is 2 steps of 4 and 2 rows left" in describe_epochs(10, 4)
    assert "0 steps of 4 and 3 rows left" in describe_epochs(3, 4)
