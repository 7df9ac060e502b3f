"""Ranks that plan together go by one cost, whatever each of them has measured."""

import pytest

from tests.gloo import tasks
from tests.gloo.pool import GlooPool

pytestmark = pytest.mark.gloo


def test_all_ranks_use_one_fit_of_all_their_times(pool: GlooPool) -> None:
    packs = [[[1, 2], [9]], [[4]], [[7, 1]], []]  # alone no rank could tell the terms apart
    answers = pool.run(tasks.fit_cost, of_rank=packs)
    costs = [used for used, _, _ in answers]
    assert costs[0] == costs[1] == costs[2] == costs[3]
    (cost,) = costs[0]
    assert cost.linear == pytest.approx(3.0, abs=0.2)
    assert cost.quadratic == pytest.approx(1.0, abs=0.02)
    assert len({tuple(said) for _, said, _ in answers}) == 1
    assert len({kept for _, _, kept in answers}) == 1, "a checkpoint holds one rank's"
