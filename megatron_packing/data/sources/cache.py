"""Where is kept what took long to find out about a file, and how is it written so that nobody sees half of it?

First under `--data-cache-path`, else beside the file; where that cannot be written, in the user's own cache folder
($XDG_CACHE_HOME, else ~/.cache). Files are written under another name, flushed to disk and renamed: any number of
processes may do so at once, and the last one's file, equal to the others', stays.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

INDEX_SUFFIX = ".mpidx"
UNPACKED_SUFFIX = ".mpdata"
_PART_SUFFIX = ".part"

OWN_SUFFIXES = (INDEX_SUFFIX, UNPACKED_SUFFIX, _PART_SUFFIX)
"""Endings of the files that we put beside data; never data themselves."""

_CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EEXIST}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_ABANDONED_SECONDS = 24 * 3600
"""A part that nobody has written to for so long was left by a process that was killed."""

_NAME_CHARACTERS = 120  # of the data file's name that a cache file's name repeats; names may have 255 bytes

_ANYBODY_WRITES = 0o222  # the write bits of a folder's mode; a folder without any is meant to stay as it is

_said: set[str] = set()
_swept: set[Path] = set()


def places(path: str, suffix: str, cache: str | None) -> list[Path]:
    """The files that may hold what is kept about `path`, best first.

    Args:
        path: the data file.
        suffix: what is kept, and of which format.
        cache: `--data-cache-path`; None: beside the file.
    """
    absolute = Path(os.path.abspath(path))
    # Files of one name lie in many folders; the digest tells them apart in one cache.
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
    name = f"{absolute.name[:_NAME_CHARACTERS]}-{digest}{suffix}"
    first = Path(cache) / name if cache else absolute.with_name(absolute.name + suffix)
    return list(dict.fromkeys((first, _user_cache() / name)))


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "megatron_packing"


def is_unwritable(error: OSError) -> bool:
    """Whether `error` says that files cannot be made in a place, so that another one may do."""
    return error.errno in _CANNOT_WRITE


def is_full(error: OSError) -> bool:
    """Whether `error` says that a disk or a quota is full."""
    return error.errno in _FULL


@dataclass(slots=True)
class Draft:
    """A file being written."""

    file: BinaryIO
    target: Path
    """The name that it gets when it is whole; may be set while writing."""


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Draft]:
    """A file that appears under its name only once it is complete and on disk; on an error nothing is left.

    Raises:
        OSError: it cannot be written; see `is_unwritable` and `is_full`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.stat().st_mode & _ANYBODY_WRITES:
        # For root, as whom containers run, the system would allow it all the same.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target.parent))
    _sweep(target.parent)
    part = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}{_PART_SUFFIX}")
    file = open(part, "x+b")  # noqa: SIM115 - closed below, before the rename
    try:
        with file:
            draft = Draft(file, target)
            yield draft
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, draft.target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some network file systems cannot flush a folder; the file itself is whole
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left, once: a folder of many files is not looked through for each of them."""
    if folder in _swept:
        return
    _swept.add(folder)
    for suffix in (INDEX_SUFFIX, UNPACKED_SUFFIX):
        for part in folder.glob(f"*{suffix}.*{_PART_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                    part.unlink()


def say_once(message: str) -> None:
    """One line on standard error, where a run's log picks it up; the same message only once a process."""
    if message not in _said:
        _said.add(message)
        print(f"megatron_packing: {message}", file=sys.stderr, flush=True)
