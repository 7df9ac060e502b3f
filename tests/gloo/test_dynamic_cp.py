"""Groups of ranks that change from microbatch to microbatch: who gets which rows of which sample?"""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.schedule import GroupSizes, Plan, make_plan
from megatron_packing.topology import Topology
from tests.gloo import tasks
from tests.gloo.pool import GlooPool
from tests.gloo.tasks import Packs, Row
from tests.gloo.test_step_packer import config, pack_step, rows, shared_out

pytestmark = pytest.mark.gloo

ON_ONE_RANK = 8
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (3, 1, 1), (3, 1, 3), (4, 1, 1), (4, 1, 2), (4, 1, 4)]
LAYOUTS += [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 4, 1), (1, 4, 2)]
"""DP, CP, ranks of the smallest group. Groups are of DP x CP ranks; those of a replica draw the same."""


@given(
    lengths=st.lists(st.one_of(st.integers(1, 4 * ON_ONE_RANK), st.none()), min_size=1, max_size=12),
    layout=st.sampled_from(LAYOUTS),
    max_seqs=st.sampled_from([None, 1, 3]),
    sequence_parallel=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_sample_arrives_whole_and_once_on_the_ranks_of_its_group(
    pool: GlooPool,
    lengths: list[int | None],
    layout: tuple[int, int, int],
    max_seqs: int | None,
    sequence_parallel: bool,
) -> None:
    dp, cp, smallest = layout
    topology = Topology(dp=dp, cp=cp, tp=2, sequence_parallel=sequence_parallel)
    most = dp * cp * ON_ONE_RANK
    drawn = shared_out(rows(*[n and min(n, most) for n in lengths], *[None] * (-len(lengths) % dp)), dp)
    asked = config(topology, scheduler="dynamic_cp", smallest_group=smallest, seq_length=most, max_seqs=max_seqs)
    packs = pack_step(pool, [of_replica for of_replica in drawn for _ in range(cp)], asked)
    kept = [row for row in itertools.chain.from_iterable(drawn) if row.dropped is None]
    plan = make_plan(
        [row.length for row in kept],
        "dynamic_cp",
        asked.topology,
        ON_ONE_RANK,
        max_seqs=max_seqs,
        cost=tasks.COST,
        group_sizes=GroupSizes(smallest=smallest),
    )
    check_places(plan, kept, packs)
    check_rows(kept, packs)
    figures = packs[0].figures
    assert figures["real_tokens"] == sum(row.length for row in kept)
    run = sum(len(of_pack) for of_rank in packs for of_pack in of_rank.rows)
    assert figures["padding_tokens"] == run - figures["real_tokens"]


def check_places(plan: Plan, kept: list[Row], packs: list[Packs]) -> None:
    """Each rank has the pack that the plan gives its group, and its place in the group."""
    for m, microbatch in enumerate(plan.microbatches):
        for pack, group in plan.packs_with_ranks(microbatch):
            for rank in group:
                assert packs[rank].places[m] == (len(group), rank - group[0])
                assert len(packs[rank].rows[m]) * len(group) == pack.padded_tokens <= ON_ONE_RANK * len(group)
                assert packs[rank].is_dummy[m] == pack.is_dummy
                lengths = [kept[i].length for i in pack.sample_ids] or [pack.padded_tokens]
                assert packs[rank].boundaries[m] == [0, *itertools.accumulate(lengths)]
    assert all(len(of_rank.places) == plan.num_microbatches for of_rank in packs)


def check_rows(kept: list[Row], packs: list[Packs]) -> None:
    """The rows of all ranks that count in the loss are the samples' tokens, each once, each at its own position."""
    counted = Counter(
        (token, position)
        for of_rank in packs
        for share in of_rank.rows
        for token, position, weight in share
        if weight > 0
    )
    assert counted == Counter((row.first + i, i) for row in kept for i in range(row.length))


def test_a_long_sample_is_shared_and_short_ones_are_not(pool: GlooPool) -> None:
    asked = config(4, scheduler="dynamic_cp", smallest_group=1, seq_length=16)
    packs = pack_step(pool, shared_out(rows(16, 8, 8, None), 4), asked)
    assert [of_rank.places for of_rank in packs] == [[(2, 0)], [(2, 1)], [(1, 0)], [(1, 0)]]
    assert [[token for token, _, _ in of_rank.rows[0]] for of_rank in packs[:2]] == [
        [100, 101, 102, 103, 112, 113, 114, 115],
        [104, 105, 106, 107, 108, 109, 110, 111],
    ]
    assert packs[0].figures["fill"] == 1.0
    assert packs[0].figures["packs"] == 3


def test_ranks_without_a_sample_run_dummies(pool: GlooPool) -> None:
    asked = config(4, scheduler="dynamic_cp", smallest_group=2, seq_length=16)
    packs = pack_step(pool, shared_out(rows(None, None, None, None), 4), asked)
    assert all(all(of_rank.is_dummy) and of_rank.is_dummy for of_rank in packs)
    assert packs[0].figures["targets"] == 0


@pytest.mark.parametrize(
    ("rows_of_ranks", "sizes"),
    [
        ([[0, 1, 2, 3]], (1, 2, 4)),
        ([[0, 1, 2, 3]], (2, 4)),
        ([[0, 1, 2]], (1, 2, 3)),
        ([[0, 2], [1, 3]], (1, 2)),  # with 2 TP ranks, or 2 stages
    ],
)
def test_groups_are_blocks_of_neighbours(
    pool: GlooPool, rows_of_ranks: list[list[int]], sizes: tuple[int, ...]
) -> None:
    found = pool.run(tasks.members_of_groups, sizes, rows_of_ranks)  # all ranks of the job make them together
    for row in rows_of_ranks:
        for place, rank in enumerate(row):
            expected: dict[int, list[int] | None] = {}
            for size in sizes:
                first = place // size * size
                if size == 1:
                    expected[size] = None
                elif first + size <= len(row):
                    expected[size] = row[first : first + size]
            assert found[rank] == expected
