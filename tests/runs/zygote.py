"""A process that has Megatron in memory and forks the ranks of each run: `python -m tests.runs.zygote PRELOAD`.

Megatron takes some 5 seconds to import; a forked rank starts in milliseconds. Requests come as lines on standard input
(a pickled `Request` in hex), the ranks' exit codes leave as JSON lists on standard output. PRELOAD is the module that
has everything imported.
"""

import contextlib
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run: `function(*arguments)` on every rank."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    ranks: int
    port: int
    folder: Path
    """Where each rank's output goes, and what it records."""
    seconds: float
    """After which ranks that still run are killed; their exit code is then -9."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not be taken for an answer
    importlib.import_module(sys.argv[1])

    for line in sys.stdin:
        request = pickle.loads(bytes.fromhex(line))
        pids = [_fork_rank(request, rank) for rank in range(request.ranks)]
        answers.write(json.dumps(_wait(pids, request.seconds)) + "\n")
    os._exit(0)  # taking Python and all of Megatron down in order takes seconds


def _fork_rank(request: Request, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)  # so that loader workers can be ended with their rank
    code = 1
    try:
        code = _run_rank(request, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(request: Request, rank: int) -> int:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request.port),
        RECORD_TO=str(request.folder),
    )
    with open(request.folder / f"rank{rank}.log", "wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        request.function(*request.arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _wait(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
