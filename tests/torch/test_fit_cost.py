"""Are the microbatches of the first steps timed, and only they, and is their cost found?"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_packing.mcore.fit_cost import CostFitter, take_over
from megatron_packing.schedule import CostModel
from megatron_packing.thd import PackShare, build_pack, dummy_pack, share_of_rank
from tests.torch.toys import numbered

STEPS = [[[5, 3], [9]], [[2, 2, 2], [12, 1], [4]], [[7], [1, 1]], [[30]], [[6, 6]]]
"""Of each iteration from 1 on, the lengths in each of its packs."""


class Machine:
    """Runs packs as Megatron's schedule does, on a clock that only moves with work."""

    def __init__(
        self,
        cost: Callable[[list[int]], float],
        steps: int,
        *,
        arguments: dict[str, Any] | None = None,
        layout: str = "TP 1",
    ) -> None:
        self.now, self._cost = 0.0, cost
        self.arguments = {} if arguments is None else arguments
        """What a checkpoint holds."""
        self.fitter = CostFitter(steps, layout=layout, store=lambda: self.arguments, clock=lambda: self.now)
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


def _run(machine: Machine, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        machine.run(iteration, STEPS[iteration % len(STEPS)])


@pytest.mark.parametrize("stopped_after", [7, 8])
def test_a_resumed_run_goes_by_the_cost_that_was_found(stopped_after: int) -> None:
    """To the last bit, from its first step on, though this machine has become another one."""
    first = Machine(_ms, steps=5)
    _run(first, 1, stopped_after)
    ((from_step, cost),) = first.used
    assert from_step == 7, "after a step that is not measured and five that are"
    loaded = Namespace()
    take_over(Namespace(lr=1.0, **first.arguments), loaded)
    second = Machine(lambda lengths: 100.0 * sum(lengths), steps=5, arguments=vars(loaded))
    _run(second, stopped_after + 1, stopped_after + 8)
    assert second.used == [(stopped_after + 1, cost)]
    assert second.said == [f"{first.said[0]} (from the checkpoint)"]
    assert second.arguments == first.arguments, "and so does the next one"


@pytest.mark.parametrize("stopped_after", range(1, 7))
def test_what_was_measured_before_the_stop_counts(stopped_after: int) -> None:
    """The first step of a process is slow and not measured: the fit comes a step later than without the stop."""
    first = Machine(_ms, steps=5)
    _run(first, 1, stopped_after)
    assert not first.used
    second = Machine(lambda lengths: 1e6, steps=5, arguments=first.arguments)
    second.run(stopped_after + 1, [[2]])
    second._cost = _ms
    _run(second, stopped_after + 2, 9)
    ((iteration, cost),) = second.used
    assert iteration == (7 if stopped_after == 6 else 8)
    assert (cost.linear, cost.quadratic) == pytest.approx((3.0, 0.5), rel=1e-9)
    before = sum(len(STEPS[step % len(STEPS)]) for step in range(2, stopped_after + 1))
    assert len(second.said) == 1 + (before > 0)
    if before:
        assert f"{before} microbatches were measured before the checkpoint" in second.said[0]


def test_a_fit_that_failed_is_not_tried_again() -> None:
    first = Machine(lambda lengths: 5.0, steps=2)
    _run(first, 1, 4)
    second = Machine(_ms, steps=2, arguments=first.arguments)
    _run(second, 5, 9)
    assert not first.used + second.used
    assert second.said == [f"{first.said[0]} (from the checkpoint)"]


def test_costs_of_another_layout_are_measured_anew() -> None:
    first = Machine(lambda lengths: 2 * _ms(lengths), steps=3)
    _run(first, 1, 5)
    second = Machine(_ms, steps=3, arguments=first.arguments, layout="TP 2")
    _run(second, 6, 10)
    ((iteration, cost),) = second.used
    assert iteration == 10
    assert (cost.linear, cost.quadratic) == pytest.approx((3.0, 0.5), rel=1e-9)
    assert "measured with TP 1, this run has TP 2: measured anew" in second.said[0]


def test_measured_costs_that_are_not_used_are_named() -> None:
    first = Machine(_ms, steps=3)
    _run(first, 1, 5)
    kept = dict(first.arguments)
    second = Machine(_ms, steps=0, arguments=first.arguments)
    _run(second, 6, 7)
    assert not second.used
    (said,) = second.said
    assert "not used without --packing-fit-cost" in said
    assert second.arguments == kept, "a run with the flag may go on from the next checkpoint"


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
