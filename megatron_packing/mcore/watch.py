"""What if a reader never gives its next item? The wait gets a limit, and the run an end that says where it stood.

The item is drawn in the main thread as ever, so that order, rewinds and all that belongs to a thread (its CUDA device,
its modes) stay as they are. A thread beside it looks at the clock. After the limit it interrupts the main thread with a
signal, whose handler raises; the failure is then shared like any other. A reader that swallows the exception, or stands
in code that no signal interrupts, is ended with its process. So is one that holds the interpreter's lock, where no
thread of Python runs: the C timer of `faulthandler` prints where it stands. Cost: under 1 microsecond an item, some 30
a step, and one look a second.
"""

import faulthandler
import signal
import sysconfig
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from megatron_packing.errors import PackingError
from megatron_packing.mcore import peers

GRACE_SECONDS = 5.0
"""From the interruption to the end of the process, for a reader that does not let itself be interrupted."""

# The least used signal there is; macOS has no real-time signals.
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGALRM)


class ReadLimit:
    """Draws items, none of which may take longer than `seconds`. One for a process: its signal has one handler.

    Only in the main thread, the one that signals interrupt; elsewhere there is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None  # when the wait began; None while nothing is waited for
        self._item = (0, 0, 0)
        self._watched = False  # from the first item on
        self._is_watching = False  # there is a limit
        self._timer_lock = threading.Lock()
        self._drawing = False  # a step's items, so that the timer must be set

    def next(self, iterator: Iterator[Any], number: int, count: int, *, steps_ahead: int = 0) -> Any:
        """The next item of `iterator`: the `number`th (from 0) of the `count` of a step, of this one or a later one.

        Raises:
            PackingError: it took too long.
        """
        if not self._watched:
            self._begin()
        self._item = (number, count, steps_ahead)
        if number == 0:
            self._set_timer(drawing=True)
        self._since = time.monotonic()
        drawn = False
        try:
            item = next(iterator)
            drawn = True
        finally:
            self._since = None
            if not drawn or number == count - 1:
                self._set_timer(drawing=False)
        return item

    def _begin(self) -> None:
        self._watched = True
        self._is_watching = threading.current_thread() is threading.main_thread()
        if self._is_watching:
            signal.signal(_SIGNAL, self._interrupt)
            threading.Thread(target=self._look, name="packing-read-limit", daemon=True).start()

    def _set_timer(self, *, drawing: bool | None = None) -> None:
        """End the process, in C, unless this is called again in time; None: only put off what is set."""
        with self._timer_lock:
            self._drawing = self._drawing if drawing is None else drawing
            if not self._is_watching:
                return
            if self._drawing:
                faulthandler.dump_traceback_later(self._seconds + 2 * GRACE_SECONDS, exit=True)
            elif drawing is not None:
                faulthandler.cancel_dump_traceback_later()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._overdue(time.monotonic()):  # else the item came while the signal was on its way
            raise PackingError(self._message(frame))

    def _overdue(self, now: float) -> bool:
        since = self._since
        return since is not None and now - since > self._seconds

    def _look(self) -> None:
        """The thread's work."""
        while True:
            time.sleep(min(1.0, self._seconds / 4))
            self._set_timer()
            if self._overdue(time.monotonic()):
                self._end_wait()

    def _end_wait(self) -> None:
        message = self._message(None)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _SIGNAL)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._overdue(time.monotonic()):
            if time.monotonic() > deadline:
                peers.end_now(f"{message} It did not let itself be interrupted.", code=2)
            time.sleep(0.05)

    def _message(self, frame: FrameType | None) -> str:
        number, count, steps_ahead = self._item
        return (
            f"the reader of rank {peers.rank()} gave nothing for {self._seconds:g} s; item {number + 1} of {count} of "
            f"{_iteration(steps_ahead)} is missing.{_place(frame)} Look at the storage and the dataset's __getitem__, "
            "or raise --packing-data-timeout."
        )


def _place(frame: FrameType | None) -> str:
    """Where the reader stands, in words: the innermost line that is not Python's own."""
    standard_library = sysconfig.get_path("stdlib")
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_try_get_data":  # of torch's DataLoader
            return " It waits for a loader's worker."
        if not code.co_filename.startswith(standard_library) or "site-packages" in code.co_filename:
            return f" It stands in {code.co_filename}:{frame.f_lineno}."
        frame = frame.f_back
    return ""


def _iteration(steps_ahead: int) -> str:
    from megatron.training.global_vars import get_args

    try:
        return f"iteration {get_args().curr_iteration + 1 + steps_ahead}"
    except AssertionError:  # Megatron's way to say that there are no arguments: packing outside a run
        return "the step"
