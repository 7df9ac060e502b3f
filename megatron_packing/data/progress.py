"""How does long work show that it goes on? By a bar on a terminal; of large files, in a log, by a line now and then."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_WORTH_A_BAR_BYTES = 256 << 20
"""About half a second of indexing."""
_SECONDS_BETWEEN_LINES = 30.0

Advance = Callable[[int], None]
"""Told the number of bytes done since the last call."""


def progress_bar(*, wanted: bool, in_bytes: bool = False) -> "Progress":
    """A bar on standard error that leaves no trace; none where that is no terminal, or the work is short.

    Args:
        wanted: whether the work is long enough for a bar.
        in_bytes: whether bytes are counted, not rows.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    done = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not (wanted and errors.is_terminal))


@contextlib.contextmanager
def byte_progress(doing: str, path: str, total: int) -> Iterator[Advance]:
    """Show the progress of work over the `total` bytes of `path`, which is `doing` ("indexing") it."""
    if total < _WORTH_A_BAR_BYTES:
        yield lambda _: None
    elif sys.stderr.isatty():
        with progress_bar(wanted=True, in_bytes=True) as progress:
            # A whole path would leave the bar no room.
            task = progress.add_task(f"{doing} {os.path.basename(path)}", total=total)
            yield lambda count: progress.advance(task, count)
    else:
        yield _lines(f"{doing} {path}", total)


def _lines(doing: str, total: int) -> Advance:
    done, said = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"megatron_packing: {doing}: {done / total:.0%} of {total / 1e9:.1f} GB", file=sys.stderr, flush=True)

    return advance
