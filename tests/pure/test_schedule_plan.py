"""Is every plan one that all ranks may run? Properties of every planner, and of the check that guards them."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_packing.errors import CapacityError, ConfigError, PackingError
from megatron_packing.schedule import (
    CHOOSES_GROUPS,
    SCHEDULERS,
    CostModel,
    GroupSizes,
    Pack,
    Plan,
    Problem,
    check_plan,
    make_plan,
)
from megatron_packing.schedule.items import Units
from megatron_packing.topology import Topology
from tests.strategies import PlanningCase, plan_case, planning_cases

# Planners that choose the ranks of each pack have their own tests, in test_schedule_dynamic_cp.py.
every_scheduler = pytest.mark.parametrize("scheduler", sorted(SCHEDULERS.keys() - CHOOSES_GROUPS))


def ids_of(plan: Plan) -> list[list[int]]:
    return [list(pack.sample_ids) for pack in plan.packs]


def padded_of(plan: Plan) -> list[int]:
    return [pack.padded_tokens for pack in plan.packs]


# Properties that hold for every planner


@every_scheduler
@settings(max_examples=60)
@given(case=planning_cases())
def test_every_plan_is_one_that_all_ranks_may_run(scheduler: str, case: PlanningCase) -> None:
    plan = plan_case(case, scheduler)
    event(f"dummies: {any(pack.is_dummy for pack in plan.packs)}, several to a pack: {max(map(len, ids_of(plan))) > 1}")
    assert Counter(s for ids in ids_of(plan) for s in ids) == Counter(range(len(case.lengths)))
    for pack in plan.packs:
        tokens = sum(case.topology.pad(case.lengths[s]) for s in pack.sample_ids)
        assert pack.padded_tokens == (tokens or case.topology.alignment)
        assert pack.padded_tokens <= case.capacity
        assert pack.is_dummy == (tokens == 0)
        assert case.max_seqs is None or len(pack.sample_ids) <= case.max_seqs
        assert all(type(s) is int for s in pack.sample_ids)
    assert all(len(microbatch.packs) == case.topology.dp for microbatch in plan.microbatches)
    assert plan.num_microbatches >= 1
    assert plan.num_microbatches % case.microbatch_multiple == 0


@every_scheduler
@settings(max_examples=30)
@given(case=planning_cases())
def test_equal_arguments_give_equal_plans(scheduler: str, case: PlanningCase) -> None:
    first, second = plan_case(case, scheduler), plan_case(case, scheduler)
    assert first == second
    assert first.digest() == second.digest()
    assert 0 <= first.digest() < 2**63


@every_scheduler
@settings(max_examples=30)
@given(case=planning_cases())
def test_dummies_appear_only_where_no_pack_can_be_split(scheduler: str, case: PlanningCase) -> None:
    plan = plan_case(case, scheduler)
    if any(pack.is_dummy for pack in plan.packs):
        assert all(len(pack.sample_ids) <= 1 for pack in plan.packs)


@every_scheduler
@settings(max_examples=30)
@given(case=planning_cases())
def test_ranks_share_out_the_packs(scheduler: str, case: PlanningCase) -> None:
    plan = plan_case(case, scheduler)
    by_rank = [plan.rank_packs(rank) for rank in range(case.topology.dp)]
    assert all(len(packs) == plan.num_microbatches for packs in by_rank)
    assert tuple(pack for row in zip(*by_rank, strict=True) for pack in row) == plan.packs


@every_scheduler
@pytest.mark.parametrize("make", [list, tuple, np.array, lambda ls: np.array(ls, dtype=np.uint8)])
def test_lengths_may_be_any_row_of_integers(scheduler: str, make: object) -> None:
    lengths = [5, 9, 3, 12, 7, 2]
    plan = make_plan(make(lengths), scheduler, max_tokens_per_rank=16)  # type: ignore[operator]
    assert plan == make_plan(lengths, scheduler, max_tokens_per_rank=16)
    assert all(type(s) is int for ids in ids_of(plan) for s in ids)


@every_scheduler
@pytest.mark.parametrize("lengths", [[], (), np.array([], dtype=np.int32), np.array([])])
def test_no_samples_give_dummies_only(scheduler: str, lengths: object) -> None:
    plan = make_plan(lengths, scheduler, Topology(dp=2, cp=2), 8, microbatch_multiple=3)  # type: ignore[arg-type]
    assert plan.num_microbatches == 3
    assert plan.packs == (Pack(sample_ids=(), padded_tokens=4),) * 6


def test_planning_leaves_the_callers_lengths_alone() -> None:
    lengths = np.array([5, 9, 3])
    make_plan(lengths, max_tokens_per_rank=16)
    lengths[0] = 1  # still writable
    assert lengths.tolist() == [1, 9, 3]


# Cases from the field


@every_scheduler
def test_alignment_comes_first(scheduler: str) -> None:
    topology = Topology(cp=2, tp=2, sequence_parallel=True)
    plan = make_plan([9, 9, 9], scheduler, topology, 16)
    assert ids_of(plan) == [[0, 1], [2]]
    assert padded_of(plan) == [32, 16]


@every_scheduler
def test_no_pack_is_filled_by_total_tokens_alone(scheduler: str) -> None:
    assert len(make_plan([5] * 6, scheduler, max_tokens_per_rank=8).packs) == 6


@every_scheduler
def test_equal_counts_by_splitting(scheduler: str) -> None:
    plan = make_plan([8, 8, 4, 4], scheduler, Topology(dp=2), 8)
    assert ids_of(plan) == [[0], [1], [2], [3]]
    assert [len(plan.rank_packs(rank)) for rank in (0, 1)] == [2, 2]


@every_scheduler
def test_equal_counts_by_a_dummy(scheduler: str) -> None:
    plan = make_plan([8, 8, 4], scheduler, Topology(dp=2), 8)
    assert [pack.sample_ids for pack in plan.rank_packs(0)] == [(0,), (2,)]
    assert [pack.sample_ids for pack in plan.rank_packs(1)] == [(1,), ()]
    assert plan.rank_packs(1)[1] == Pack(sample_ids=(), padded_tokens=1)


@every_scheduler
@pytest.mark.parametrize("lengths", [[2**31], [2**30, 2**30], np.array([2**30] * 3), [2**62] * 4])
def test_a_total_beyond_int32_is_refused(scheduler: str, lengths: object) -> None:
    with pytest.raises(CapacityError, match=r"int32 and end at 2,147,483,647.*--max-seqlen-per-dp-cp-rank"):
        make_plan(lengths, scheduler, max_tokens_per_rank=2**63)  # type: ignore[arg-type]


@every_scheduler
def test_a_total_just_within_int32_does_not_wrap(scheduler: str) -> None:
    lengths = np.array([2**31 - 3, 2], dtype=np.uint32)
    plan = make_plan(lengths, scheduler, max_tokens_per_rank=2**31)
    assert padded_of(plan) == [2**31 - 1]
    # Many such samples are no fault where no pack can hold two of them.
    assert padded_of(make_plan([2**31 - 1] * 3, scheduler, max_tokens_per_rank=2**31 - 1)) == [2**31 - 1] * 3


def test_padding_alone_can_reach_int32() -> None:
    with pytest.raises(CapacityError, match="int32"):
        make_plan([2**31 - 1], topology=Topology(cp=2), max_tokens_per_rank=2**31)


# What is refused, and how the message says so


def test_an_unknown_scheduler_lists_the_valid_names() -> None:
    with pytest.raises(ConfigError, match=r"'nonesuch'.*dp_balanced.*first_fit"):
        make_plan([1], "nonesuch")


def test_a_capacity_off_the_alignment_names_the_nearest() -> None:
    topology = Topology(cp=2, tp=2, sequence_parallel=True)
    with pytest.raises(ConfigError) as caught:
        make_plan([1], topology=topology, max_tokens_per_rank=4095)
    for part in ("4,095", "8,190", "alignment 8", "CP 2", "4,092 (capacity 8,184)", "4,096 (capacity 8,192)"):
        assert part in str(caught.value)


def test_the_nearest_capacity_is_never_zero() -> None:
    with pytest.raises(ConfigError, match=r"--max-seqlen-per-dp-cp-rank 2 \(capacity 4\)\.$"):
        make_plan([1], topology=Topology(cp=2), max_tokens_per_rank=1)


@given(st.integers(1, 8), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(1, 300))
def test_the_nearest_capacities_are_accepted(cp: int, tp: int, sequence_parallel: bool, per_rank: int) -> None:
    topology = Topology(cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    try:
        make_plan([1], topology=topology, max_tokens_per_rank=per_rank)
    except ConfigError as error:
        advice = str(error).rsplit("--max-seqlen-per-dp-cp-rank ", 1)[1].rstrip(".")
        nearest = [int(part.split(" ")[0].replace(",", "")) for part in advice.split(" or ")]
        assert nearest
        assert all(abs(one - per_rank) < topology.alignment for one in nearest)
        for one in nearest:
            make_plan([1], topology=topology, max_tokens_per_rank=one)
    else:
        assert per_rank * cp % topology.alignment == 0


@pytest.mark.parametrize(
    ("lengths", "topology", "per_rank", "parts"),
    [
        ([20, 5], Topology(), 16, ["Sample 0 has 20 tokens (20 padded)", "holds 16 = 16 per rank x CP 1", "1 of 2"]),
        ([5, 9001], Topology(cp=2), 4096, ["Sample 1", "9,001", "9,004 padded", "8,192 = 4,096 per rank x CP 2"]),
        (np.array([2**64 // 4], dtype=np.uint64), Topology(cp=2), 4096, ["4,611,686,018,427,387,904"]),
    ],
)
def test_a_sample_that_fits_nowhere(lengths: object, topology: Topology, per_rank: int, parts: list[str]) -> None:
    with pytest.raises(CapacityError) as caught:
        make_plan(lengths, topology=topology, max_tokens_per_rank=per_rank)  # type: ignore[arg-type]
    for part in [*parts, "--max-seqlen-per-dp-cp-rank", "--packing-overlong"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 0, 2], r"lengths\[1\] is 0.*at least 1"),
        ([3, 2, -7], r"lengths\[2\] is -7.*at least 1"),
        ([1.0, 2.5], "float64.*integers"),
        ([True, False], "bool.*integers"),
        (["5"], "integers"),
        ([2**70], "64 bits"),
        (np.array([1, 2**63], dtype=np.uint64), r"lengths\[1\] is 9223372036854775808.*64 bits"),
        ([[1, 2], [3, 4]], "2 dimensions"),
        ([[1, 2], [3]], "rows differ in size"),
        (5, "0 dimensions"),
    ],
)
def test_lengths_that_count_no_tokens_are_refused(lengths: object, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        make_plan(lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_tokens_per_rank", "max_seqs", "microbatch_multiple"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_sizes_below_one_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; it must be an integer of at least 1"):
        make_plan([1], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_costs_that_are_no_weights_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"CostModel\.quadratic"):
        CostModel(linear=0, quadratic=value)


def test_a_rank_outside_the_plan_is_refused() -> None:
    plan = make_plan([1], topology=Topology(dp=2))
    for rank in (-1, 2):
        with pytest.raises(PackingError, match=rf"dp_rank is {rank}.*0 to 1"):
            plan.rank_packs(rank)


# A planner of the user's own may be wrong

LENGTHS = [4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        ([[0, 1], [2, 3], [4, 5], [5]], "sample 5 is in the plan 2 times.*exactly once"),
        # As many ids as samples and no duplicate in a pack: only counts can see it.
        ([[0, 1], [2, 3], [4, 1], []], r"sample 1 is in the plan 2 times.*\(2 are not\)"),
        ([[0, 1], [2, 3], [4], []], "sample 5 is in the plan 0 times"),
        ([[0, 1], [2, 3], [4], [6]], "sample id 6 is none of the 6 samples"),
        ([[0, 1], [2, 3], [4, 5], [-1]], "sample id -1 is none of the 6 samples"),
        ([[0, 1, 2], [3], [4], [5]], "microbatch 0, DP rank 0 holds 12 padded tokens; the capacity is 8"),
        ([[0, 1], [2, 3], [4, 5]], "microbatch 1 has 1 packs.*2 DP ranks"),
        ([[0, 1], [2, 3], [4], [5], [], []], "3 microbatches.*multiple of 2"),
        ([], "0 microbatches.*positive multiple"),
    ],
)
def test_a_wrong_planner_is_caught(monkeypatch: pytest.MonkeyPatch, packs: list[list[int]], message: str) -> None:
    def mine(problem: Problem) -> list[list[int]]:
        return packs

    monkeypatch.setitem(SCHEDULERS, "mine", mine)
    with pytest.raises(PackingError, match=rf"'mine'.*{message}"):
        make_plan(LENGTHS, "mine", Topology(dp=2), 8, microbatch_multiple=2)


def test_a_right_planner_of_the_users_own_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULERS, "mine", lambda problem: [list(np.array([5, 0])), [1], [2, 3], [4]])
    plan = make_plan(LENGTHS, "mine", Topology(dp=2), 8)
    assert ids_of(plan) == [[5, 0], [1], [2, 3], [4]]
    assert type(plan.packs[0].sample_ids[0]) is int


def test_max_seqs_is_checked() -> None:
    plan = make_plan(LENGTHS, max_tokens_per_rank=8)
    check_plan(plan, LENGTHS, max_seqs=2)
    with pytest.raises(PackingError, match="holds 2 samples; max_seqs is 1"):
        check_plan(plan, LENGTHS, max_seqs=1)


def test_padded_tokens_are_checked() -> None:
    plan = make_plan([4], max_tokens_per_rank=8)
    pack = replace(plan.packs[0], padded_tokens=3)
    wrong = replace(plan, microbatches=(replace(plan.microbatches[0], packs=(pack,)),))
    with pytest.raises(PackingError, match="says 3 padded tokens; its samples make 4"):
        check_plan(wrong, [4])


def test_a_plan_of_other_lengths_is_refused() -> None:
    plan = make_plan([4, 4], max_tokens_per_rank=8)
    for lengths in ([4, 3], [4], [4, 4, 4]):
        with pytest.raises(PackingError, match="other lengths"):
            check_plan(plan, lengths)
        with pytest.raises(PackingError, match="other lengths"):
            plan.metrics(lengths)


# The digest


def test_the_digest_sees_every_part_of_the_plan_but_its_planning_time() -> None:
    plan = make_plan([4, 3, 2, 1], topology=Topology(dp=2), max_tokens_per_rank=8)
    first = plan.microbatches[0]
    changes = {
        "microbatches": (replace(first, packs=first.packs[::-1]), *plan.microbatches[1:]),
        "scheduler": "other",
        "topology": Topology(dp=2, tp=2),
        "capacity": 16,
        "max_seqs": 4,
        "cost": CostModel(linear=1, quadratic=1),
        "lengths_digest": 1,
        "group_sizes": GroupSizes(),
        "units": Units((2, 2)),
    }
    assert {field.name for field in fields(Plan)} == {*changes, "plan_ms"}
    digests = {replace(plan, **{name: value}).digest() for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(digests | {plan.digest()}) == len(changes) + 1
    later = replace(plan, plan_ms=plan.plan_ms + 1)
    assert later == plan
    assert later.digest() == plan.digest()


def test_the_digest_sees_lengths_that_give_the_same_packs() -> None:
    topology = Topology(cp=2)
    first, second = make_plan([5, 6], topology=topology), make_plan([6, 6], topology=topology)
    assert first.microbatches == second.microbatches
    assert first.digest() != second.digest()


@settings(max_examples=30)
@given(case=planning_cases(), data=st.data())
def test_moving_a_sample_changes_the_digest(case: PlanningCase, data: st.DataObject) -> None:
    plan = plan_case(case, "first_fit")
    packs = plan.packs
    i = data.draw(st.sampled_from(range(len(packs))))
    moved = replace(packs[i], sample_ids=(*packs[i].sample_ids[1:], 10**6))
    dp = case.topology.dp
    changed = [*packs[:i], moved, *packs[i + 1 :]]
    rows = tuple(replace(m, packs=tuple(changed[k * dp : (k + 1) * dp])) for k, m in enumerate(plan.microbatches))
    assert replace(plan, microbatches=rows).digest() != plan.digest()


def test_equal_costs_give_equal_digests() -> None:
    whole, real = (make_plan([5], cost=CostModel(linear=one, quadratic=one)) for one in (1, 1.0))
    assert whole == real
    assert whole.digest() == real.digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "from megatron_packing.schedule import make_plan\n"
        "print(make_plan([5, 9, 3, 12], max_tokens_per_rank=16).digest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert int(other.stdout) == make_plan([5, 9, 3, 12], max_tokens_per_rank=16).digest()
