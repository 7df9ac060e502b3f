"""Is the next step packed while this one computes, of the items that are then asked for, and does it fail only then?"""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode

from megatron_packing.config import PackingConfig
from megatron_packing.errors import PackingError
from megatron_packing.mcore.iterator import PackedStep, StepItems, StepPacker
from megatron_packing.mcore.prefetch import PrefetchingPacker, ReadAhead
from megatron_packing.mcore.watch import ReadLimit
from megatron_packing.topology import Topology

SECONDS = 60.0  # for a thread; more means that it waits for what never comes
MAIN, THREAD = "MainThread", "packing-prefetch"


@pytest.fixture(autouse=True)
def _megatron_keeps_a_steps_items(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(get_mode=lambda: RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)


def items(*, fails_at: int | None = None) -> Iterator[dict[str, Any]]:
    """Samples of four tokens that name them; every eighth row is lost."""
    for number in itertools.count():
        if number == fails_at:
            raise ValueError(f"row {number} is broken")
        if number % 8 == 7:
            yield {"dropped": "no_targets", "why": f"row {number}"}
        else:
            ids = torch.full((4,), number)
            yield {"tokens": ids, "labels": ids, "loss_mask": torch.ones(4), "original_seq_len": 4}


class Recorded(StepPacker):
    """A packer of one rank that says which thread packed how many items."""

    def __init__(self) -> None:
        config = PackingConfig(topology=Topology(), seq_length=8, scheduler="first_fit", max_tokens_per_rank=8)
        super().__init__(config, group=None, device="cpu", limit=ReadLimit(SECONDS))
        self.packed: list[tuple[str, int]] = []
        self.may_prefetch = threading.Event()
        self.may_prefetch.set()

    def pack_items(self, items: StepItems) -> PackedStep:
        name = threading.current_thread().name
        assert name == MAIN or self.may_prefetch.wait(SECONDS)
        self.packed.append((name, len(items.items)))
        return super().pack_items(items)


class Setup:
    """A run's packer and iterator, as Megatron hands them over."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.packer = Recorded()
        self.prefetching = PrefetchingPacker(self.packer)
        self.iterator = RerunDataIterator(ReadAhead(items(fails_at=fails_at)))

    def step(self, count: int = 4, *, last: bool = False, again: bool = False) -> PackedStep:
        """One call of the schedule: of a new step, or of the same one."""
        self.iterator.rewind() if again else self.iterator.advance()
        return self.prefetching.pack(self.iterator, count, another_follows=not last)


def numbers(step: PackedStep) -> list[int]:
    """The samples of a step."""
    return sorted({number for batch in step.batches for number in batch.tokens_T.tolist()})


def test_the_next_step_is_packed_while_this_one_computes() -> None:
    run = Setup()
    run.packer.may_prefetch.clear()
    first = run.step()
    assert run.packer.packed == [(MAIN, 4)], "and training goes on, though the next step is not packed"
    run.packer.may_prefetch.set()
    run.prefetching.close()  # stands for a computation that takes longer
    assert run.packer.packed == [(MAIN, 4), (THREAD, 4)], "the second step, before it was asked for"
    second = run.step(last=True)
    assert run.packer.packed == [(MAIN, 4), (THREAD, 4)]
    assert (numbers(first), numbers(second)) == ([0, 1, 2, 3], [4, 5, 6])
    assert first.figures.waited_ms == first.figures.plan_ms + first.figures.exchange_ms
    assert second.figures.waited_ms != second.figures.plan_ms + second.figures.exchange_ms


@pytest.mark.parametrize("steps", [1, 5])
def test_the_same_samples_and_losses_as_without(steps: int) -> None:
    run, plain = Setup(), Recorded()
    drawn = items()
    for number in range(steps):
        mine, theirs = run.step(last=number == steps - 1), plain.pack(drawn, 4)
        assert numbers(mine) == numbers(theirs)
        assert (mine.lost, mine.figures.samples) == (theirs.lost, theirs.figures.samples)
    assert run.packer.packed == [(MAIN, 4), *[(THREAD, 4)] * (steps - 1)]


def test_nothing_is_read_beyond_the_last_step() -> None:
    run = Setup(fails_at=8)
    assert [numbers(run.step(last=number == 1)) for number in range(2)] == [[0, 1, 2, 3], [4, 5, 6]]
    run.prefetching.close()


def test_a_step_that_runs_again_is_packed_anew_and_the_next_one_kept() -> None:
    run = Setup()
    run.step()
    second, again = run.step(), run.step(again=True)
    third = run.step(last=True)
    assert numbers(second) == numbers(again) == [4, 5, 6]
    assert numbers(third) == [8, 9, 10, 11]
    assert run.packer.packed == [(MAIN, 4), (THREAD, 4), (THREAD, 4), (MAIN, 4)]
    assert again.lost.counts == second.lost.counts == {"no_targets": 1}


def test_a_larger_step_takes_what_was_read_ahead_and_more() -> None:
    """Megatron's ramp-up of the batch. The row that the step ahead told of is told of once, by the step that runs."""
    run = Setup()
    steps = [run.step(4), run.step(6), run.step(6), run.step(2, last=True)]
    assert [numbers(step) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 8, 9], [10, 11, 12, 13, 14], [16, 17]]
    assert [step.lost.news for step in steps] == [
        (),
        (("no_targets", "row 7"),),
        (("no_targets", "row 15"),),
        (),
    ]
    assert run.packer.packed == [(MAIN, 4), (THREAD, 4), (MAIN, 6), (THREAD, 6), (THREAD, 6), (MAIN, 2)]


@pytest.mark.parametrize("fails_at", [4, 6])
def test_a_row_that_cannot_be_read_ends_its_own_step_and_none_before(fails_at: int) -> None:
    run = Setup(fails_at=fails_at)
    assert numbers(run.step()) == [0, 1, 2, 3]
    assert numbers(run.step(again=True)) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(PackingError, match=f"row {fails_at} is broken"):
            run.step()


def test_data_that_end_are_told_of_in_the_step_that_lacks_them() -> None:
    run = Setup()
    run.iterator = RerunDataIterator(ReadAhead(itertools.islice(items(), 6)))
    run.step()
    with pytest.raises(PackingError, match="ended in the middle of a step"):
        run.step()


def test_a_planner_that_fails_ahead_ends_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Setup()
    run.step()
    run.prefetching.close()
    run.step()  # the third is packed by now, or will be under a planner that fails
    run.prefetching.close()
    monkeypatch.setattr(StepPacker, "_exchange", lambda *args: 1 / 0)
    run.step()
    with pytest.raises(ZeroDivisionError):
        run.step()


def test_an_iterator_that_cannot_be_read_ahead_is_named() -> None:
    run = Setup()
    run.iterator = RerunDataIterator(items())
    with pytest.raises(PackingError, match=r"--packing-prefetch: a data iterator of type generator.*Drop the flag"):
        run.step()
