"""How does long work show that it goes on? A bar on standard error where that is a terminal, else nothing."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(*, wanted: bool) -> Progress:
    """A bar on standard error that leaves no trace; none where that is no terminal, or the work is short.

    Args:
        wanted: whether the work is long enough for a bar.
    """
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not (wanted and errors.is_terminal))
