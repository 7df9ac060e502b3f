"""What is a row, and what must every source of rows be able to do?"""

import json
from dataclasses import dataclass
from operator import index as as_integer
from typing import Any, Protocol

import orjson

from megatron_packing.errors import SampleError

# Digits become zeros and everything else blanks, so that one search finds any number of 19 digits: orjson reads
# integers beyond 64 bit, which are at least that long, as floats.
_DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))
_LONG_NUMBER = b"0" * 19


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file, parsed but not yet understood. (Positional, because schemas build it by hand in tests.)"""

    path: str
    """The file, as the user named it; of a folder or glob, the file in it."""
    line: int
    """Its line, counted from 1; in a `.json` list, a Parquet file or a saved dataset its place, counted from 1."""
    fields: dict[str, Any]
    """The row's JSON object. Text is text: "00123" stays a string. A fresh object at every read."""


class Source(Protocol):
    """Rows by number. Reading the same row twice gives equal, independent objects."""

    @property
    def path(self) -> str:
        """What to call this source in messages."""

    @property
    def fingerprint(self) -> str:
        """What the rows depend on: path, size, time of change and format of each file. Equal only for equal rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


class FileSource(Source, Protocol):
    """A source that holds files open."""

    def close(self) -> None:
        """Give them back; the next row opens them again."""


def checked_row(row: int, rows: int) -> int:
    """`row` counted from the start; IndexError outside of -rows..rows-1."""
    row = as_integer(row)
    if not -rows <= row < rows:
        raise IndexError(f"row {row} of {rows}")
    return row % rows


def parse_object(data: bytes, path: str, line: int) -> dict[str, Any]:
    """The JSON object that `data` spells. Numbers of any size stay exact.

    Raises:
        SampleError: no JSON ("bad_json"), not UTF-8 ("bad_utf8"), or JSON of another kind ("not_an_object").
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _not_json(data, path, line, error) from error
    if not isinstance(value, dict):
        raise SampleError(
            path,
            line,
            f"holds a JSON {json_type(value)}; a row must be an object of named fields.",
            reason="not_an_object",
        )
    fields: dict[str, Any] = json.loads(data) if _LONG_NUMBER in data.translate(_DIGITS) else value
    return fields


def _not_json(data: bytes, path: str, line: int, error: orjson.JSONDecodeError) -> SampleError:
    try:
        data.decode()
    except UnicodeDecodeError as undecodable:
        return SampleError(
            path,
            line,
            f"byte {undecodable.start + 1} of the row, 0x{data[undecodable.start]:02x}, is not UTF-8. Convert the file "
            "(iconv -f LATIN1 -t UTF-8), or mend or remove the row.",
            reason="bad_utf8",
        )
    found = f"not valid JSON ({error.msg}, column {error.colno})"
    if b"\0" in data:
        found += "; it holds NUL bytes, as files do that were not written to their end"
    return SampleError(
        path,
        line,
        f"{found}. Each row must be one whole JSON object; mend or remove it.",
        reason="bad_json",
    )


def json_type(value: object) -> str:
    """What JSON calls the type of a parsed value."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
