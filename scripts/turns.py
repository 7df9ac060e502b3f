"""How do live training runs take turns, so that a machine's noise hits all of them alike?

The parent (`Turns`) starts every run as a process and lets one of them at a time do one iteration; the others wait.
Inside a run, `TurnTaker` waits for the turn and reports what the iteration gave. Between the two: one socket a run on
localhost, one JSON object a line.

    run -> parent   {"run": "packed", "key": ...}    once, to say who it is
    parent -> run   {"turn": 7}                      do iteration 7
    run -> parent   {"turn": 7, ...figures}          done

Nothing waits forever: a run that dies, stays silent or ends early is a `RunFailed` in the parent, a parent that is
gone ends its runs. Needs the standard library only. Cost: some 0.1 ms a turn.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESS_VARIABLE, NAME_VARIABLE, KEY_VARIABLE = "TURNS_ADDRESS", "TURNS_RUN", "TURNS_KEY"

START_SECONDS = 240.0
"""Until a run asks for its first turn: imports and model building, some 10 s a run on an idle core."""

TURN_SECONDS = 300.0
"""For one iteration; beyond it a run is taken for hung."""

END_SECONDS = 120.0
"""From the last iteration to the end of the process: a checkpoint may be written."""

IDLE_SECONDS = 1800.0
"""A run waits this long for its turn. The parent's end is noticed at once; this is for a parent that hangs."""

GRACE_SECONDS = 8.0
"""Between asking a process to end and killing it. torchrun uses it to end its ranks."""

POLL_SECONDS = 0.2
"""How often a waiting parent looks whether the run still lives."""

LAST_LINES = 40
"""Lines of a failed run's log that are shown."""


class RunFailed(Exception):
    """A run died, hung, or ended before its last iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run to start."""

    name: str
    """Short and unique: it names the run in reports and messages."""
    command: Sequence[str]
    """Program and arguments."""
    iterations: int
    """Turns that the run takes; it must end by itself after them."""
    log: Path
    """File for what the run prints."""


@dataclass(slots=True, eq=False)
class _Live:
    """A started run."""

    run: Run
    process: subprocess.Popen[bytes]
    link: "_Link | None" = None
    done: int = 0
    """Turns taken."""


class Turns:
    """Starts runs and gives them turns. A context manager: leaving it, however, ends every process.

    Args:
        runs: what to start.
        environment: variables for all runs, on top of this process's own.
        turn_seconds: see `TURN_SECONDS`.

    Raises:
        RunFailed: from any method, with the last lines of the run's log.
    """

    def __init__(
        self, runs: Sequence[Run], environment: Mapping[str, str] | None = None, turn_seconds: float = TURN_SECONDS
    ) -> None:
        self._runs = list(runs)
        self._environment = dict(environment or {})
        self._turn_seconds = turn_seconds
        self._key = secrets.token_hex(16)
        self._live: list[_Live] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> "Turns":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_SECONDS)
        try:
            self._live = [self._start(run) for run in self._runs]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Return when every run stands before its first iteration."""
        deadline = time.monotonic() + START_SECONDS
        while missing := [live for live in self._live if live.link is None]:
            for live in missing:
                _check_alive(live)
            if time.monotonic() > deadline:
                raise _failure(missing[0], f"did not ask for its first turn within {START_SECONDS:.0f} s")
            with contextlib.suppress(TimeoutError):
                self._accept()

    def take(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Give the turns, one by one: (iteration from 1, run, its figures), iteration by iteration.

        Each iteration begins with another run, so that none always finds the caches as another left them.
        """
        self.wait_until_ready()
        for iteration in range(1, max(live.run.iterations for live in self._live) + 1):
            for live in rotated(self._live, iteration - 1):
                if iteration <= live.run.iterations:
                    yield iteration, live.run.name, self._turn(live, iteration)
        self._wait_for_ends()

    def close(self) -> None:
        """End every process that still runs. Safe to call twice."""
        for live in self._live:
            if live.link is not None:
                live.link.close()
            _signal_group(live.process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for live in self._live:
            with contextlib.suppress(subprocess.TimeoutExpired):
                live.process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(live.process, signal.SIGKILL)
            live.process.wait()
        if self._listener is not None:
            self._listener.close()

    def _start(self, run: Run) -> _Live:
        assert self._listener is not None
        run.log.parent.mkdir(parents=True, exist_ok=True)
        port = self._listener.getsockname()[1]
        own = {ADDRESS_VARIABLE: f"127.0.0.1:{port}", NAME_VARIABLE: run.name, KEY_VARIABLE: self._key}
        with run.log.open("wb") as log:
            process = subprocess.Popen(
                list(run.command),
                env={**os.environ, **self._environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the whole group
            )
        return _Live(run=run, process=process)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        link = _Link(connection)
        hello = link.receive(POLL_SECONDS * 10)
        by_name = {live.run.name: live for live in self._live}
        if not hello or hello.get("key") != self._key or hello.get("run") not in by_name:
            link.close()  # some other program of this machine
            return
        by_name[hello["run"]].link = link

    def _turn(self, live: _Live, iteration: int) -> dict[str, Any]:
        assert live.link is not None
        deadline = time.monotonic() + self._turn_seconds
        try:
            live.link.send({"turn": iteration})
            while (answer := live.link.receive(POLL_SECONDS)) is None:
                _check_alive(live)
                if time.monotonic() > deadline:
                    raise _failure(live, f"did not finish iteration {iteration} within {self._turn_seconds:.0f} s")
        except ConnectionError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                live.process.wait(GRACE_SECONDS)  # a dying process closes its socket a little before it is gone
            raise _failure(live, f"left in iteration {iteration}, or before it") from error
        if answer.pop("turn", None) != iteration:
            raise _failure(live, f"answered {answer} when iteration {iteration} was its turn")
        live.done = iteration
        return answer

    def _wait_for_ends(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for live in self._live:
            try:
                code = live.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise _failure(live, f"did not end within {END_SECONDS:.0f} s of the last iteration") from None
            if code != 0:
                raise _failure(live, "failed after its last iteration")


def leave_on_signals() -> None:
    """Make Ctrl-C and `kill` leave through the context managers, so that they end the runs; even where a shell that
    started this program in the background has told it to ignore Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def rotated[T](items: Sequence[T], by: int) -> list[T]:
    """`items`, beginning with the one at place `by`, and then around."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The last `count` lines of a log; the whole of it may be long."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return "".join(deque(lines, count)).rstrip()


def _check_alive(live: _Live) -> None:
    code = live.process.poll()
    if code is not None:
        raise _failure(live, f"ended after {live.done} of {live.run.iterations} iterations")


def _failure(live: _Live, what: str) -> RunFailed:
    code = live.process.poll()
    state = "still running" if code is None else f"exit code {code}"
    return RunFailed(
        f"the {live.run.name} run {what} ({state}). The last lines of {live.run.log}:\n{last_lines(live.run.log)}"
    )


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


class TurnTaker:
    """The run's side: wait for a turn, report what came of it.

    Args:
        address: host:port of the parent.
        name: the run's name.
        key: what proves that this run is the parent's.
    """

    def __init__(self, address: str, name: str, key: str) -> None:
        host, _, port = address.rpartition(":")
        self._link = _Link(socket.create_connection((host, int(port)), timeout=START_SECONDS))
        self._link.send({"run": name, "key": key})
        self._turn: int | None = None

    @classmethod
    def from_environment(cls) -> "TurnTaker | None":
        """The taker that `Turns` left in the environment; None in a process that it did not start."""
        values = [os.environ.get(name) for name in (ADDRESS_VARIABLE, NAME_VARIABLE, KEY_VARIABLE)]
        if None in values:
            return None
        return cls(*values)  # type: ignore[arg-type]

    def wait(self) -> int:
        """Return the iteration whose turn it is. Ends the process when the parent is gone."""
        try:
            message = self._link.receive(IDLE_SECONDS)
        except ConnectionError:
            raise SystemExit("turns: the parent is gone; this run ends.") from None
        if message is None:
            raise SystemExit(f"turns: no turn within {IDLE_SECONDS:.0f} s; this run ends.")
        self._turn = int(message["turn"])
        return self._turn

    def report(self, figures: Mapping[str, Any]) -> None:
        """Give the turn back, with what the iteration gave: plain numbers, lists and texts."""
        try:
            self._link.send({**figures, "turn": self._turn})
        except ConnectionError:
            raise SystemExit("turns: the parent is gone; this run ends.") from None


@dataclass(slots=True)
class _Link:
    """One side of a connection: JSON objects, one a line."""

    connection: socket.socket
    unread: bytes = field(default=b"")

    def send(self, message: Mapping[str, Any]) -> None:
        self.connection.settimeout(None)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if none came in time; ConnectionError if the other side is gone."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.unread:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self.connection.recv(65536)
            except TimeoutError:
                return None
            if not chunk:
                raise ConnectionResetError("the other side closed the connection")
            self.unread += chunk
        line, _, self.unread = self.unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.connection.close()
