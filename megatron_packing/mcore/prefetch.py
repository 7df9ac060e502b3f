"""How do plan and exchange of step n+1 run while step n computes? In a thread, over process groups of their own.

The main thread draws the items of step n+1 once step n is packed, as a reader can only be watched and interrupted there
(`watch`). A thread then gathers the lengths, plans, exchanges the samples and lays them out, on the CPU. When Megatron
asks for step n+1, its items come from what was read ahead; a step is only taken from the thread if it was made of these
very items. So where Megatron draws others (a step that it runs again, a larger step), they are packed then and there.

What goes wrong in the thread is raised when its step is asked for, not before: the steps before it are whole. At most
one step is ahead, and nothing of it counts until it runs, so that a checkpoint knows of no prefetching.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megatron_packing.errors import PackingError
from megatron_packing.mcore.iterator import PackedStep, StepItems, StepPacker

LEAVE_SECONDS = 5.0
"""For the thread to end with the run. Its collectives end at once where the other ranks live, or are gone."""


class ReadAhead(Iterator[Any]):
    """A rank's items of training, some of which can be looked at before they are asked for.

    Args:
        items: a loader.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._kept: deque[Any] = deque()
        self._failure: BaseException | None = None

    def __next__(self) -> Any:
        if self._kept:
            return self._kept.popleft()
        if self._failure is not None:  # met already; reading on would skip an item, or wait once more
            raise self._failure
        return next(self._items)

    def ahead(self) -> Iterator[Any]:
        """The items that will be asked for next. Each is read once, and kept until then; so is what failed."""
        yield from list(self._kept)
        while True:
            try:
                item = next(self._items)
            except StopIteration as end:
                self._failure = end
                return
            except BaseException as failure:
                self._failure = failure
                raise
            self._kept.append(item)
            yield item


class PrefetchingPacker:
    """Packs as `packer` does, and begins with the next step as soon as it has packed one.

    Args:
        packer: on process groups that nothing else uses, and whose backend wants its tensors on the CPU: it runs in a
            thread, in which a CUDA kernel might be queued between two of the main thread's on one rank only.
    """

    def __init__(self, packer: StepPacker) -> None:
        self._packer = packer
        self._next: _StepInThread | None = None

    def pack(self, data_iterator: Iterator[Any], count: int, *, another_follows: bool) -> PackedStep:
        """Draw `count` items and pack the step, if that was not done before; then begin with the next.

        Args:
            data_iterator: the rank's: a `ReadAhead`, or what Megatron wrapped it in.
            count: items.
            another_follows: whether a step of as many items will be asked for; the same on every rank.

        Raises:
            PackingError: on every rank, when any rank failed to draw or to plan.
        """
        step = self._this_step(data_iterator, count)
        if another_follows and self._next is None:
            items = self._packer.draw(_read_ahead(data_iterator).ahead(), count, steps_ahead=1)
            self._next = _StepInThread(self._packer, items)
        return step

    def close(self) -> None:
        """Wait for the thread, if there is one; its step is not needed any more."""
        if self._next is not None:
            self._next.wait(LEAVE_SECONDS)

    def _this_step(self, data_iterator: Iterator[Any], count: int) -> PackedStep:
        started = time.perf_counter()
        if self._next is not None:
            self._next.wait()  # also before a step that it has not packed: their collectives must not cross
        waited_ms = (time.perf_counter() - started) * 1000.0
        items = self._packer.draw(data_iterator, count)
        if self._next is None or not self._next.is_of(items):
            self._drop_unless_of(count)
            return self._packer.pack_items(items)
        ready, self._next = self._next, None
        step = ready.result()
        return replace(step, figures=replace(step.figures, waited_ms=waited_ms))

    def _drop_unless_of(self, count: int) -> None:
        """Forget the step in the thread if steps have another size by now (Megatron's ramp-up of the batch)."""
        if self._next is not None and self._next.count != count:
            if self._next.step is not None:
                self._packer.forget(self._next.step)
            self._next = None


class _StepInThread:
    """One step that is being packed in a thread, begun at once."""

    def __init__(self, packer: StepPacker, items: StepItems) -> None:
        self._packer = packer
        self._items = items
        self.count = items.count
        self.step: PackedStep | None = None
        self._failure: BaseException | None = None
        # A daemon: should its collective never end, the process still does.
        self._thread = threading.Thread(target=self._pack, name="packing-prefetch", daemon=True)
        self._thread.start()

    def _pack(self) -> None:
        try:
            self.step = self._packer.pack_items(self._items)
        except BaseException as failure:  # raised when the step is asked for
            self._failure = failure

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def is_of(self, items: StepItems) -> bool:
        """Whether these are the step's items: the same objects, and as many of them asked for."""
        mine, theirs = self._items, items
        return (
            mine.count == theirs.count
            and len(mine.items) == len(theirs.items)
            and all(a is b for a, b in zip(mine.items, theirs.items, strict=True))
        )

    def result(self) -> PackedStep:
        if self._failure is not None:
            raise self._failure
        assert self.step is not None, "the thread has ended"
        return self.step


def _read_ahead(data_iterator: Iterable[Any]) -> ReadAhead:
    """What Megatron wrapped, to be able to give a step's items again."""
    while not isinstance(data_iterator, ReadAhead):
        inner = getattr(data_iterator, "iterable", None)
        if inner is None:
            raise PackingError(
                f"--packing-prefetch: a data iterator of type {type(data_iterator).__name__} cannot be read ahead. "
                "Drop the flag."
            )
        data_iterator = inner
    return data_iterator
