"""Which checkpoint does a restart load? The one that the tracker file names, so that file must never be half-written.

Megatron empties `latest_checkpointed_iteration.txt` and writes it anew. On a full disk, or where the rank dies in
between, it stays empty: every restart then stops, with exit code 0, although a complete checkpoint is there. Here the
new content is written beside it and takes its place in one move. Object storage (--enable-msc) writes whole files.
"""

import builtins
import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any

from megatron_packing.mcore import hooks

_NAME = "latest_checkpointed_iteration.txt"


def install() -> None:
    """Let Megatron replace its tracker files whole, in runs with our flags. Imports Megatron."""
    from megatron.training import checkpointing

    if not isinstance(checkpointing.maybe_msc, _Storage):
        checkpointing.maybe_msc = _Storage(checkpointing.maybe_msc)


class _Storage:
    """Megatron's access to files, but for trackers that are written."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: str, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
        """As `open`, for `path` on a disk or in object storage."""
        on_disk = self._storage.open is builtins.open
        if mode == "w" and os.path.basename(path) == _NAME and on_disk and hooks.active_config() is not None:
            return _replaced(path)
        return self._storage.open(path, mode, *rest, **keywords)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[IO[str]]:
    """A file to write, which takes the place of `path` once all of it is on the disk."""
    beside = f"{path}.new"
    with open(beside, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
