"""Why did the run end? Each rank hears at once when another fails or dies, whatever it is waiting for.

A collective only says that a connection broke, or says nothing for minutes; and the rank that knows the cause is gone.
So every rank keeps one connection to rank 0, silent until something happens:

    rank -> 0        {"key": ..., "rank": 3}     once, to say who it is
    rank -> 0        {"cause": "..."}            it fails, and why
    0 -> every rank  {"cause": "..."}            the first cause; a connection that breaks without a word is one, too
    both ways        {"bye": true}               it ends, and all is well

Who hears of a cause has some seconds to end by itself, with the cause in its message; then its process ends. A run with
our flags starts this when it builds its datasets; without them nothing is opened. Cost: one idle thread, and nothing in
a step.
"""

import contextlib
import json
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import CheckpointException

from megatron_packing.errors import PackingError

GRACE_SECONDS = 5.0
"""For a rank that heard of a cause to end by itself; a collective that breaks ends it at once."""

TEARDOWN_SECONDS = 10
"""From the last word of a rank that failed to its end, for what others do at exit: logs to send, files to close."""

CONNECT_SECONDS = 15.0
"""To reach rank 0."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_LINE = 16_384
_NOTE = "megatron_packing/peers"  # in the store through which the ranks found each other

# What a broken or silent peer looks like from here, in the words of gloo, NCCL and the store; the first two also where
# one rank of a model-parallel group passes its failure on to the others.
_BROKEN = ("closed by peer", "reset by peer")
_ECHOES = (*_BROKEN, "connection", "broken pipe", "timed out", "timeout", "nccl", "socket")

_line: "_Line | None" = None


def rank() -> int:
    """This process's global rank."""
    return int(os.environ.get("RANK", "0"))


def is_connected() -> bool:
    """Whether the ranks of a run know each other: from then on one that fails leaves others waiting."""
    return _line is not None


def first_cause(error: BaseException) -> str | None:
    """What another rank ended of, if that is why this one ends; None if `error` is a cause of its own.

    Args:
        error: what this rank ends of; one that looks like a broken connection is given time to be explained.
    """
    if _line is None:
        return None
    is_echo = _is_echo(error)
    if not is_echo and isinstance(error, PackingError):
        return None  # shared already
    _line.heard.wait(GRACE_SECONDS - 1 if is_echo else 0)
    return _line.cause


def tell(cause: str) -> None:
    """Tell every other rank that this one ends, and of what. The first cause stands."""
    if _line is not None:
        _line.ending = True
        _line.tell(cause)


def leave() -> None:
    """Say that this rank ends and all is well."""
    if _line is not None:
        _line.ending = True
        _line.bye()


def end_now(cause: str, *, code: int) -> NoReturn:
    """End the process from a thread, whatever its main thread is waiting for."""
    tell(cause)
    print(f"[rank {rank()}] megatron_packing: error: {cause}", file=sys.stderr, flush=True)
    kill_children()
    # The main thread hangs, so that no exception can reach it and no exit handler would ever return.
    os._exit(code)


def bound_teardown() -> None:
    """Let exit handlers run, but not for ever: threads, groups and workers of a broken run may never end."""
    if not is_connected():
        return
    kill_children()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, wherever it hangs
    signal.alarm(TEARDOWN_SECONDS)


def kill_children() -> None:
    """End loader workers and checkpoint writers, which would outlive the rank if they hang."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the DataLoader's handler raises when a worker is killed
    for child in multiprocessing.active_children():
        child.kill()


def describe(error: BaseException) -> str:
    """An exception in one line: type, message, and where it was raised; of a loader's worker, what the worker said."""
    if isinstance(error, CheckpointException) and error.failures:
        return _describe_checkpoint_failure(error)
    text = str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    places = [line.strip() for line in lines if line.strip().startswith('File "')]
    if "Original Traceback" in text and places:
        file, _, rest = places[-1].removeprefix('File "').partition('", line ')
        return f"{lines[-1]} ({file}:{rest.split(',')[0]}, in a loader's worker)"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{where}"


def _is_echo(error: BaseException) -> bool:
    """Whether an exception only says that something went wrong elsewhere."""
    text = str(error).lower()
    if isinstance(error, PackingError):
        return any(words in text for words in _BROKEN)
    if isinstance(error, CheckpointException):
        return not error.failures  # the coordinator knows whose
    return isinstance(error, RuntimeError | OSError) and any(words in text for words in _ECHOES)


def _describe_checkpoint_failure(error: CheckpointException) -> str:
    """The ranks and the first one's reason; torch's writer hides a full disk behind "unexpected pos"."""
    reason = next(iter(error.failures.values()))[0]
    what_to_do = ""
    if error.args[0] == "write":
        what_to_do = " Look at the free space and the permissions of --save; earlier checkpoints are untouched."
    ranks = ", ".join(map(str, error.failures))
    return f"checkpoint {error.args[0]} failed on rank {ranks}: {type(reason).__name__}: {reason}.{what_to_do}"


# --- connections ------------------------------------------------------------------------------------------------------


def connect() -> None:
    """Open this rank's connection, or rank 0's end of them all, once; warn where that cannot be.

    Called by every rank of a run with our flags, as soon as `torch.distributed` is up.
    """
    global _line
    host = os.environ.get("MASTER_ADDR")
    if _line is not None or host is None or torch.distributed.get_world_size() == 1:
        return
    try:
        _line = _offer(host) if torch.distributed.get_rank() == 0 else _accept(host)
    except (OSError, RuntimeError) as error:
        print(
            f"[rank {rank()}] megatron_packing: no connection to rank 0 ({error}); if another rank fails, this one may "
            "not tell why.",
            file=sys.stderr,
            flush=True,
        )
        return
    os.register_at_fork(after_in_child=_line.forget)
    threading.Thread(target=_line.run, name="packing-peers", daemon=True).start()


def _offer(host: str) -> "_Hub":
    """Rank 0: open the end of all connections, and say where it is."""
    note = None
    try:
        hub = _Hub(only_here=host in _LOOPBACK)
        note = {"port": hub.port, "key": hub.key}
    finally:
        _store().set(_NOTE, json.dumps(note))  # in any case, as the others wait for it
    return hub


def _accept(host: str) -> "_Spoke":
    """Any other rank: connect to rank 0."""
    note = json.loads(_store().get(_NOTE))
    if note is None:
        raise ConnectionError("it could open none")
    return _Spoke(host, note["port"], note["key"])


def _store() -> Any:
    """Where the ranks found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


class _Line:
    """A rank's end of the connections."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self.heard = threading.Event()
        self.ending = False
        """This rank is about to end by itself."""

    def run(self) -> None:
        """The thread's work."""
        raise NotImplementedError

    def tell(self, cause: str) -> None:
        raise NotImplementedError

    def bye(self) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Close a forked child's copies: a connection breaks only once nobody holds it any more."""
        raise NotImplementedError

    def hear(self, cause: str) -> None:
        """Another rank ends: give this one time to do so, too."""
        if self.cause is None:
            self.cause = cause
            self.heard.set()
            threading.Thread(target=self._end_in_time, daemon=True).start()

    def _end_in_time(self) -> None:
        time.sleep(GRACE_SECONDS)
        if not self.ending:
            end_now(f"another rank ended: {self.cause}", code=1)


class _Hub(_Line):
    """Rank 0: hears every rank and tells all of them."""

    def __init__(self, *, only_here: bool) -> None:
        super().__init__()
        dual = socket.has_dualstack_ipv6() and not only_here
        self._listener = socket.create_server(
            ("127.0.0.1" if only_here else "", 0),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            backlog=1024,
        )
        self.port = self._listener.getsockname()[1]
        self.key = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._links: dict[socket.socket, _Link] = {}

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for ready, _ in selector.select():
                    self._serve(selector, ready.fileobj)

    def _serve(self, selector: selectors.BaseSelector, ready: Any) -> None:
        if ready is self._listener:
            connection, _ = self._listener.accept()
            connection.settimeout(1.0)  # for sending; nobody may hold up what others must hear
            self._links[connection] = _Link(connection)
            selector.register(connection, selectors.EVENT_READ)
            return
        link = self._links[ready]
        for message in link.receive():
            self._take(link, message)
        if link.broken:
            selector.unregister(ready)
            with self._lock:
                del self._links[ready]
            ready.close()
            if link.rank is not None and not link.said_bye:
                self._spread(_without_a_word(link.rank))

    def _take(self, link: "_Link", message: dict[str, Any]) -> None:
        if message.get("key") == self.key:
            link.rank = int(message["rank"])
            if self.cause is not None:
                link.send({"cause": self.cause})
        elif link.rank is None:
            link.broken = True  # some other program
        elif "cause" in message:
            self._spread(str(message["cause"]))
            link.said_bye = True
        elif "bye" in message:
            link.said_bye = True

    def _spread(self, cause: str) -> None:
        self._send_all({"cause": cause})
        self.hear(cause)

    def tell(self, cause: str) -> None:
        if self.cause is None:
            self._send_all({"cause": cause})

    def bye(self) -> None:
        self._send_all({"bye": True})

    def _send_all(self, message: dict[str, Any]) -> None:
        with self._lock:
            for link in self._links.values():
                link.send(message)

    def forget(self) -> None:
        self._listener.close()
        for connection in list(self._links):
            connection.close()


class _Spoke(_Line):
    """Any other rank: one connection to rank 0."""

    def __init__(self, host: str, port: int, key: str) -> None:
        super().__init__()
        self._link = _Link(socket.create_connection((host, port), timeout=CONNECT_SECONDS))
        self._link.connection.settimeout(None)
        self._link.send({"key": key, "rank": rank()})

    def run(self) -> None:
        while not self._link.broken:
            for message in self._link.receive():
                if "bye" in message:
                    return
                if "cause" in message:
                    self.hear(str(message["cause"]))
        if self.cause is None:
            self.hear(_without_a_word(0))

    def tell(self, cause: str) -> None:
        self._link.send({"cause": cause})

    def bye(self) -> None:
        self._link.send({"bye": True})

    def forget(self) -> None:
        self._link.connection.close()


class _Link:
    """One connection: JSON objects, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.said_bye = False
        self.broken = False
        self._unread = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send if the other side still listens."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come; waits for something to come. Sets `broken` at the end."""
        try:
            chunk = self.connection.recv(4096)
        except OSError:
            chunk = b""
        self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        self.broken = not chunk or len(self._unread) > _MAX_LINE
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                self.broken = True  # some other program
                break
            if isinstance(message, dict):
                messages.append(message)
        return messages


def _without_a_word(gone: int) -> str:
    return f"rank {gone} ended without a word: it was killed (out of memory?) or crashed. Look at its output and node."
