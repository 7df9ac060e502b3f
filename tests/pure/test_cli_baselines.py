"""What do steps cost without packing? By hand, and never less than what packing cannot go below."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_packing.cli.baselines import padded_baseline, sorted_baseline
from megatron_packing.schedule import ATTENTION_ONLY, CostModel, make_plan
from megatron_packing.topology import Topology

TOKENS_ONLY = CostModel(linear=1, quadratic=0)


def test_sorting_by_hand() -> None:
    """[6, 5] on rank 0 and [3, 2] on rank 1, then [1] on rank 0: rows of 6, 3 and 1."""
    steps = [np.array([2, 6, 1, 5, 3])]
    got = sorted_baseline(steps, 12, Topology(dp=2), TOKENS_ONLY)
    assert (got.microbatches_per_rank, got.packs) == (1, 2), "3 rows of at most 4 tokens fit beside the two long ones"
    got = sorted_baseline([np.array([2, 6, 1, 5, 3, 3, 3])], 12, Topology(dp=2), TOKENS_ONLY)
    assert (got.microbatches_per_rank, got.packs) == (2, 3)  # 6 6 | 3 3 3 3 | 1
    assert got.padding_tokens == (12 + 12 + 1) - 23
    assert got.fill == pytest.approx(23 / 25)
    assert got.step_imbalance == pytest.approx(13 / 11.5)
    assert got.lockstep_imbalance == pytest.approx((12 + 1) / 11.5)


def test_padding_by_hand() -> None:
    got = padded_baseline([np.array([4, 2, 2]), np.array([4, 4, 4])], 4, Topology(dp=2), TOKENS_ONLY)
    assert (got.microbatches_per_rank, got.packs, got.padding_tokens) == (2, 3, 2)
    assert got.fill == pytest.approx((8 / 12 + 1) / 2)
    assert got.step_imbalance == pytest.approx((8 / 4 + 8 / 6) / 2)


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40), dp=st.integers(1, 4), cp=st.sampled_from([1, 2]))
def test_no_baseline_beats_the_bounds_of_packing(lengths: list[int], dp: int, cp: int) -> None:
    topology, step = Topology(dp=dp, cp=cp), np.array(lengths)
    bound = make_plan(step, "first_fit", topology, 64 // cp).metrics(step).lockstep_lower_bound
    padded = padded_baseline([step], 64, topology, ATTENTION_ONLY)
    by_length = sorted_baseline([step], 64, topology, ATTENTION_ONLY)
    for one in (padded, by_length):
        assert one.lockstep_imbalance >= one.step_imbalance * (1 - 1e-9)
        assert one.lockstep_imbalance >= bound * (1 - 1e-9)
        assert one.fill == pytest.approx(sum(lengths) / (sum(lengths) + one.padding_tokens))
    assert by_length.padding_tokens <= padded.padding_tokens
