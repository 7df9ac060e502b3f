"""How does a command speak? Its result on standard output, everything else on standard error."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import typer
from rich.console import Console

from megatron_packing.errors import PackingError

PROGRAM = "megatron-packing"

_PIPE_COLUMNS = 200
"""Width of tables that go to a file or a pipe; rich would take 80 and cut them."""

_USAGE_ERROR = 2
"""The exit status of every error that is the user's to mend, as for a mistyped flag."""


def reports_errors[**P, R](command: Callable[P, R]) -> Callable[P, R]:
    """`command`, with our errors as one line on standard error and exit status 2 instead of a traceback."""

    @functools.wraps(command)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PackingError as error:
            say("error", " ".join(str(error).split("\n")))
            raise typer.Exit(_USAGE_ERROR) from error

    return reporting


def say(kind: str, message: str) -> None:
    """One line on standard error, where it is in no pipe's way."""
    print(f"{PROGRAM}: {kind}: {message}", file=sys.stderr, flush=True)


def print_json(document: Mapping[str, Any]) -> None:
    """One line of JSON on standard output, keys in the order given. Integers of any size stay exact."""
    print(json.dumps(document, allow_nan=False))


def console() -> Console:
    """Where human tables go. What a table shows may be anyone's text, so nothing in it is read as markup."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(width=width, markup=False, emoji=False, highlight=False)
