"""At which byte does each row of a file begin? Found once, kept in a file, read by every process through one mmap.

An index file: a header of 128 bytes, then `offsets` (int64 [rows + 1], where each row begins, and the end), then
`blanks` (int64 [blank lines], the number of rows before each). The header holds the size and the time of change of
the data file, the format, and checksums. It stands beside the data or in a cache (see `cache`); one that is stale is
built anew, and so is one that is torn, with a word about it: neither is ever used.

Cost: one reading of the file, 1 GB/s or so, the first time; 8 bytes a row on disk; no memory but the pages looked at.
"""

import io
import mmap
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_packing.data.progress import Advance, byte_progress
from megatron_packing.data.sources.cache import INDEX_SUFFIX, is_full, is_unwritable, places, say_once, written_whole
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError

Offsets = npt.NDArray[np.int64]

SCAN_BYTES = 1 << 20
"""Bytes looked at in one go while rows are found: large enough for numpy to pay, small enough for a core's cache."""

# magic, layout's version, format, its version, size, time of change, rows, blanks, checksum of what follows
_HEADER = struct.Struct("<8sI16sIQqQQI")
_HEADER_BYTES = 128
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"MPKINDEX"
_LAYOUT = 1
_SPILL_BYTES = 16 << 20  # of blank lines' places; a file may hold more of them than memory


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKind:
    """One format of files whose rows are found by reading them once."""

    name: str
    """At most 16 bytes; part of the index file's name."""
    version: int
    """Raised when the rule for what a row is changes."""
    scan: Callable[[BinaryIO, FileStamp], Iterator[tuple[Offsets, Offsets]]]
    """(file, its stamp) -> (offsets, blanks) in order, the end of the rows last. Raises ConfigError."""


class RowIndex:
    """Where rows are. The arrays are views of an mmap, or of memory where no file could be written."""

    def __init__(self, buffer: Any, rows: int, blanks: int) -> None:
        self.offsets: Offsets = np.frombuffer(buffer, np.int64, rows + 1, _HEADER_BYTES)
        """int64 [rows + 1]."""
        self.blanks: Offsets = np.frombuffer(buffer, np.int64, blanks, _HEADER_BYTES + 8 * (rows + 1))
        """int64 [blank lines], ascending: for each, the number of rows before it. Kept instead of a line number a row
        because most files have none."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.offsets) - 1


def load_or_build(stamp: FileStamp, kind: IndexKind, cache: str | None, *, verify: bool = True) -> RowIndex:
    """The index of the file that `stamp` was taken of.

    Args:
        stamp: the file.
        kind: its format.
        cache: `--data-cache-path`; None: beside the file.
        verify: whether to check the whole of an index that is there, not only its header; for a process that another
            one has opened the same source for, there is no need.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is written to meanwhile.
    """
    candidates = places(stamp.path, f".{kind.name}{INDEX_SUFFIX}", cache)
    for place in candidates:
        found = _read(place, stamp, kind, verify=verify)
        if found is not None:
            return found
    stamp.settle()
    for place in candidates:
        if _written(place, stamp, kind):
            if place != candidates[0]:
                say_once(f"{candidates[0].parent} cannot be written to; the row index of {stamp.shown} is in {place}")
            found = _read(place, stamp, kind, verify=False)
            if found is not None:
                return found
            stamp.check_unchanged()  # why else would another process have put another index there?
    say_once(
        f"the row index of {stamp.shown} is kept in the memory of each process, because neither "
        f"{' nor '.join(str(place.parent) for place in candidates)} can be written to. Set --data-cache-path to a "
        "folder that can."
    )
    return in_memory(stamp, kind)


def in_memory(stamp: FileStamp, kind: IndexKind) -> RowIndex:
    """The same index without a file; 8 bytes of memory a row. Raises ConfigError."""
    memory = io.BytesIO()
    _write(memory, stamp, kind)
    built = _parsed(memory.getbuffer(), stamp, kind, verify=False)
    assert isinstance(built, RowIndex)
    return built


def _read(place: Path, stamp: FileStamp, kind: IndexKind, *, verify: bool) -> RowIndex | None:
    """The index in the file `place`, if it is whole and of the file as it is now."""
    try:
        with open(place, "rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        found: RowIndex | str | None = "it is empty"
    except OSError:
        return None
    else:
        found = _parsed(buffer, stamp, kind, verify=verify)
    if isinstance(found, str):
        say_once(f"the row index {place} is torn ({found}); it is not used but built anew")
        return None
    return found


def _parsed(buffer: Any, stamp: FileStamp, kind: IndexKind, *, verify: bool) -> RowIndex | str | None:
    """The index in `buffer`; None if it is stale; what is wrong with it if it is torn."""
    size = len(buffer)
    if size < _HEADER_BYTES:
        return f"{size:,} bytes are less than a header"
    header = bytes(buffer[: _HEADER.size])
    if _CHECKSUM.unpack(buffer[_HEADER.size : _HEADER.size + _CHECKSUM.size])[0] != zlib.crc32(header):
        return "its header does not fit its checksum"
    magic, layout, name, version, *of_file, rows, blanks, checksum = _HEADER.unpack(header)
    if (magic, layout, name.rstrip(b"\0"), version) != (_MAGIC, _LAYOUT, kind.name.encode(), kind.version):
        return None
    if tuple(of_file) != (stamp.size, stamp.mtime_ns):
        return None
    needed = _HEADER_BYTES + 8 * (rows + 1 + blanks)
    if size != needed:
        return f"{size:,} bytes instead of {needed:,}"
    if verify and _checksum_of(buffer) != checksum:
        return "its rows do not fit their checksum"
    return RowIndex(buffer, rows, blanks)


def _checksum_of(buffer: Any) -> int:
    checksum = 0
    with memoryview(buffer) as view:
        for start in range(_HEADER_BYTES, len(view), SCAN_BYTES):
            checksum = zlib.crc32(view[start : start + SCAN_BYTES], checksum)
    return checksum


def _written(place: Path, stamp: FileStamp, kind: IndexKind) -> bool:
    """Build the index in the file `place`; False if files cannot be made there."""
    try:
        with written_whole(place) as draft:
            _write(draft.file, stamp, kind)
    except OSError as error:
        if is_unwritable(error):
            return False
        if is_full(error):
            say_once(f"no space is left in {place.parent} for the row index of {stamp.shown}")
            return False
        raise ConfigError(f"the row index of {stamp.shown} cannot be written to {place}: {error.strerror}.") from error
    return True


def _write(sink: BinaryIO, stamp: FileStamp, kind: IndexKind) -> None:
    sink.write(bytes(_HEADER_BYTES))
    entries = blank_lines = checksum = 0
    with tempfile.SpooledTemporaryFile(_SPILL_BYTES) as aside:
        for offsets, blanks in _scanned(stamp, kind):
            data = offsets.tobytes()
            checksum = zlib.crc32(data, checksum)
            sink.write(data)
            aside.write(blanks.tobytes())
            entries += len(offsets)
            blank_lines += len(blanks)
        aside.seek(0)
        while data := aside.read(SCAN_BYTES):
            checksum = zlib.crc32(data, checksum)
        aside.seek(0)
        shutil.copyfileobj(aside, sink)
    stamp.check_unchanged()
    header = _HEADER.pack(
        _MAGIC,
        _LAYOUT,
        kind.name.encode(),
        kind.version,
        stamp.size,
        stamp.mtime_ns,
        entries - 1,
        blank_lines,
        checksum,
    )
    sink.seek(0)
    sink.write(header + _CHECKSUM.pack(zlib.crc32(header)))


def _scanned(stamp: FileStamp, kind: IndexKind) -> Iterator[tuple[Offsets, Offsets]]:
    try:
        file = open(stamp.path, "rb", buffering=0)  # noqa: SIM115 - closed by the next line's end
    except OSError as error:
        raise ConfigError(f"{stamp.shown} cannot be read: {error.strerror}.") from error
    with file, byte_progress("indexing", stamp.shown, stamp.size) as advance:
        yield from kind.scan(_Counted(file, advance, stamp.shown), stamp)  # type: ignore[arg-type]


class _Counted:
    """A file that tells how much was read. A failing disk is an error about the data, not about the index."""

    def __init__(self, file: BinaryIO | io.RawIOBase, advance: Advance, shown: str) -> None:
        self._file, self._advance, self._shown = file, advance, shown

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise ConfigError(f"{self._shown} cannot be read: {error.strerror}.") from error
        self._advance(len(data or b""))
        return data or b""
