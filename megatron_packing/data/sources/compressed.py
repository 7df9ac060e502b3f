"""How are rows of an archive read by number? From an unpacked copy, made once beside the archive or in the cache.

The copy's name says which archive it is of (size and time of change) and how long it is, so that neither a stale copy
nor a torn one is taken for whole. Cost: the archive's unpacking, once, streaming; disk space for its content.
"""

import contextlib
import glob
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_packing.data.progress import byte_progress
from megatron_packing.data.sources.cache import (
    UNPACKED_SUFFIX,
    is_full,
    is_unwritable,
    places,
    say_once,
    written_whole,
)
from megatron_packing.data.sources.optional import needed
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError

_PIECE_BYTES = 1 << 20


def unpacked(stamp: FileStamp, cache: str | None) -> Path:
    """The unpacked copy of an archive; made if there is none.

    Args:
        stamp: the archive.
        cache: `--data-cache-path`; None: beside it.

    Raises:
        ConfigError: the archive is torn or cannot be read, or there is no room for the copy.
        MissingDependency: for zstd.
    """
    candidates = places(stamp.path, f".{stamp.size:x}-{stamp.mtime_ns:x}", cache)
    for place in candidates:
        for copy in _copies(place):
            if copy.stat().st_size == _length_in_name(copy):
                return copy
            say_once(f"the unpacked copy {copy} is torn; it is not used but made anew")
    stamp.settle()
    for place in candidates:
        try:
            return _made(place, stamp)
        except OSError as error:
            if is_full(error):
                raise ConfigError(
                    f"{place.parent} has no room for the unpacked {stamp.shown} ({stamp.size:,} bytes packed). Free "
                    "some, or name another folder with --data-cache-path."
                ) from error
            if not is_unwritable(error):
                raise ConfigError(f"{stamp.shown} cannot be unpacked to {place}: {error.strerror}.") from error
    raise ConfigError(
        f"{stamp.shown} must be unpacked to be read, but neither "
        f"{' nor '.join(str(place.parent) for place in candidates)} can be written to. Name a folder with "
        "--data-cache-path."
    )


def _copies(place: Path) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(f"{glob.escape(str(place))}-*{UNPACKED_SUFFIX}"))


def _length_in_name(copy: Path) -> int:
    return int(copy.name.removesuffix(UNPACKED_SUFFIX).rpartition("-")[2], 16)


def _made(place: Path, stamp: FileStamp) -> Path:
    with written_whole(place.with_name(place.name + UNPACKED_SUFFIX)) as draft:
        length = 0
        for piece in _pieces(stamp):
            draft.file.write(piece)
            length += len(piece)
        stamp.check_unchanged()
        draft.target = place.with_name(f"{place.name}-{length:x}{UNPACKED_SUFFIX}")
    _forget_older(place, draft.target, stamp)
    return draft.target


def _forget_older(place: Path, kept: Path, stamp: FileStamp) -> None:
    """Remove copies of the archive as it was before, and torn ones, with what is known of them: they take room."""
    prefix = place.name.removesuffix(f".{stamp.size:x}-{stamp.mtime_ns:x}")
    ours = re.compile(re.escape(prefix) + rf"\.[0-9a-f]+-[0-9a-f]+-[0-9a-f]+{re.escape(UNPACKED_SUFFIX)}(\..*)?")
    for entry in place.parent.iterdir():
        if ours.fullmatch(entry.name) and not entry.name.startswith(kept.name):
            with contextlib.suppress(OSError):
                entry.unlink()


def _pieces(stamp: FileStamp) -> Iterator[bytes]:
    """The archive's content. A read error or damage is a ConfigError, so that an OSError is one of writing."""
    unpack = _UNPACKERS[Path(stamp.path).suffix.lower()]
    try:
        with open(stamp.path, "rb") as file, byte_progress("unpacking", stamp.shown, stamp.size) as advance:
            done = 0
            for piece in unpack(file, stamp):
                yield piece
                advance(file.tell() - done)
                done = file.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(_torn(stamp, str(error))) from error


def _torn(stamp: FileStamp, why: str) -> str:
    return f"{stamp.shown} is a torn or damaged archive ({why.rstrip('.')}). Copy or download it again."


def _gunzipped(file: BinaryIO, stamp: FileStamp) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as content:
        while piece := content.read(_PIECE_BYTES):
            yield piece


def _zstd_unpacked(file: BinaryIO, stamp: FileStamp) -> Iterator[bytes]:
    zstandard = needed("zstandard", extra="data", to=f"to read {stamp.shown}")
    # An object for each frame: the library's stream reader takes a frame cut short for the end.
    frame, is_open = None, False
    try:
        while packed := file.read(_PIECE_BYTES):
            while packed:
                if not is_open:
                    frame, is_open = zstandard.ZstdDecompressor().decompressobj(), True
                assert frame is not None
                yield frame.decompress(packed)
                packed, is_open = frame.unused_data, not frame.eof
    except zstandard.ZstdError as error:
        raise ConfigError(_torn(stamp, str(error))) from error
    if is_open:
        raise ConfigError(_torn(stamp, "it ends in the middle of a frame"))


_UNPACKERS: dict[str, Callable[[BinaryIO, FileStamp], Iterator[bytes]]] = {
    ".gz": _gunzipped,
    ".zst": _zstd_unpacked,
}

PACKED_SUFFIXES = tuple(_UNPACKERS)
"""Endings of archives that can be read."""


def packed_name(path: str) -> str | None:
    """The name that an archive's content would have; None for what is no archive."""
    stem, suffix = os.path.splitext(path)
    return stem if suffix.lower() in _UNPACKERS else None
