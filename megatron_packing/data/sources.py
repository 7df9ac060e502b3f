"""Which rows does a file hold, and what stands in row i? Rows are found by byte offset, never loaded as a whole.

Cost: one buffered scan of the file per process (about 1 s for 500 MB), 8 bytes of memory a row, one `pread` and one
JSON parse a row after that. A source pickles to its path and row count; the process that receives it scans again.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import index as as_integer
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from megatron_packing.errors import ConfigError, SampleError

SCAN_BYTES = 4 << 20
"""Bytes looked at in one go while lines are counted: large enough for numpy to pay, small beside a loader worker."""

JSON_LIST_LIMIT_BYTES = 256 << 20
"""The largest `.json` file holding one list that is read: it has no line ends to find rows by, so it sits in memory."""

_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(b" \t\r\n")] = True  # JSON's white space, no more: a run of NUL bytes is damage, not a blank line


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file, parsed but not yet understood. (Positional, because schemas build it by hand in tests.)"""

    path: str
    """The file, as the user named it."""
    line: int
    """Its line, counted from 1; in a `.json` list, its place in the list, counted from 1."""
    fields: dict[str, Any]
    """The row's JSON object. Text is text: "00123" stays a string. A fresh object at every read."""


class Source(Protocol):
    """Rows by number. Reading the same row twice gives equal, independent objects."""

    @property
    def path(self) -> str:
        """What to call this source in messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


class JsonlSource:
    """The rows of a JSON-lines file; blank lines are not rows, a byte-order mark and CRLF line ends are accepted.

    Args:
        path: the file. Its last line may lack a newline.

    Raises:
        ConfigError: the file is missing, unreadable or holds no row, or it changed its size while in use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._size = _size_of(self._path)
        self._index: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = _scan(self._path)
        self._rows = len(self._index[0]) - 1
        self._file: Any = None
        if self._rows == 0:
            raise ConfigError(_no_rows(self._path, self._size))

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self._path

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Record:
        """Row `row`, counted from 0.

        Raises:
            SampleError: the line is no JSON ("bad_json") or no JSON object ("not_an_object").
        """
        row = _checked_row(row, self._rows)
        offsets, blanks = self._scanned()
        # A row's bytes run to the next row's first byte: blank lines in between are white space to the parser.
        start, stop = int(offsets[row]), int(offsets[row + 1])
        line = row + 1 + int(np.searchsorted(blanks, row, side="right"))
        return Record(
            self._path, line, _parse_object(os.pread(self._descriptor(), stop - start, start), self._path, line)
        )

    def _scanned(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._index is None:
            self._check_unchanged()
            self._index = _scan(self._path)
        return self._index

    def _descriptor(self) -> int:
        # `pread` carries its own position, so a descriptor that a forked worker inherited is safe to share.
        if self._file is None:
            self._check_unchanged()
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - lives as long as the source
        return int(self._file.fileno())

    def _check_unchanged(self) -> None:
        size = _size_of(self._path)
        if size != self._size:
            raise ConfigError(
                f"{self._path} has {size:,} bytes; it had {self._size:,} when the run started. Rows are found by byte "
                "offset, so a data file must not change during a run: write a new file and start again."
            )

    def __getstate__(self) -> dict[str, Any]:
        # Without the index the pickle is as small for a billion rows as for one.
        return {"_path": self._path, "_size": self._size, "_rows": self._rows, "_index": None, "_file": None}


class JsonListSource:
    """The rows of a `.json` file that holds one list of objects, kept in memory as JSON bytes.

    Args:
        path: a file of at most `JSON_LIST_LIMIT_BYTES`; larger ones belong in JSON lines.

    Raises:
        ConfigError: the file is missing, unreadable, too large, no JSON list, or an empty one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        size = _size_of(self._path)
        if size > JSON_LIST_LIMIT_BYTES:
            raise ConfigError(
                f"{self._path} has {size:,} bytes; a .json list is read into memory up to {JSON_LIST_LIMIT_BYTES:,}. "
                "Write it as JSON lines (jq -c '.[]' FILE.json > FILE.jsonl) and name that file."
            )
        self._items: list[bytes] | None = _load_list(self._path)
        self._rows = len(self._items)
        if self._rows == 0:
            raise ConfigError(_no_rows(self._path, size))

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self._path

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Record:
        """Row `row`, counted from 0; SampleError ("not_an_object") if it is no JSON object."""
        row = _checked_row(row, self._rows)
        if self._items is None:
            self._items = _load_list(self._path)
        return Record(self._path, row + 1, _parse_object(self._items[row], self._path, row + 1))

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_rows": self._rows, "_items": None}


def _open_json(path: str) -> Source:
    """A `.json` file is a list, or, as many exporters name it, JSON lines."""
    _size_of(path)
    with open(path, "rb") as file:
        head = file.read(SCAN_BYTES).removeprefix(_BOM).lstrip()
    return JsonListSource(path) if head.startswith(b"[") else JsonlSource(path)


_OPENERS: dict[str, Callable[[str], Source]] = {
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".json": _open_json,
}


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source that reads `path`, chosen by its suffix.

    Raises:
        ConfigError: no such file, nothing in it, or a suffix that no source reads.
    """
    path = os.fspath(path)
    _size_of(path)  # a mistyped name is a missing file first, whatever its suffix
    suffix = Path(path).suffix.lower()
    if suffix not in _OPENERS:
        raise ConfigError(
            f"{path} ends in {suffix!r}; known are {', '.join(_OPENERS)}. Convert the file, or rename it."
        )
    return _OPENERS[suffix](path)


def _size_of(path: str) -> int:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Check the path given as data.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a directory; name one file in it.")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path} cannot be read: permission denied.")
    return size


def _no_rows(path: str, size: int) -> str:
    held = "is empty (0 bytes)" if size == 0 else f"holds no rows ({size:,} bytes, all of them blank or an empty list)"
    return f"{path} {held}. Training needs at least one row."


def _checked_row(row: int, rows: int) -> int:
    row = as_integer(row)
    if not -rows <= row < rows:
        raise IndexError(f"row {row} of {rows}")
    return row % rows


def _scan(path: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find the rows of a file of lines.

    Returns:
        offsets: int64 [rows + 1], the byte at which each row starts, and the end of the file.
        blanks: int64 [blank lines], for each blank line the number of rows before it, ascending. Kept instead of a
            line number a row because most files have none.
    """
    offsets: list[npt.NDArray[np.int64]] = []
    blanks: list[npt.NDArray[np.int64]] = []
    rows = 0
    with open(path, "rb", buffering=0) as file:
        base = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(base)
        open_start, open_has_text = base, False  # the line that the last chunk left unfinished
        while chunk := file.read(SCAN_BYTES):
            data = np.frombuffer(chunk, dtype=np.uint8)
            ends = np.flatnonzero(data == _NEWLINE)
            firsts = np.concatenate(([0], ends + 1))
            starts = np.concatenate(([open_start], base + ends + 1))
            has_text = np.zeros(len(firsts), dtype=bool)
            inside = firsts < len(data)  # only the last can fall outside, when the chunk ends with a newline
            has_text[inside] = np.logical_or.reduceat(~_IS_SPACE[data], firsts[inside])
            has_text[0] |= open_has_text
            open_start, open_has_text = int(starts[-1]), bool(has_text[-1])
            done = has_text[:-1]
            offsets.append(starts[:-1][done])
            blanks.append(rows + np.cumsum(done)[~done])
            rows += int(done.sum())
            base += len(data)
    tail = [open_start, base] if open_has_text else [base]
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *offsets, tail]).astype(np.int64), np.concatenate([empty, *blanks]).astype(np.int64)


def _parse_object(data: bytes, path: str, line: int) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SampleError(
            path,
            line,
            f"not valid JSON ({error.msg}, column {error.colno}). Each line must hold one whole JSON object; mend or "
            "remove the line.",
            reason="bad_json",
        ) from error
    if not isinstance(value, dict):
        raise SampleError(
            path,
            line,
            f"holds a JSON {_json_type(value)}; a row must be an object of named fields.",
            reason="not_an_object",
        )
    return value


def _load_list(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        data = file.read().removeprefix(_BOM)
    try:
        items = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}).") from error
    if not isinstance(items, list):
        raise ConfigError(f"{path} holds a JSON {_json_type(items)}; a .json data file holds a list of objects.")
    # Kept as bytes: a third of the memory of parsed objects, and every read gives objects of its own.
    return [orjson.dumps(item) for item in items]


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
