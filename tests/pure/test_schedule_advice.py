"""Is `balanced` recommended where it helps, once, and nowhere else?"""

import numpy as np
import pytest

from megatron_packing.schedule import BalanceAdvice, CostModel, make_plan
from megatron_packing.topology import Topology

STEPS = [np.clip(np.random.default_rng(i).lognormal(5.8, 1.1, 128).astype(np.int64), 16, 4096) for i in range(25)]


def said(scheduler: str = "first_fit", topology: Topology = Topology(dp=4), **advice: str) -> list[tuple[int, str]]:  # noqa: B008
    asked = BalanceAdvice(**advice)  # type: ignore[arg-type]
    answers = []
    for number, lengths in enumerate(STEPS):
        plan = make_plan(lengths, scheduler, topology, 4096, cost=CostModel(linear=0, quadratic=1))
        answers.append((number, asked.look_at(plan, lengths)))
    return [(number, answer) for number, answer in answers if answer is not None]


@pytest.mark.parametrize(
    ("topology", "key"), [(Topology(dp=4), "step_imbalance"), (Topology(dp=4, ep=2), "lockstep_imbalance")]
)
def test_it_is_said_once_with_the_mean_and_what_is_least(topology: Topology, key: str) -> None:
    ((number, words),) = said(topology=topology)
    assert number == 9
    plans = [make_plan(lengths, "first_fit", topology, 4096) for lengths in STEPS[:10]]
    mean = np.mean([getattr(plan.metrics(lengths), key) for plan, lengths in zip(plans, STEPS, strict=False)])
    assert f"first_fit gave the busiest rank {mean:.3f} times" in words
    best = [make_plan(lengths, "balanced", topology, 4096).metrics(lengths) for lengths in STEPS[:10]]
    least = float(words.split("less than ")[1].split(",")[0])
    assert 1 <= least <= np.mean([getattr(one, key) for one in best]) + 5e-4


def test_nothing_is_said_where_nothing_is_gained() -> None:
    assert said("balanced") == []
    assert said(topology=Topology(dp=1)) == []
    alike = BalanceAdvice(steps=1)
    assert alike.look_at(make_plan([8] * 8, topology=Topology(dp=4), max_tokens_per_rank=8), [8] * 8) is None
    assert alike.look_at(make_plan([], topology=Topology(dp=4)), []) is None
