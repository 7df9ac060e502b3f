"""Does `dynamic_cp` form groups that ranks can run, put every sample in one, and keep everyone about equally busy?"""

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_packing.errors import CapacityError, ConfigError, PackingError
from megatron_packing.schedule import (
    SCHEDULERS,
    CostModel,
    GroupedPacks,
    GroupSizes,
    Pack,
    Plan,
    Problem,
    best_fit,
    check_plan,
    group_rows,
    make_plan,
    pack_set,
    warm_up,
)
from megatron_packing.schedule.bounds import grouped_lower_bound
from megatron_packing.topology import Topology
from tests.strategies import PlanningCase, plan_case

SCHEDULER = "dynamic_cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(PlanningCase):
    """One whose samples may need several ranks, with what else forms groups."""

    cost: CostModel
    group_sizes: GroupSizes

    @property
    def ranks(self) -> int:
        return self.topology.dp * self.topology.cp

    def plan(self, units: list[int] | None = None) -> Plan:
        return plan_case(self, SCHEDULER, cost=self.cost, group_sizes=self.group_sizes, units=units)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lengths up to what all ranks hold together, on few ranks of few tokens each."""
    smallest = draw(st.sampled_from([1, 1, 1, 2, 3]))
    cp = draw(st.sampled_from([1, 2, 4]))
    topology = Topology(
        dp=smallest * draw(st.integers(1, 4)), cp=cp, tp=draw(st.sampled_from([1, 2])), sequence_parallel=True
    )
    ranks = topology.dp * cp
    per_rank = 2 * topology.tp * draw(st.integers(1, 8))
    one = st.one_of(st.integers(1, per_rank * ranks), st.integers(1, per_rank), st.sampled_from([1, per_rank]))
    return Case(
        lengths=draw(st.lists(one, max_size=24)),
        topology=topology,
        max_tokens_per_rank=per_rank,
        max_seqs=draw(st.sampled_from([None, None, 1, 2, 5])),
        microbatch_multiple=draw(st.sampled_from([1, 1, 2, 3])),
        cost=CostModel(
            linear=draw(st.sampled_from([0, 8])),
            quadratic=draw(st.sampled_from([0, 1])),
            communication=draw(st.sampled_from([0.0, 0.5, 20.0])),
        ),
        group_sizes=GroupSizes(smallest=smallest, any_size=draw(st.booleans())),
    )


# Properties


@settings(max_examples=150)
@given(cases())
def test_every_plan_is_one_that_all_ranks_may_run(case: Case) -> None:
    plan = case.plan()
    assert Counter(s for pack in plan.packs for s in pack.sample_ids) == Counter(range(len(case.lengths)))
    assert plan.num_microbatches >= 1
    assert plan.num_microbatches % case.microbatch_multiple == 0
    for microbatch in plan.microbatches:
        sizes = [pack.cp_size or 0 for pack in microbatch.packs]
        event(f"groups differ: {len(set(sizes)) > 1}")
        assert sum(sizes) == case.ranks
        for first, size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False):
            times, rest = divmod(size, case.group_sizes.smallest)
            assert rest == 0
            if not case.group_sizes.any_size:
                assert first % size == 0
                assert times & (times - 1) == 0 or size == case.ranks
    for pack in plan.packs:
        size = pack.cp_size or 0
        alignment = (2 * size if size > 1 else 1) * case.topology.tp
        tokens = sum(-(-case.lengths[s] // alignment) * alignment for s in pack.sample_ids)
        assert pack.padded_tokens == (tokens or alignment)
        assert pack.padded_tokens <= case.max_tokens_per_rank * size
        assert case.max_seqs is None or len(pack.sample_ids) <= case.max_seqs


@settings(max_examples=60)
@given(cases())
def test_every_rank_has_a_share_of_one_pack_in_each_microbatch(case: Case) -> None:
    plan = case.plan()
    for m, microbatch in enumerate(plan.microbatches):
        shared = [plan.dp_cp_rank_packs(rank)[m] for rank in range(case.ranks)]
        by_pack = [(pack, len(list(ranks))) for pack, ranks in itertools.groupby(shared, key=id)]
        assert [ranks for _, ranks in by_pack] == [pack.cp_size for pack in microbatch.packs]
        assert [shared[i] for i in itertools.accumulate([0, *(n for _, n in by_pack[:-1])])] == list(microbatch.packs)


@settings(max_examples=60)
@given(cases())
def test_the_figures_of_a_plan(case: Case) -> None:
    plan = case.plan()
    metrics = plan.metrics(case.lengths)
    slots = plan.num_microbatches * case.ranks * case.max_tokens_per_rank
    waste = metrics.alignment_waste + metrics.tail_waste + metrics.dummy_waste
    assert sum(case.lengths) + waste == slots
    assert metrics.fill == pytest.approx(sum(case.lengths) / slots)
    assert metrics.max_pack_load <= 1
    assert metrics.packs_lower_bound <= metrics.packs
    assert 1 - 1e-9 <= metrics.step_imbalance <= metrics.lockstep_imbalance * (1 + 1e-9)
    assert metrics.lockstep_lower_bound <= metrics.lockstep_imbalance * (1 + 1e-9)
    assert metrics.lockstep_imbalance == pytest.approx(lockstep(plan, case.lengths))


@settings(max_examples=30)
@given(cases())
def test_equal_arguments_give_equal_plans(case: Case) -> None:
    first, second = case.plan(), case.plan()
    assert first == second
    assert first.digest() == second.digest()


@settings(max_examples=40)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(case: Case, random: object) -> None:
    order = list(range(len(case.lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = replace(case, lengths=[case.lengths[i] for i in order])

    def shape(plan: Plan, lengths: list[int]) -> list[list[tuple[int | None, list[int]]]]:
        return [
            [(pack.cp_size, sorted(lengths[s] for s in pack.sample_ids)) for pack in microbatch.packs]
            for microbatch in plan.microbatches
        ]

    assert shape(shuffled.plan(), shuffled.lengths) == shape(case.plan(), case.lengths)


def lockstep(plan: Plan, lengths: list[int]) -> float:
    """Said once more: the busiest rank of each microbatch, over what the mean rank would compute."""
    cost, ranks = plan.cost, plan.topology.dp * plan.topology.cp

    def of_rank(pack: Pack) -> float:
        tokens = [lengths[s] for s in pack.sample_ids]
        size = pack.cp_size or 0
        talk = cost.communication * sum(tokens) if size > 1 else 0.0
        return float(cost.of(tokens).sum()) / size + talk

    work = float(cost.of(lengths).sum())
    busiest = sum(max(map(of_rank, microbatch.packs)) for microbatch in plan.microbatches)
    return busiest / (work / ranks) if work else 1.0


# Against every grouping there is


def every_lockstep(lengths: list[int], ranks: int, per_rank: int, cost: CostModel) -> Iterator[float]:
    """The lockstep of every way to run up to five samples in at most as many microbatches; power-of-two groups."""
    groupings = [g for g in splits(ranks) if all(size & (size - 1) == 0 for size in g)]
    slots = [(m, g) for m in range(len(lengths)) for g in range(ranks)]
    for places in itertools.product(slots, repeat=len(lengths)):
        members: dict[int, dict[int, list[int]]] = {}
        for length, (m, g) in zip(lengths, places, strict=True):
            members.setdefault(m, {}).setdefault(g, []).append(length)
        if sorted(members) != list(range(len(members))) or any(
            sorted(g) != list(range(len(g))) for g in members.values()
        ):
            continue  # a renumbering of another way
        total = 0.0
        for groups in members.values():
            total += min(
                (busiest(groups, sizes, per_rank, cost) for sizes in groupings if len(sizes) >= len(groups)),
                default=float("inf"),
            )
        yield total


def splits(ranks: int) -> list[tuple[int, ...]]:
    if ranks == 0:
        return [()]
    return [(size, *rest) for size in range(1, ranks + 1) for rest in splits(ranks - size)]


def busiest(groups: dict[int, list[int]], sizes: tuple[int, ...], per_rank: int, cost: CostModel) -> float:
    most = 0.0
    for g, tokens in groups.items():
        if sum(tokens) > per_rank * sizes[g]:
            return float("inf")
        talk = cost.communication * sum(tokens) if sizes[g] > 1 else 0.0
        most = max(most, float(cost.of(tokens).sum()) / sizes[g] + talk)
    return most


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from([4, 8, 12, 16, 24, 32]), min_size=1, max_size=4),
    st.sampled_from([2, 4]),
    st.sampled_from([0.0, 2.0, 30.0]),
)
def test_the_bound_is_one_and_small_plans_are_near_the_best(
    lengths: list[int], ranks: int, communication: float
) -> None:
    # Multiples of 4 of up to 8 tokens a rank: alignment (2 x ranks at most) costs little here, and only the plan pays.
    per_rank = 32 // ranks * 2
    cost = CostModel(linear=4, quadratic=1, communication=communication)
    plan = make_plan(lengths, SCHEDULER, Topology(dp=ranks), per_rank, cost=cost)
    mean = float(cost.of(lengths).sum()) / ranks
    best = min(every_lockstep(lengths, ranks, per_rank, cost)) / mean
    bound = grouped_lower_bound(
        np.array(lengths),
        cost.of(lengths),
        communication * np.array(lengths, dtype=float),
        sizes=GroupSizes().of(ranks),
        max_tokens_per_rank=per_rank,
    )
    got = lockstep(plan, lengths)
    event(f"optimal: {got <= best * 1.001}")
    assert bound <= best * (1 + 1e-9) <= got * (1 + 1e-6)
    assert got <= best * 1.6


# What makes it worth having


def test_a_long_sample_gets_more_ranks_than_it_needs_and_short_ones_few() -> None:
    # The long sample fits two ranks; on four it is done when the others are.
    cost = CostModel(linear=0, quadratic=1, communication=10)
    plan = make_plan([64] + [16] * 4, SCHEDULER, Topology(dp=8), 32, cost=cost)
    (microbatch,) = plan.microbatches
    assert (microbatch.packs[0].cp_size, microbatch.packs[0].sample_ids) == (4, (0,))
    assert all((pack.cp_size or 0) <= 2 for pack in microbatch.packs[1:])


def test_communication_keeps_samples_on_few_ranks() -> None:
    free, dear = (
        make_plan([32], SCHEDULER, Topology(dp=8), 32, cost=CostModel(linear=0, quadratic=1, communication=c))
        for c in (0.0, 1000.0)
    )
    assert free.packs[0].cp_size == 8
    assert sorted((pack.cp_size, pack.is_dummy) for pack in dear.packs) == [(1, False), (1, True), (2, True), (4, True)]


def test_samples_that_leave_each_other_no_room_take_a_microbatch_each() -> None:
    # 33 of 64 tokens each: by their sum, 21 microbatches would do.
    plan = make_plan([33] * 40, SCHEDULER, Topology(dp=4), 16, microbatch_multiple=3)
    samples = [sum(len(pack.sample_ids) for pack in microbatch.packs) for microbatch in plan.microbatches]
    assert samples == [1] * 40 + [0] * 2


def test_the_smallest_group_holds() -> None:
    sizes = GroupSizes(smallest=2)
    plan = make_plan([4] * 16, SCHEDULER, Topology(dp=8), 8, group_sizes=sizes)
    assert {pack.cp_size for pack in plan.packs} <= {2, 4, 8}


def test_it_beats_the_smallest_groups_that_fit_on_a_long_tail() -> None:
    # Megatron's rule, the smallest CP that holds a sample, leaves everyone waiting for the longest.
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.pareto(1.1, 256) * 500 + 16, 16, 32768).astype(int).tolist()
    topology, cost = Topology(dp=16), CostModel(linear=24576, quadratic=1, communication=500)
    metrics = make_plan(lengths, SCHEDULER, topology, 4096, cost=cost).metrics(lengths)
    assert metrics.lockstep_imbalance <= 1.1 * metrics.lockstep_lower_bound


def test_many_samples_are_planned_in_parts() -> None:
    lengths = [1 + (i * 2654435761) % 500 for i in range(9000)]
    plan = make_plan(lengths, SCHEDULER, Topology(dp=4), 2048)
    assert plan.metrics(lengths).fill > 0.95


# What is refused


def test_a_sample_longer_than_all_ranks_hold() -> None:
    with pytest.raises(CapacityError, match=r"33 tokens.*32 = 8 per rank x CP 4"):
        make_plan([33], SCHEDULER, Topology(dp=2, cp=2), 8)
    assert make_plan([32], SCHEDULER, Topology(dp=2, cp=2), 8).packs[0].cp_size == 4


@pytest.mark.parametrize("smallest", [0, -1, 1.0, True])
def test_a_smallest_group_that_is_no_count(smallest: object) -> None:
    with pytest.raises(ConfigError, match="--min-dynamic-context-parallel-size is"):
        GroupSizes(smallest=smallest)  # type: ignore[arg-type]


def test_a_smallest_group_that_does_not_divide_the_ranks() -> None:
    with pytest.raises(
        ConfigError, match="--min-dynamic-context-parallel-size is 3; it must divide the 8 DP x CP ranks"
    ):
        make_plan([1], SCHEDULER, Topology(dp=4, cp=2), 8, group_sizes=GroupSizes(smallest=3))


@pytest.mark.parametrize(
    ("ranks", "smallest", "any_size", "sizes"),
    [
        (8, 1, False, (1, 2, 4, 8)),
        (6, 1, False, (1, 2, 4, 6)),
        (12, 3, False, (3, 6, 12)),
        (6, 2, True, (2, 4, 6)),
        (1, 1, False, (1,)),
        (3, 1, True, (1, 2, 3)),
    ],
)
def test_sizes(ranks: int, smallest: int, any_size: bool, sizes: tuple[int, ...]) -> None:
    assert GroupSizes(smallest=smallest, any_size=any_size).of(ranks) == sizes


def test_upstreams_name_means_ours() -> None:
    plan = make_plan([4, 3], "default_dynamic_cp", Topology(dp=2), 8)
    assert plan.scheduler == SCHEDULER
    assert plan == make_plan([4, 3], SCHEDULER, Topology(dp=2), 8)


def test_dp_ranks_have_no_packs_of_their_own() -> None:
    plan = make_plan([4, 3], SCHEDULER, Topology(dp=2), 8)
    with pytest.raises(PackingError, match="dp_cp_rank_packs"):
        plan.rank_packs(0)
    with pytest.raises(PackingError, match=r"rank is 2.*0 to 1"):
        plan.dp_cp_rank_packs(2)


def test_static_plans_know_every_ranks_packs_too() -> None:
    plan = make_plan([4, 3, 2, 1], topology=Topology(dp=2, cp=2), max_tokens_per_rank=4)
    for rank in range(4):
        assert plan.dp_cp_rank_packs(rank) == plan.rank_packs(rank // 2)


LENGTHS = [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[(2, [0, 1]), (1, [2]), (1, [3, 3])]], "sample 3 is in the plan 2 times"),
        ([[(2, [0, 1]), (1, [2]), (1, [])]], "sample 3 is in the plan 0 times"),
        ([[(2, [0, 1]), (2, [2, 4])]], "sample id 4 is none of the 4"),
        (
            [[(1, [0]), (2, [1, 2]), (1, [3])]],
            "microbatch 0 has a group of 2 ranks at rank 1; it must begin at a multiple",
        ),
        ([[(2, [0, 1]), (1, [2, 3])]], "microbatch 0 has groups of 3 ranks in all; there are 4"),
        ([[(4, [0, 1, 2, 3]), (1, [])]], "microbatch 0 has groups of 5 ranks in all; there are 4"),
        ([[(3, [0, 1, 2]), (1, [3])]], r"a group of 3 ranks; the sizes are \(1, 2, 4\)"),
        ([[(2, [0, 1, 2]), (2, [3])]], "microbatch 0, group 0 holds 12 padded tokens; the capacity is 8"),
        ([[(1, [0, 1]), (1, [2]), (2, [3])]], "microbatch 0, group 0 holds 8 padded tokens; the capacity is 4"),
        ([[(2, [0, 1]), (2, [2, 3])]] * 3, "sample 0 is in the plan 3 times"),
        ([], "0 microbatches"),
    ],
)
def test_wrong_groups_are_caught(monkeypatch: pytest.MonkeyPatch, rows: list, message: str) -> None:
    def mine(problem: Problem) -> GroupedPacks:
        return GroupedPacks(microbatches=rows)

    monkeypatch.setitem(SCHEDULERS, "mine", mine)
    with pytest.raises(PackingError, match=rf"'mine'.*{message}"):
        make_plan(LENGTHS, "mine", Topology(dp=4), 4)


def test_a_static_plan_has_no_chosen_groups() -> None:
    plan = make_plan([4], max_tokens_per_rank=8)
    pack = replace(plan.packs[0], cp_size=1)
    wrong = replace(plan, microbatches=(replace(plan.microbatches[0], packs=(pack,)),))
    with pytest.raises(PackingError, match="microbatch 0 has packs with a cp_size"):
        check_plan(wrong, [4])


def test_the_digest_sees_the_groups() -> None:
    plan = make_plan([4, 4], SCHEDULER, Topology(dp=4), 4, cost=CostModel(linear=1, quadratic=0))
    assert plan.digest() != replace(plan, group_sizes=GroupSizes(any_size=True)).digest()
    assert plan.digest() != replace(plan, cost=CostModel(linear=1, quadratic=0, communication=1)).digest()
    first = plan.microbatches[0]
    packs = (replace(first.packs[0], cp_size=1), *first.packs[1:])
    assert plan.digest() != replace(plan, microbatches=(replace(first, packs=packs),)).digest()


# Compiled loops

_DIGESTS = """
import numpy as np
from megatron_packing.schedule import CostModel, GroupSizes, make_plan
from megatron_packing.topology import Topology

rng = np.random.default_rng(7)
for case in range(6):
    lengths = np.clip(rng.lognormal(3.5, 1.0, 14), 1, 256).astype(int)
    cost = CostModel(linear=30, quadratic=1, communication=[0.0, 7.3][case % 2])
    sizes = GroupSizes(any_size=case == 5)
    print(make_plan(lengths, "dynamic_cp", Topology(dp=4, cp=2), 32, max_seqs=[None, 5][case // 3], cost=cost,
                    group_sizes=sizes).digest())
"""


def test_compiled_and_interpreted_plans_are_the_same() -> None:
    # Python's integers know no machine: what they find, every machine finds.
    compiled, interpreted = (
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled, "PYTHONHASHSEED": disabled},
        ).stdout.split()
        for disabled in ("0", "1")
    )
    assert compiled == interpreted
    assert len(set(compiled)) == 6


@pytest.mark.parametrize("scheduler", ["dynamic_cp", "offline"])
def test_after_warming_up_nothing_is_compiled(scheduler: str) -> None:
    warm_up(scheduler)
    loops = [
        loop
        for module in (best_fit, group_rows)
        for loop in vars(module).values()
        if hasattr(loop, "signatures") and loop.signatures
    ]
    assert loops
    before = [list(loop.signatures) for loop in loops]
    make_plan(np.arange(1, 90), scheduler, Topology(dp=4, cp=2), 128, max_seqs=5)
    pack_set(np.arange(1, 90), 90)
    assert [list(loop.signatures) for loop in loops] == before
