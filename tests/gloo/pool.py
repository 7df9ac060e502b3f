"""How do tests run code on several ranks without paying for new processes each time? A pool, started once.

The pool starts its processes before the first task; they join one gloo group over a file and then wait. A task is a
module-level function and its arguments, sent by pipe to every rank; what it returns, or its traceback, comes back. A
rank that raises, dies or takes too long fails the test with what is known of every rank, and ends the processes: ranks
that wait in a collective for a lost one cannot be saved. The next task starts new ones.

A task that only some ranks take part in asks `group_of(n)` for the group of the first n.
"""

import contextlib
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_START_SECONDS = 90.0  # importing torch, on a busy machine
_GRACE_SECONDS = 2.0  # once a rank has failed: for the others to report the same
_MOST_FAILURES = 5  # then later tasks fail at once: a failing property is tried again and again, on new processes

# Imported once, by the server that the connected processes are forked from: torch takes seconds.
_PRELOAD = ["tests.gloo.tasks"]

_groups: dict[int, Any] = {}  # in a worker: size -> group of the first ranks


class TaskFailed(AssertionError):
    """A rank raised, died or took too long; the message has every rank's traceback."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    process: BaseProcess
    pipe: Connection


class GlooPool:
    """Processes that run tasks together.

    Args:
        size: ranks.
        connected: whether they join a process group; without one they start in no time and share nothing.
    """

    def __init__(self, size: int, *, connected: bool = True) -> None:
        self.size = size
        self._connected = connected
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._failures: list[str] = []

    def run(
        self, task: Callable[..., Any], *args: Any, ranks: int | None = None, of_rank: Sequence[Any] = (), timeout=30.0
    ) -> list[Any]:
        """What `task` returned on each rank.

        Args:
            task: a function that can be imported by name.
            args: arguments that are the same on every rank.
            ranks: the first so many ranks run the task; None: all of them.
            of_rank: one more argument, of its own for each of these ranks, before `args`.
            timeout: seconds until a rank that has not answered fails the task.

        Raises:
            TaskFailed: on any rank.
        """
        ranks = self.size if ranks is None else ranks
        if len(self._failures) >= _MOST_FAILURES:
            raise TaskFailed(f"not tried after {_MOST_FAILURES} failures; the first: {self._failures[0]}")
        if not self._workers:
            self.start()
        for rank, worker in enumerate(self._workers[:ranks]):
            own = (of_rank[rank],) if of_rank else ()
            with contextlib.suppress(BrokenPipeError):  # it died in between: the answer will say so
                worker.pipe.send((task, (*own, *args)))
        return self._answers(ranks, timeout, getattr(task, "__name__", str(task)))

    def start(self) -> None:
        """Start the processes and wait until they have joined."""
        context = multiprocessing.get_context("forkserver" if self._connected else "spawn")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_pool_")
        store = f"file://{Path(self._folder.name) / 'store'}" if self._connected else None
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, store), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process=process, pipe=ours))
        self._answers(self.size, _START_SECONDS, "joining the group")

    def close(self) -> None:
        """End the processes; a later task starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _answers(self, ranks: int, timeout: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        rank_of = {worker.pipe: rank for rank, worker in enumerate(self._workers[:ranks])}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < ranks:
            waiting = [pipe for pipe, rank in rank_of.items() if rank not in results and rank not in failures]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                reason = "waits for the others" if failures else f"no answer in {timeout:g} s"
                failures |= {rank_of[pipe]: reason for pipe in waiting}
                break
            for pipe in ready:
                rank = rank_of[pipe]
                try:
                    fine, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._workers[rank].process.join()
                    fine, answer = False, f"died with exit code {self._workers[rank].process.exitcode}"
                (results if fine else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self.close()
            texts = [f"--- rank {rank} of {ranks}: {failures[rank]}" for rank in sorted(failures)]
            self._failures.append("\n".join([f"{what} failed", *texts]))
            raise TaskFailed(self._failures[-1])
        return [results[rank] for rank in range(ranks)]


def group_of(ranks: int) -> Any:
    """In a task: the group of the first `ranks` ranks; None for a single one, as the package has it."""
    return _groups[ranks]


def _serve(pipe: Connection, rank: int, size: int, store: str | None) -> None:
    """Body of a worker: join, say so, then run one task after the other."""
    pipe.send(_attempt(_join, (rank, size, store)))
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:  # the test run is over
            return
        pipe.send(_attempt(task, args))


def _attempt(task: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, task(*args)
    except BaseException:
        return False, traceback.format_exc()


def _join(rank: int, size: int, store: str | None) -> None:
    if store is None:
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    _groups[1] = None
    for ranks in range(2, size + 1):
        _groups[ranks] = dist.new_group(list(range(ranks)))
