"""Are the microbatches of the first steps timed, and only they, and is their cost found?"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_packing.mcore.fit_cost import CostFitter
from megatron_packing.schedule import CostModel
from megatron_packing.thd import PackShare, build_pack, dummy_pack, share_of_rank
from tests.torch.toys import numbered

STEPS = [[[5, 3], [9]], [[2, 2, 2], [12, 1], [4]], [[7], [1, 1]], [[30]], [[6, 6]]]
"""Of each iteration from 1 on, the lengths in each of its packs."""


class Machine:
    """Runs packs as Megatron's schedule does, on a clock that only moves with work."""

    def __init__(self, cost: Callable[[list[int]], float], steps: int) -> None:
        self.now, self._cost = 0.0, cost
        self.fitter = CostFitter(steps, clock=lambda: self.now)
        self.model = SimpleNamespace(finalize_model_grads_func=self._finalize)
        self.finalized = 0
        self.used: list[tuple[int, CostModel]] = []
        self.said: list[str] = []

    def _finalize(self, *args: Any, **keywords: Any) -> None:
        self.now += 1000.0  # waits for other ranks: no microbatch's time
        self.finalized += 1

    def run(self, iteration: int, packs: Sequence[list[int]], *, marked: bool = True) -> None:
        self.fitter.step_begins(iteration, lambda cost: self.used.append((iteration, cost)), self.said.append)
        self.now += 500.0  # data and planning
        with self.fitter.timing(self.model, [_share(lengths) for lengths in packs]):
            for lengths in packs:
                if marked:
                    self.fitter.mark()
                self.now += self._cost(lengths)
            self.model.finalize_model_grads_func([None], None, pg_collection=None)
        assert self.model.finalize_model_grads_func == self._finalize
        assert self.finalized > 0


def _share(lengths: list[int]) -> PackShare:
    batch = build_pack(numbered(lengths), alignment=4) if lengths else dummy_pack(alignment=4)
    return share_of_rank(batch, cp_size=1, cp_rank=0)


def _ms(lengths: list[int]) -> float:
    return 7.0 + 3.0 * sum(lengths) + 0.5 * sum(n * n for n in lengths)


def test_the_cost_of_real_tokens_and_pairs_is_found_and_used_once() -> None:
    machine = Machine(_ms, steps=3)
    for iteration, packs in enumerate(STEPS, start=1):
        machine.run(iteration, packs)
    ((iteration, cost),) = machine.used
    assert iteration == 5, "the first step and the three measured ones are planned as before"
    assert (cost.linear, cost.quadratic) == pytest.approx((3.0, 0.5), rel=1e-9)
    (said,) = machine.said
    assert "6 microbatches measured: 3000 ms a thousand tokens and 5e+05 ms a million pairs" in said
    assert "a token weighs 6 pairs" in said


def test_what_is_no_microbatch_of_a_measured_step_is_left_out() -> None:
    """The slow first step, a dummy, a step that runs a second time, a script that takes packs in its own way."""
    machine = Machine(lambda lengths: _ms(lengths) if lengths else 1e6, steps=4)
    machine._cost, right = lambda lengths: 1e6, machine._cost
    machine.run(11, STEPS[0])  # resumed at iteration 11
    machine.run(12, STEPS[1])
    machine._cost = right
    machine.run(12, STEPS[1])
    machine.run(13, [*STEPS[2], []])
    machine.run(14, STEPS[3], marked=False)
    machine.run(15, STEPS[4])
    assert not machine.used
    machine.run(16, STEPS[0])
    ((_, cost),) = machine.used
    assert (cost.linear, cost.quadratic) == pytest.approx((3.0, 0.5), rel=1e-9)
    assert "6 microbatches" in machine.said[0]


@pytest.mark.parametrize(
    ("cost", "packs", "words"),
    [
        (_ms, [[4], [4]], "2 measured microbatches cannot tell linear from quadratic"),
        (_ms, [], "0 measured microbatches cannot tell"),
        (lambda lengths: 5.0, [[4], [9], [1, 1], [2, 8]], "the 4 times measured do not grow with the tokens"),
    ],
)
def test_times_that_tell_nothing_leave_the_flops(
    cost: Callable[[list[int]], float], packs: list[list[int]], words: str
) -> None:
    machine = Machine(cost, steps=1)
    for iteration in (1, 2, 3, 4):
        machine.run(iteration, packs if iteration == 2 else [[3]])
    assert not machine.used
    (said,) = machine.said
    assert words in said
    assert "WARNING: --packing-fit-cost: balanced keeps to the model's FLOPs" in said


def test_without_the_flag_nothing_is_timed() -> None:
    machine = Machine(_ms, steps=0)
    machine.fitter._clock = lambda: pytest.fail("the clock was read")
    for iteration, packs in enumerate(STEPS, start=1):
        machine.run(iteration, packs)
    assert not machine.used
    assert not machine.said


def test_a_failed_step_leaves_the_model_as_it_was() -> None:
    machine = Machine(_ms, steps=2)
    machine.run(1, STEPS[0])
    machine.fitter.step_begins(2, lambda cost: None, machine.said.append)
    with (
        pytest.raises(RuntimeError, match="of the forward step"),
        machine.fitter.timing(machine.model, [_share([3])]),
    ):
        raise RuntimeError("of the forward step")
    assert machine.model.finalize_model_grads_func == machine._finalize
