"""Does `balanced` keep to the fewest microbatches, and are its ranks alike in cost?"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from megatron_packing.errors import ConfigError
from megatron_packing.schedule import CostModel, Plan, make_plan, warm_up
from megatron_packing.schedule.balanced import cheap_at_both_ends, objective
from megatron_packing.schedule.bounds import step_lower_bound
from megatron_packing.topology import Topology
from tests.pure.test_schedule_bounds import best_lockstep, best_step, partitions
from tests.strategies import PlanningCase, plan_case, planning_cases

DENSE_7B = CostModel(linear=24576, quadratic=1)
ATTENTION = CostModel(linear=0, quadratic=1)
costs = st.sampled_from([ATTENTION, CostModel(linear=20, quadratic=1), CostModel(linear=0.1, quadratic=1e-9)])
balances = st.sampled_from(["step", "lockstep"])


def long_tailed(seed: int, samples: int = 256, longest: int = 8192) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(5.8, 1.1, samples).astype(np.int64), 16, longest)


# What every plan must be


@settings(max_examples=150)
@given(planning_cases(), costs, balances)
def test_every_plan_is_one_that_all_ranks_may_run(case: PlanningCase, cost: CostModel, balance: str) -> None:
    plan = plan_case(case, "balanced", cost=cost, balance=balance)
    event(f"microbatches: {min(plan.num_microbatches, 3)}")
    assert Counter(s for pack in plan.packs for s in pack.sample_ids) == Counter(range(len(case.lengths)))
    for pack in plan.packs:
        assert sum(case.topology.pad(case.lengths[s]) for s in pack.sample_ids) <= case.capacity
        assert case.max_seqs is None or len(pack.sample_ids) <= case.max_seqs
    assert all(len(microbatch.packs) == case.topology.dp for microbatch in plan.microbatches)
    assert plan.num_microbatches % case.microbatch_multiple == 0
    if any(pack.is_dummy for pack in plan.packs):
        assert all(len(pack.sample_ids) <= 1 for pack in plan.packs)


@settings(max_examples=60)
@given(planning_cases(), costs, balances, st.randoms(use_true_random=False))
def test_renaming_the_samples_changes_nothing_but_names(
    case: PlanningCase, cost: CostModel, balance: str, random: object
) -> None:
    shuffled = list(case.lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def lengths_of_packs(lengths: list[int]) -> list[list[int]]:
        plan = plan_case(replace(case, lengths=lengths), "balanced", cost=cost, balance=balance)
        return [sorted(lengths[s] for s in pack.sample_ids) for pack in plan.packs]

    assert lengths_of_packs(case.lengths) == lengths_of_packs(shuffled)


def fewest_microbatches(case: PlanningCase) -> int:
    """By looking at every way to pack."""
    padded = [case.topology.pad(length) for length in case.lengths]
    packs = min(len(packs) for packs in partitions(padded, case.capacity, case.max_seqs))
    multiple = case.topology.dp * case.microbatch_multiple
    return max(1, -(-packs // multiple)) * case.microbatch_multiple


@settings(max_examples=150)
@given(planning_cases(), balances)
def test_there_are_as_few_microbatches_as_can_be(case: PlanningCase, balance: str) -> None:
    assume(len(case.lengths) <= 8)
    assert plan_case(case, "balanced", cost=ATTENTION, balance=balance).num_microbatches == fewest_microbatches(case)


@pytest.mark.parametrize("balance", ["step", "lockstep"])
@pytest.mark.parametrize(
    ("lengths", "capacity", "fewest"),
    [
        ([9, 7, 6, 6, 5, 5, 2], 20, 2),  # only as 9 + 6 + 5 and 7 + 6 + 5 + 2
        ([6, 6, 6, 5, 5, 4, 4, 4, 4], 15, 3),  # only as 6 + 5 + 4, twice, and 6 + 4 + 4
        ([4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3], 10, 4),  # only as 4 + 3 + 3
        ([7, 7, 2], 12, 2),  # 7 and 7 share no pack
    ],
)
def test_fewest_where_placing_longest_first_fails(lengths: list[int], capacity: int, fewest: int, balance: str) -> None:
    plan = make_plan(lengths, "balanced", max_tokens_per_rank=capacity, balance=balance)
    assert plan.num_microbatches == fewest


# How good


small_cases = st.tuples(
    st.lists(st.one_of(st.integers(1, 12), st.sampled_from([4, 6, 12])), min_size=1, max_size=7),
    costs,
    st.integers(1, 3),
)


@settings(max_examples=80)
@given(small_cases)
def test_small_steps_come_near_the_best(case: tuple[list[int], CostModel, int]) -> None:
    """Nine in ten are the best. The others pay for packs that are split so that no rank runs a dummy, or for so few
    samples that there is nothing to level with.
    """
    lengths, cost, dp = case
    kw = {"scheduler": "balanced", "topology": Topology(dp=dp), "max_tokens_per_rank": 12, "cost": cost}
    weights = cost.of(lengths).tolist()
    step = make_plan(lengths, balance="step", **kw)  # type: ignore[arg-type]
    best = best_step(lengths, weights, dp, 12, step.num_microbatches)
    got = step.metrics(lengths).step_imbalance
    event(f"step is best: {got <= best + 1e-9}")
    assert best - 1e-9 <= got <= 1.5 * best
    lockstep = make_plan(lengths, balance="lockstep", **kw)  # type: ignore[arg-type]
    best = best_lockstep(lengths, weights, dp, 12, None)
    got = lockstep.metrics(lengths).lockstep_imbalance
    event(f"lockstep is best: {got <= best + 1e-9}")
    assert best - 1e-9 <= got <= 1.5 * best


@pytest.mark.parametrize("cost", [DENSE_7B, ATTENTION], ids=["7b", "attention"])
@pytest.mark.parametrize("seed", range(6))
def test_long_tailed_steps_come_near_their_bounds(cost: CostModel, seed: int) -> None:
    lengths = long_tailed(seed)
    kw = {"topology": Topology(dp=4), "max_tokens_per_rank": 8192, "cost": cost}
    step, lockstep = (make_plan(lengths, "balanced", balance=b, **kw) for b in ("step", "lockstep"))  # type: ignore
    least = -(-int(lengths.sum()) // (4 * 8192))
    assert step.num_microbatches == lockstep.num_microbatches == least
    floor = step_lower_bound(lengths, cost.of(lengths), dp=4, capacity=8192, num_microbatches=least)
    of_step, of_lockstep = step.metrics(lengths), lockstep.metrics(lengths)
    assert of_step.step_imbalance <= 1.01 * floor
    assert of_step.step_imbalance <= max(of_lockstep.step_imbalance, 1.001 * floor)  # where it stops looking
    assert of_lockstep.lockstep_imbalance <= 1.03 * of_lockstep.lockstep_lower_bound
    assert of_lockstep.lockstep_imbalance <= of_step.lockstep_imbalance
    others = [make_plan(lengths, name, **kw).metrics(lengths) for name in ("first_fit", "dp_balanced")]  # type: ignore
    assert all(of_step.step_imbalance < other.step_imbalance for other in others)


def test_one_long_sample_leaves_its_rank_the_short_ones() -> None:
    # 60 alone costs 3,600. Its rank must carry 60 more tokens, which cost 60 as ones and 1,800 as two of 30.
    lengths = [60] + [30] * 4 + [1] * 60
    plan = make_plan(lengths, "balanced", Topology(dp=2), 60, cost=ATTENTION, balance="step")
    with_long = next(r for r in (0, 1) if any(0 in pack.sample_ids for pack in plan.rank_packs(r)))
    assert not any(s in range(1, 5) for pack in plan.rank_packs(with_long) for s in pack.sample_ids)


# Which of the two, and in which order


@pytest.mark.parametrize(
    ("topology", "chosen"),
    [
        (Topology(dp=8, cp=2, tp=2), "step"),
        (Topology(dp=8, ep=2), "lockstep"),
        (Topology(dp=8, pp=2), "lockstep"),
        (Topology(dp=8, fsdp=True), "lockstep"),
    ],
)
def test_auto_looks_at_when_ranks_meet(topology: Topology, chosen: str) -> None:
    assert objective("auto", topology) == chosen
    lengths = long_tailed(0, longest=4096)
    plans = [make_plan(lengths, "balanced", topology, 4096, balance=b).packs for b in ("auto", "step", "lockstep")]
    assert plans[0] == plans[1 if chosen == "step" else 2] != plans[2 if chosen == "step" else 1]
    assert objective("step", topology) == "step"


@pytest.mark.parametrize("scheduler", ["balanced", "first_fit"])
def test_an_unknown_balance_is_refused(scheduler: str) -> None:
    with pytest.raises(ConfigError, match=r"'both'; set --packing-balance to one of: auto, step, lockstep"):
        make_plan([1], scheduler, balance="both")


def pipeline_ms(rows: list[float], stages: int) -> float:
    """How long 1F1B takes whose microbatches cost `rows` on each stage, forward one part and backward two."""
    forward, backward = [[0.0] * len(rows) for _ in range(stages)], [[0.0] * len(rows) for _ in range(stages)]
    free, done = [0.0] * stages, [0] * stages
    orders = [list(one_f_one_b(stage, stages, len(rows))) for stage in range(stages)]
    while any(done[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while done[s] < len(orders[s]):
                kind, m = orders[s][done[s]]
                before = (forward[s - 1][m] if s else 1e-9) if kind == "F" else forward[s][m]
                if kind == "B" and s < stages - 1:
                    before = backward[s + 1][m]
                if not before:
                    break
                free[s] = max(free[s], before) + rows[m] * (1 if kind == "F" else 2)
                (forward if kind == "F" else backward)[s][m] = free[s]
                done[s] += 1
    return max(free)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[tuple[str, int]]:
    ahead = min(stages - stage - 1, microbatches)
    yield from (("F", m) for m in range(ahead))
    for m in range(microbatches - ahead):
        yield "F", m + ahead
        yield "B", m
    yield from (("B", m) for m in range(microbatches - ahead, microbatches))


def test_the_pipelines_clock_is_right() -> None:
    assert pipeline_ms([1.0] * 8, 1) == pytest.approx(24)
    assert pipeline_ms([1.0] * 8, 4) == pytest.approx((8 + 4 - 1) * 3)


@pytest.mark.parametrize("stages", [2, 4])
def test_pipelines_run_cheap_microbatches_at_both_ends(stages: int) -> None:
    assert cheap_at_both_ends([[4], [3], [2], [1], [0]], 1) == [[0], [2], [4], [3], [1]]
    ms = []
    for seed in range(6):
        lengths = long_tailed(seed)
        kw = {"max_tokens_per_rank": 8192, "cost": ATTENTION, "balance": "lockstep"}
        in_pipeline = make_plan(lengths, "balanced", Topology(dp=2, pp=stages), **kw)  # type: ignore[arg-type]
        dearest_first = make_plan(lengths, "balanced", Topology(dp=2), **kw)  # type: ignore[arg-type]
        assert Counter(in_pipeline.microbatches) == Counter(dearest_first.microbatches)
        ms.append([pipeline_ms(row_costs(plan, lengths), stages) for plan in (in_pipeline, dearest_first)])
    ours, theirs = np.array(ms).T
    assert (ours < theirs).all()


def row_costs(plan: Plan, lengths: np.ndarray) -> list[float]:
    weights = plan.cost.of(lengths)
    return [max(float(weights[list(p.sample_ids)].sum()) for p in m.packs) for m in plan.microbatches]


# The same everywhere


@pytest.mark.parametrize("cost", [CostModel(linear=0, quadratic=0), CostModel(linear=1e-30, quadratic=1e280)])
@pytest.mark.parametrize("balance", ["step", "lockstep"])
def test_any_cost_and_any_length_can_be_planned(cost: CostModel, balance: str) -> None:
    lengths = [2**31 - 1, 2**30, 2**20, 5, 5, 1]
    plan = make_plan(lengths, "balanced", Topology(dp=2), 2**31 - 1, cost=cost, balance=balance)
    assert plan.num_microbatches == 1
    assert sorted(len(pack.sample_ids) for pack in plan.packs) == [1, 5]


def test_nothing_costs_anything_tokens_are_levelled() -> None:
    cost = CostModel(linear=0, quadratic=0)
    plan = make_plan([6, 5, 4, 3], "balanced", Topology(dp=2), 12, cost=cost, balance="lockstep")
    assert [pack.padded_tokens for pack in plan.packs] == [9, 9]


_DIGESTS = """
from megatron_packing.schedule import CostModel, make_plan
from megatron_packing.topology import Topology
lengths = [16 + (i * i * 7919) % 1500 * (1 + (i % 17 == 0)) for i in range(96)]
for balance in ("step", "lockstep"):
    for linear in (0, 0.3, 24576):
        cost = CostModel(linear=linear, quadratic=0.7)
        print(make_plan(lengths, "balanced", Topology(dp=4), 3072, cost=cost, balance=balance).digest())
"""


def test_compiled_and_interpreted_plans_are_the_same() -> None:
    """No other machine is at hand; the interpreter computes as IEEE 754 says, step by step, and fuses nothing."""
    printed = []
    for interpreted in ("0", "1"):
        env = {**os.environ, "NUMBA_DISABLE_JIT": interpreted, "PYTHONHASHSEED": interpreted}
        run = subprocess.run([sys.executable, "-c", _DIGESTS], capture_output=True, text=True, check=True, env=env)
        printed.append(run.stdout.split())
    assert printed[0] == printed[1]
    assert len(set(printed[0])) > 4  # a plan may be the best in both ways


def test_after_warming_up_no_step_waits_for_the_compiler() -> None:
    from megatron_packing.schedule import lockstep, step

    warm_up("balanced")
    loops = [lockstep.fill_rows, lockstep.search_fit, step.share_out, step.fill_ranks, step.trade]
    assert [len(loop.signatures) for loop in loops] == [1] * len(loops)  # type: ignore[attr-defined]
    for balance in ("step", "lockstep"):
        make_plan(long_tailed(1), "balanced", Topology(dp=4), 8192, balance=balance)
        make_plan([9, 7, 6, 6, 5, 5, 2], "balanced", max_tokens_per_rank=20, max_seqs=4, balance=balance)
    assert [len(loop.signatures) for loop in loops] == [1] * len(loops)  # type: ignore[attr-defined]


# The loops, against plain ones


def plain_rows(tokens, costs, rows, ranks, capacity, most, looseness, cheapest):  # type: ignore[no-untyped-def]
    """`fill_rows` without richness, looking at every waiting sample and every bin of the row."""
    room, paid, seats = [capacity] * (rows * ranks), [0] * (rows * ranks), [most] * (rows * ranks)
    bin_of = [-1] * len(tokens)
    for row in range(rows):
        waiting = [i for i in range(len(tokens)) if bin_of[i] < 0]
        if not waiting:
            break
        unpaid, last = sum(costs[i] for i in waiting), row == rows - 1
        ceiling = max(costs[waiting[0]], int(min(looseness * unpaid / (ranks * (rows - row)), unpaid)))
        for i in waiting:
            takes = [
                ((paid if cheapest or last else room)[b], b)
                for b in range(row * ranks, row * ranks + ranks)
                if seats[b] and tokens[i] <= room[b] and (last or paid[b] + costs[i] <= ceiling)
            ]
            if takes:
                b = bin_of[i] = min(takes)[1]
                room[b], paid[b], seats[b] = room[b] - tokens[i], paid[b] + costs[i], seats[b] - 1
    return bin_of


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=12, max_size=30),
    st.integers(2, 3),
    st.integers(2, 4),
    st.integers(1, 9),
    st.sampled_from([1.0, 1.2, 2.0, 1e9]),
    st.booleans(),
)
def test_rows_are_filled_as_by_looking_everywhere(
    lengths: list[int], rows: int, ranks: int, most: int, looseness: float, cheapest: bool
) -> None:
    from megatron_packing.schedule.lockstep import ANY, fill_rows

    tokens = np.sort(lengths)[::-1].copy()
    costs = tokens * tokens + 5 * tokens
    got, cost, _ = fill_rows(tokens, costs, rows, ranks, 40, most, looseness, ANY, cheapest)
    assert got.tolist() == plain_rows(tokens.tolist(), costs.tolist(), rows, ranks, 40, most, looseness, cheapest)
    assert (cost < 0) == (got.min() < 0)


def trades_that_help(tokens, costs, bin_of, ranks, bins, capacity, most):  # type: ignore[no-untyped-def]
    """Every trade of `trade` by which the dearer of two ranks, one of them the dearest, would get cheaper."""
    held = [[i for i in range(len(tokens)) if bin_of[i] == b] for b in range(ranks * bins)]
    room = [capacity - sum(tokens[i] for i in samples) for samples in held]
    paid = [sum(costs[i] for b in range(r * bins, r * bins + bins) for i in held[b]) for r in range(ranks)]
    dearest = paid.index(max(paid))
    for i in (i for b in range(dearest * bins, dearest * bins + bins) for i in held[b]):
        home = bin_of[i]
        for b in (b for b in range(ranks * bins) if b // bins != dearest):
            gap = paid[dearest] - paid[b // bins]
            swaps = [(k,) for k in held[b]] + [()] * (len(held[home]) > 1 and len(held[b]) < most)
            for k in held[b]:
                fits = [m for m in held[b] if m > k and tokens[i] - tokens[k] - tokens[m] <= room[b]]
                if fits and len(held[home]) < most:
                    swaps.append((k, max(fits)))
            for gets in swaps:
                short, moves = tokens[i] - sum(tokens[k] for k in gets), costs[i] - sum(costs[k] for k in gets)
                if -room[home] <= short <= room[b] and 0 < moves < gap:
                    yield i, gets


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=8, max_size=24), st.integers(2, 3), st.integers(1, 3), st.integers(8, 12))
def test_trading_goes_on_while_a_trade_helps(lengths: list[int], ranks: int, bins: int, most: int) -> None:
    from megatron_packing.schedule.step import fill_ranks, trade

    tokens = np.sort(lengths)[::-1].copy()
    costs = tokens * tokens
    capacity = int(tokens.sum()) // (ranks * bins) + 12
    bin_of = fill_ranks(tokens, costs, np.arange(len(tokens)) * ranks // len(tokens), ranks, bins, capacity, most)
    assume(bin_of.min() >= 0)
    instance = tokens.tolist(), costs.tolist()
    event(f"something to trade: {any(True for _ in trades_that_help(*instance, bin_of, ranks, bins, capacity, most))}")
    dearest = trade(tokens, costs, bin_of, ranks, bins, capacity, most, 0, 10**6)
    assert dearest == np.bincount(bin_of // bins, weights=costs).max()
    assert (np.bincount(bin_of, weights=tokens) <= capacity).all()
    assert (np.bincount(bin_of) <= most).all()
    assert not list(trades_that_help(*instance, bin_of, ranks, bins, capacity, most))
