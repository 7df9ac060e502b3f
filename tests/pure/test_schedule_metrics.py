"""Do the figures say what they claim to?"""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_packing.errors import PackingError
from megatron_packing.schedule import CostModel, make_plan, mean_metrics
from megatron_packing.topology import Topology
from tests.strategies import PlanningCase, planning_cases

KEYS = [
    "steps",
    "microbatches_per_rank",
    "packs",
    "packs_lower_bound",
    "fill",
    "max_pack_load",
    "padding_tokens",
    "step_imbalance",
    "lockstep_imbalance",
    "lockstep_lower_bound",
    "dropped",
    "plan_ms",
]


def test_a_plan_by_hand() -> None:
    # Alignment 4, capacity 16, padded lengths 8, 8, 12, 16. Three packs, [0, 1], [2], [3]; sample 1 moves to a fourth.
    lengths = [5, 8, 9, 16]
    plan = make_plan(lengths, "dp_balanced", Topology(dp=2, cp=2), 8)
    assert [pack.sample_ids for pack in plan.packs] == [(0,), (2,), (3,), (1,)]
    metrics = plan.metrics(lengths, dropped=3)
    figures = metrics.as_dict()
    assert list(figures) == KEYS
    assert figures.pop("plan_ms") == plan.plan_ms > 0
    # Ranks: 25 + 256 and 81 + 64. Rows: (25, 81) and (256, 64). Mean: 426 / 2.
    assert figures == {
        "steps": 1,
        "microbatches_per_rank": 2,
        "packs": 4,
        "packs_lower_bound": 3,
        "fill": 38 / 64,
        "max_pack_load": 1.0,
        "padding_tokens": 6,
        "step_imbalance": 281 / 213,
        "lockstep_imbalance": (81 + 256) / 213,
        "lockstep_lower_bound": pytest.approx((256 + 64) / 213),  # 16, 12 and 8 share no row of 2 x 16
        "dropped": 3,
    }
    assert (metrics.alignment_waste, metrics.tail_waste, metrics.dummy_waste) == (6, 20, 0)


def test_a_dummy_counts_in_packs_fill_and_padding() -> None:
    lengths = [7, 8, 4]
    metrics = make_plan(lengths, topology=Topology(dp=2, cp=2), max_tokens_per_rank=4).metrics(lengths)
    assert metrics.packs == 4
    assert metrics.packs_lower_bound == 3
    assert metrics.fill == 19 / 32
    assert metrics.padding_tokens == 1 + 4
    assert (metrics.alignment_waste, metrics.tail_waste, metrics.dummy_waste) == (1, 4, 8)
    # Ranks: 49 + 16 and 64. Rows: 64 and 16.
    assert metrics.step_imbalance == 65 / 64.5
    assert metrics.lockstep_imbalance == 80 / 64.5


def test_a_plan_of_dummies_is_balanced_and_empty() -> None:
    metrics = make_plan([], topology=Topology(dp=2, cp=2), max_tokens_per_rank=4).metrics([])
    assert (metrics.step_imbalance, metrics.lockstep_imbalance, metrics.lockstep_lower_bound) == (1.0, 1.0, 1.0)
    assert (metrics.fill, metrics.packs, metrics.packs_lower_bound, metrics.padding_tokens) == (0.0, 2, 0, 8)
    assert metrics.max_pack_load == 4 / 8


@settings(max_examples=60)
@given(planning_cases())
def test_every_slot_is_accounted_for(case: PlanningCase) -> None:
    plan = make_plan(
        case.lengths, "first_fit", case.topology, case.max_tokens_per_rank, case.max_seqs, case.microbatch_multiple
    )
    metrics = plan.metrics(case.lengths)
    waste = metrics.alignment_waste + metrics.tail_waste + metrics.dummy_waste
    assert metrics.packs * plan.capacity == sum(case.lengths) + waste
    assert metrics.fill == pytest.approx(1 - waste / (metrics.packs * plan.capacity))
    assert metrics.padding_tokens == sum(pack.padded_tokens for pack in plan.packs) - sum(case.lengths)
    assert metrics.max_pack_load <= 1
    assert 1 - 1e-9 <= metrics.step_imbalance <= metrics.lockstep_imbalance + 1e-9
    assert metrics.lockstep_imbalance <= case.topology.dp + 1e-9


def test_cost_is_linear_and_quadratic_in_the_length() -> None:
    quadratic = CostModel(linear=0, quadratic=1)
    assert quadratic.of([1024] * 4).sum() == 4_194_304
    assert quadratic.of([4096]).sum() == 16_777_216
    assert CostModel(linear=3, quadratic=2).of([1, 10]).tolist() == [5, 230]
    assert quadratic.of([2**31]).tolist() == [2.0**62]


def test_the_plans_cost_model_decides_the_imbalance() -> None:
    lengths = [8, 4, 4]
    balanced, uneven = (
        make_plan(lengths, topology=Topology(dp=2), max_tokens_per_rank=8, cost=cost).metrics(lengths).step_imbalance
        for cost in (CostModel(linear=1, quadratic=0), CostModel(linear=0, quadratic=1))
    )
    assert balanced == 1.0
    assert uneven == 64 / 48
    nothing = CostModel(linear=0, quadratic=0)
    assert make_plan(lengths, topology=Topology(dp=2), cost=nothing).metrics(lengths).step_imbalance == 1.0


def test_bounds_are_of_padded_tokens() -> None:
    lengths = [5] * 4  # 20 tokens, 32 padded; a pack holds 24
    assert make_plan(lengths, topology=Topology(cp=2), max_tokens_per_rank=12).metrics(lengths).packs_lower_bound == 2


def test_max_seqs_raises_the_bounds() -> None:
    lengths = [1] * 3
    metrics = make_plan(lengths, topology=Topology(dp=2), max_seqs=1, max_tokens_per_rank=8).metrics(lengths)
    assert metrics.packs_lower_bound == 3
    assert metrics.lockstep_lower_bound == pytest.approx(2 / 1.5)


def test_planning_time_is_measured_and_never_compared() -> None:
    lengths = [1, 2, 3]
    metrics = make_plan(lengths).metrics(lengths)
    assert metrics.plan_ms > 0
    assert replace(metrics, plan_ms=metrics.plan_ms + 1) == metrics


def test_means_over_steps() -> None:
    one, two = [8, 4], [8, 8, 8]
    first, second = (make_plan(ls, max_tokens_per_rank=16).metrics(ls, dropped=len(ls)) for ls in (one, two))
    mean = mean_metrics([first, second])
    assert (mean.steps, mean.dropped) == (2, 5)
    assert mean.packs == 1.5
    assert mean.max_pack_load == 1.0 == max(first.max_pack_load, second.max_pack_load) > first.max_pack_load
    assert mean.fill == (first.fill + second.fill) / 2
    assert mean.plan_ms == (first.plan_ms + second.plan_ms) / 2
    assert mean_metrics([first]) == first
    with pytest.raises(PackingError, match="0 metrics"):
        mean_metrics([])


def test_planning_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'numba', 'megatron_packing.data'): sys.modules[name] = None\n"
        "from megatron_packing.schedule import make_plan\n"
        "print(len(make_plan([5, 9], max_tokens_per_rank=16).metrics([5, 9]).as_dict()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "12\n"
