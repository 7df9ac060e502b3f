"""How far is the reading of a large file? A bar on a terminal; in a log, a line now and then."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

_WORTH_A_BAR_BYTES = 256 << 20
"""About half a second of indexing."""
_SECONDS_BETWEEN_LINES = 30.0

Advance = Callable[[int], None]
"""Told the number of bytes done since the last call."""


@contextlib.contextmanager
def byte_progress(doing: str, path: str, total: int) -> Iterator[Advance]:
    """Show the progress of work over the `total` bytes of `path`, which is `doing` ("indexing") it."""
    if total < _WORTH_A_BAR_BYTES:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar(f"{doing} {os.path.basename(path)}", total) as advance:  # a whole path would leave the bar no room
            yield advance
    else:
        yield _lines(f"{doing} {path}", total)


@contextlib.contextmanager
def _bar(doing: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda count: progress.advance(task, count)


def _lines(doing: str, total: int) -> Advance:
    done, said = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"megatron_packing: {doing}: {done / total:.0%} of {total / 1e9:.1f} GB", file=sys.stderr, flush=True)

    return advance
