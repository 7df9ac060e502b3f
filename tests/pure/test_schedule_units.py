"""Samples that must share a pack: do they, and does each count with its own tokens and its own pairs?"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_packing.errors import CapacityError, ConfigError, PackingError
from megatron_packing.schedule import (
    CHOOSES_GROUPS,
    SCHEDULERS,
    BalanceAdvice,
    CostModel,
    GroupSizes,
    Microbatch,
    Plan,
    Problem,
    check_plan,
    group_rows,
    lockstep,
    make_plan,
)
from megatron_packing.schedule.dynamic_cp import _step
from megatron_packing.schedule.items import Items, Units
from megatron_packing.topology import Topology
from tests.pure.test_schedule_bounds import best_lockstep, best_step
from tests.pure.test_schedule_dynamic_cp import Case, cases
from tests.strategies import PlanningCase, plan_case, planning_cases

ATTENTION = CostModel(linear=0, quadratic=1)
MIXED = CostModel(linear=20, quadratic=1)

every_scheduler = pytest.mark.parametrize("scheduler", sorted(SCHEDULERS.keys() - CHOOSES_GROUPS))


def draw_units(draw: st.DrawFn, padded: Sequence[int], capacity: int, max_seqs: int | None) -> list[int]:
    """Sizes of units, each of which fits in a pack, by tokens and by count."""
    sizes: list[int] = []
    room = 0
    for length in padded:
        if length <= room and sizes[-1] < (max_seqs or len(padded)) and draw(st.booleans()):
            sizes[-1] += 1
            room -= length
        else:
            sizes.append(1)
            room = capacity - length
    return sizes


@st.composite
def cases_of_units(draw: st.DrawFn) -> tuple[PlanningCase, list[int]]:
    case = draw(planning_cases())
    return case, draw_units(draw, list(map(case.topology.pad, case.lengths)), case.capacity, case.max_seqs)


@st.composite
def cases_of_groups_and_units(draw: st.DrawFn) -> tuple[Case, list[int]]:
    case = draw(cases())
    ranks = case.group_sizes.of(case.ranks)[-1]
    alignment = case.topology.alignment_of(ranks)
    padded = [-(-length // alignment) * alignment for length in case.lengths]
    return case, draw_units(draw, padded, ranks * case.max_tokens_per_rank, case.max_seqs)


def members(units: Sequence[int]) -> list[range]:
    ends = np.cumsum(units).tolist()
    return [range(end - size, end) for end, size in zip(ends, units, strict=True)]


def problem_of(items: Items, topology: Topology, capacity: int) -> Problem:
    return Problem(
        items=items,
        lengths=items.tokens(),
        padded=items.padded(topology.alignment),
        topology=topology,
        capacity=capacity,
        max_seqs=None,
        microbatch_multiple=1,
        cost=ATTENTION,
        balance="step",
    )


def check_whole(plan: Plan, units: Sequence[int]) -> None:
    for samples in members(units):
        (pack,) = (pack.sample_ids for pack in plan.packs if samples[0] in pack.sample_ids)
        first = pack.index(samples[0])
        assert pack[first : first + len(samples)] == tuple(samples)


# What every plan must be


@every_scheduler
@settings(max_examples=40)
@given(cases_of_units())
def test_units_stay_whole_and_plans_keep_every_rule(scheduler: str, drawn: tuple[PlanningCase, list[int]]) -> None:
    """`make_plan` checks the rules for samples. A unit's samples follow one another in the pack, in order."""
    case, units = drawn
    event(f"units: {max(units, default=0) > 1}")
    plan = plan_case(case, scheduler, units=units)
    assert sorted(s for pack in plan.packs for s in pack.sample_ids) == list(range(len(case.lengths)))
    check_whole(plan, units)
    assert plan.max_seqs == case.max_seqs
    metrics = plan.metrics(case.lengths)
    assert metrics.packs_lower_bound <= metrics.packs
    assert metrics.lockstep_lower_bound <= metrics.lockstep_imbalance + 1e-9


@settings(max_examples=60)
@given(cases_of_groups_and_units())
def test_units_stay_whole_where_groups_change(drawn: tuple[Case, list[int]]) -> None:
    case, units = drawn
    plan = case.plan(units=units)
    event(f"units: {plan.units is not None}")
    check_whole(plan, units)
    metrics = plan.metrics(case.lengths)
    assert metrics.packs_lower_bound <= metrics.packs
    assert metrics.lockstep_lower_bound <= metrics.lockstep_imbalance + 1e-9


@every_scheduler
@settings(max_examples=15)
@given(planning_cases())
def test_units_of_one_are_no_units(scheduler: str, case: PlanningCase) -> None:
    alone = plan_case(case, scheduler, units=[1] * len(case.lengths))
    assert alone.units is None
    assert alone == plan_case(case, scheduler)


def test_each_sample_of_a_unit_is_padded_for_the_group_that_holds_it() -> None:
    """2 ranks align to 4: two samples of 5 tokens make 16, though 10 tokens as one sample would make 12."""
    plan = make_plan([5, 5, 5, 5], "dynamic_cp", Topology(dp=2), 8, units=[2, 2])
    assert [[(pack.cp_size, pack.padded_tokens) for pack in row.packs] for row in plan.microbatches] == [[(2, 16)]] * 2
    with pytest.raises(CapacityError, match="Samples 0 to 1, which must share a pack, have 16 padded tokens"):
        make_plan([5, 5], "dynamic_cp", Topology(dp=2), 6, group_sizes=GroupSizes(smallest=2), units=[2])


def test_a_group_of_units_is_widened_only_where_it_holds_all_their_samples_padding() -> None:
    """Two units of three samples of a token: 6 tokens on one rank of 8, but 24 on two of 16 together."""
    problem = problem_of(Items(lengths=np.ones(6, dtype=np.int64), units=Units((3, 3))), Topology(dp=2), 8)
    step = _step(problem, np.arange(2), (1, 2))
    groups, group_of = np.zeros((2, group_rows.COLUMNS), dtype=np.int64), np.zeros(2, dtype=np.int64)
    no_ceiling = 2**40
    assert group_rows.fill_row(step, np.arange(2), no_ceiling, group_rows.TIGHTEST, groups, group_of) == 1
    assert groups[0, group_rows.SIZE] == 0, "an index: one rank"


# What they cost


def test_the_account_of_pairs_by_hand() -> None:
    """Pairs of 8 tokens each, of 50, 40, 32 and 34 pairs of tokens; as one sample each of them has 64."""
    lengths, units = [1, 7, 2, 6, 4, 4, 3, 5], [2] * 4
    mean = (50 + 40 + 32 + 34) / 2
    plan = make_plan(lengths, "first_fit", Topology(dp=2), 8, cost=ATTENTION, units=units)
    assert [pack.sample_ids for pack in plan.packs] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [pack.padded_tokens for pack in plan.packs] == [8] * 4
    metrics = plan.metrics(lengths)
    assert metrics.step_imbalance == pytest.approx((50 + 32) / mean)
    assert metrics.lockstep_imbalance == pytest.approx((50 + 34) / mean)
    assert (metrics.packs_lower_bound, metrics.fill) == (4, 1.0)
    for balance, best in (("step", 50 + 32), ("lockstep", 50 + 34)):
        plan = make_plan(lengths, "balanced", Topology(dp=2), 8, cost=ATTENTION, units=units, balance=balance)
        assert getattr(plan.metrics(lengths), f"{balance}_imbalance") == pytest.approx(best / mean)


@settings(max_examples=60)
@given(cases_of_units(), st.sampled_from(["first_fit", "balanced"]), st.sampled_from([ATTENTION, MIXED]))
def test_metrics_count_every_sample_alone(
    drawn: tuple[PlanningCase, list[int]], scheduler: str, cost: CostModel
) -> None:
    case, units = drawn
    plan = plan_case(case, scheduler, units=units, cost=cost)
    work = [
        [
            sum(20 * case.lengths[s] * (cost is MIXED) + case.lengths[s] ** 2 for s in pack.sample_ids)
            for pack in row.packs
        ]
        for row in plan.microbatches
    ]
    mean = sum(map(sum, work)) / case.topology.dp
    metrics = plan.metrics(case.lengths)
    if mean:
        assert metrics.step_imbalance == pytest.approx(max(map(sum, zip(*work, strict=True))) / mean)
        assert metrics.lockstep_imbalance == pytest.approx(sum(map(max, work)) / mean)
    assert metrics.fill * plan.num_microbatches * case.topology.dp * plan.capacity == pytest.approx(sum(case.lengths))


few_units = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=2), min_size=1, max_size=6)


@settings(max_examples=80)
@given(few_units, st.sampled_from([ATTENTION, MIXED]), st.integers(1, 3))
def test_small_steps_of_units_come_near_the_best(drawn: list[list[int]], cost: CostModel, dp: int) -> None:
    """Against every plan of the units, by their true work: bounds hold, `balanced` comes as near as for samples."""
    lengths, units = [s for unit in drawn for s in unit], [len(unit) for unit in drawn]
    tokens, work = [sum(unit) for unit in drawn], [float(cost.of(unit).sum()) for unit in drawn]
    kw = {"scheduler": "balanced", "topology": Topology(dp=dp), "max_tokens_per_rank": 12, "cost": cost, "units": units}
    step = make_plan(lengths, balance="step", **kw)  # type: ignore[arg-type]
    best = best_step(tokens, work, dp, 12, step.num_microbatches)
    assert best - 1e-9 <= step.metrics(lengths).step_imbalance <= 1.5 * best
    lockstep = make_plan(lengths, balance="lockstep", **kw).metrics(lengths)  # type: ignore[arg-type]
    best = best_lockstep(tokens, work, dp, 12, None)
    assert lockstep.lockstep_lower_bound <= best + 1e-9
    assert best - 1e-9 <= lockstep.lockstep_imbalance <= 1.5 * best
    assert lockstep.packs_lower_bound <= lockstep.packs


def pairs(seed: int, count: int = 128) -> list[int]:
    """Chosen and rejected answers to long and short prompts."""
    rng = np.random.default_rng(seed)
    prompts, answers = rng.lognormal(5.5, 1.0, (count, 1)), rng.lognormal(5.0, 1.2, (count, 2))
    return np.clip((prompts + answers).astype(np.int64), 16, 4096).reshape(-1).tolist()


def packs_of(seed: int, count: int = 64) -> tuple[list[int], list[int]]:
    """Packs of 4,096 tokens that hold from 1 to many samples."""
    rng = np.random.default_rng(seed)
    cuts = [np.sort(rng.choice(np.arange(1, 4096), rng.integers(0, 24), replace=False)) for _ in range(count)]
    lengths = [np.diff([0, *cut.tolist(), 4096]) for cut in cuts]
    return np.concatenate(lengths).tolist(), [len(one) for one in lengths]


@pytest.mark.parametrize("balance", ["step", "lockstep"])
@pytest.mark.parametrize("kind", ["pairs", "packs"])
def test_balanced_levels_the_true_work_of_units(kind: str, balance: str) -> None:
    """Far nearer to even than where a unit is taken for one long sample; over the step, even."""
    figures = []
    for seed in range(3):
        lengths, units = (pairs(seed), [2] * 128) if kind == "pairs" else packs_of(seed)
        kw = {"topology": Topology(dp=4), "max_tokens_per_rank": 8192, "cost": ATTENTION, "balance": balance}
        ours = make_plan(lengths, "balanced", units=units, **kw)  # type: ignore[arg-type]
        summed = [sum(lengths[s] for s in unit) for unit in members(units)]
        as_one = make_plan(summed, "balanced", **kw)  # type: ignore[arg-type]
        theirs = replace(
            ours,
            microbatches=tuple(
                Microbatch(
                    packs=tuple(
                        replace(pack, sample_ids=tuple(s for unit in pack.sample_ids for s in members(units)[unit]))
                        for pack in row.packs
                    )
                )
                for row in as_one.microbatches
            ),
        )
        assert ours.num_microbatches == as_one.num_microbatches
        key = f"{balance}_imbalance"
        figures.append([getattr(plan.metrics(lengths), key) for plan in (ours, theirs)])
    mine, theirs_mean = np.mean(figures, axis=0)
    assert mine <= (1.001 if balance == "step" else 1.08)
    assert theirs_mean >= (1.05 if balance == "step" else 1.12)


def test_what_balanced_could_gain_is_told_of_whole_units() -> None:
    """Units with 128, 32 and 32 pairs: no plan has less than 128 / 96. Samples apart could be shared out evenly."""
    lengths, units = [8, 8, 4, 4, 4, 4], [2, 2, 2]
    plan = make_plan(lengths, "first_fit", Topology(dp=2), 24, cost=ATTENTION, units=units)
    assert [pack.sample_ids for pack in plan.packs] == [(0, 1, 2, 3), (4, 5)]
    said = BalanceAdvice(steps=1).look_at(plan, lengths)
    assert said is not None
    assert f"{160 / 96:.3f} times the mean rank's work" in said
    assert f"less than {128 / 96:.3f}" in said


def test_the_bound_on_packs_is_of_samples_where_they_are_counted() -> None:
    """A pack of 3 samples holds the pair and one more; three pairs need three packs."""
    for units, packs in (([2, 1, 1], 2), ([2, 2, 2], 3)):
        lengths = [1] * sum(units)
        plan = make_plan(lengths, "first_fit", max_tokens_per_rank=8, max_seqs=3, units=units)
        assert plan.metrics(lengths).packs_lower_bound == packs


def test_a_long_unit_of_little_work_keeps_the_sums_exact() -> None:
    """Costs are scaled by the largest, which is not the longest unit's."""
    many = 2**21
    items = Items(lengths=np.repeat([1, many - 1], [many, 4]), units=Units((many, 1, 1, 1, 1)))
    problem = problem_of(items, Topology(dp=2), 4 * many)
    assert sorted(len({1, 2, 3, 4}.intersection(ids)) for ids in SCHEDULERS["balanced"](problem)) == [2, 2]  # type: ignore[arg-type]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 3))
def test_no_unit_is_passed_over_that_a_row_has_room_for(drawn: list[tuple[int, int]], ranks: int) -> None:
    """Longer units may cost less, so that a row whose pay is spent for the next one may still take a later one."""
    tokens, costs = np.ascontiguousarray(np.array(sorted(drawn, key=lambda one: -one[0])).T)
    bin_of, cost, _ = lockstep.fill_rows(tokens, costs, 12, ranks, 12, 12, 1.0, lockstep.ANY, True)
    assert cost >= 0
    paid, room = (
        np.bincount(bin_of, weights=values, minlength=12 * ranks).reshape(12, ranks) for values in (costs, tokens)
    )
    for row in range(12):
        for place in np.flatnonzero(bin_of // ranks > row):
            takes = (12 - room[row] >= tokens[place]) & (paid[row].max() - paid[row] >= costs[place])
            assert not takes.any(), "the row's ceiling is at least what its dearest rank pays"


# What is refused


def test_what_is_no_unit_is_refused() -> None:
    with pytest.raises(PackingError, match="units hold 3 samples in all; there are 2 lengths"):
        make_plan([1, 2], units=[2, 1])
    with pytest.raises(PackingError, match=r"units\[1\] is 0"):
        make_plan([1, 2], units=[2, 0])
    with pytest.raises(PackingError, match=r"units\[0\] is 1\.5"):
        make_plan([1, 2], units=[1.5, 0.5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="--thd-max-packed-sequences 1: 2 samples of one row must share a pack"):
        make_plan([1, 2, 3], units=[1, 2], max_seqs=1)
    with pytest.raises(CapacityError, match="Samples 1 to 2, which must share a pack, have 9 padded tokens"):
        make_plan([1, 4, 5], units=[1, 2], max_tokens_per_rank=8)


@settings(max_examples=20)
@given(cases_of_units())
def test_a_plan_that_parts_a_unit_is_refused(drawn: tuple[PlanningCase, list[int]]) -> None:
    case, units = drawn
    apart = plan_case(case, "first_fit")
    whole = plan_case(case, "first_fit", units=units)
    pack_of = {s: number for number, pack in enumerate(apart.packs) for s in pack.sample_ids}
    parted = any(len({pack_of[s] for s in samples}) > 1 for samples in members(units))
    claimed = replace(apart, units=whole.units)
    if parted:
        with pytest.raises(PackingError, match="must share a pack; the plan parts them"):
            check_plan(claimed, case.lengths, case.max_seqs, case.microbatch_multiple)
    else:
        check_plan(claimed, case.lengths, case.max_seqs, case.microbatch_multiple)
