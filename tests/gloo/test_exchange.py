import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.comm.lengths import GatheredLengths
from tests.gloo import tasks
from tests.gloo.pool import GlooPool
from tests.gloo.tasks import Sample

pytestmark = pytest.mark.gloo


def bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


# Weights whose bits a detour through integers or other floats would lose: -0.0, a denormal, NaN, infinity, 1/3.
WEIGHTS = [bits(w) for w in (0.0, 1.0, -0.0, 1e-45, float("nan"), float("inf"), 1 / 3)]
IDS = st.one_of(st.integers(0, 300_000), st.sampled_from([0, 2**31 - 1]))
LABELS = st.one_of(IDS, st.just(-100))  # the id that other datasets mask a label with

samples = st.lists(st.tuples(IDS, LABELS, st.sampled_from(WEIGHTS)), min_size=1, max_size=5).map(
    lambda rows: tuple(list(column) for column in zip(*rows, strict=True))
)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[list[tuple[int, Sample]]], list[frozenset[int]]]:
    """What each of 1 to 4 ranks drew, in any order, and where each sample goes. Ranks may draw or get nothing."""
    ranks = draw(st.integers(1, 4))
    counts = [draw(st.integers(0, 4)) for _ in range(ranks)]
    to = st.frozensets(st.integers(0, ranks - 1), min_size=1)
    destinations = [draw(to) for _ in range(sum(counts))]
    ids = itertools.count()
    of_rank = [draw(st.permutations([(next(ids), draw(samples)) for _ in range(count)])) for count in counts]
    return of_rank, destinations


def exchange(pool: GlooPool, of_rank: list[list[tuple[int, Sample]]], destinations: list[frozenset[int]]) -> list[dict]:
    by_id = dict(itertools.chain.from_iterable(of_rank))
    gathered = GatheredLengths(
        lengths=tuple(len(by_id[i][0]) for i in range(len(by_id))),
        targets=tuple(0 for _ in by_id),
        joined=tuple(False for _ in by_id),
        counts=tuple(len(mine) for mine in of_rank),
    )
    ranks = len(of_rank)
    return pool.run(tasks.exchange, destinations, gathered, ranks, of_rank=of_rank, ranks=ranks)


@given(case=exchanges())
@settings(max_examples=80, deadline=None)
def test_every_sample_arrives_whole_once_where_the_plan_says(
    pool: GlooPool, case: tuple[list[list[tuple[int, Sample]]], list[frozenset[int]]]
) -> None:
    of_rank, destinations = case
    by_id = dict(itertools.chain.from_iterable(of_rank))
    for rank, received in enumerate(exchange(pool, of_rank, destinations)):
        assert received == {i: sample for i, sample in by_id.items() if rank in destinations[i]}


def one(token: int) -> Sample:
    return [token], [token + 1], [bits(1.0)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_rank_has_all_and_another_gets_all(pool: GlooPool, ranks: int) -> None:
    mine = [(i, one(i)) for i in range(5)]
    received = exchange(pool, [mine, *[[]] * (ranks - 1)], [frozenset({ranks - 1})] * 5)
    assert received == [*[{}] * (ranks - 1), dict(mine)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_nothing_to_send_anywhere(pool: GlooPool, ranks: int) -> None:
    assert exchange(pool, [[]] * ranks, []) == [{}] * ranks


def test_samples_of_equal_length_do_not_change_places(pool: GlooPool) -> None:
    """Held in descending order: the sender must lay them out in the order that the receiver expects."""
    received = exchange(pool, [[(1, one(71)), (0, one(70))], []], [frozenset({1})] * 2)
    assert received == [{}, {0: one(70), 1: one(71)}]
