"""Which rows does a `.json` file hold that is one list? Its elements, found without parsing them or holding the file.

A machine of three states, in a string or not, after a backslash or not, and how deep in brackets, run over the whole
file in numpy: only the few bytes that can change it are looked at. Cost: some 300 MB/s, once; see `index`.
"""

import os
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from megatron_packing.data.sources import index
from megatron_packing.data.sources.index import IndexKind, Offsets, RowIndex
from megatron_packing.data.sources.json_file import JsonFile
from megatron_packing.data.sources.lines import IS_SPACE, chunks, first_chunk
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError

_QUOTE, _BACKSLASH, _COMMA, _OPEN, _CLOSE = 1, 2, 3, 4, 5
_CLASS = np.zeros(256, dtype=np.uint8)
for _bytes, _class in ((b'"', _QUOTE), (b"\\", _BACKSLASH), (b",", _COMMA), (b"[{", _OPEN), (b"]}", _CLOSE)):
    _CLASS[list(_bytes)] = _class
_DEPTH = np.array([0, 0, 0, 0, 1, -1], dtype=np.int64)  # what a byte of each class adds outside of strings
_SPACE = b" \t\r\n"
_NONE = np.zeros(0, dtype=np.int64)
_LONGEST_BLAMED = 256 << 20  # bytes of an element that is parsed to find damage; a longer one is damage itself


class _Machine:
    """The state between two pieces of a file."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.backslashes = 0
        """In the unbroken run with which the last piece ended."""

    def separators(self, data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], int | None]:
        """Read on. Returns the places in `data` of the outermost list's opening bracket and commas, and of its end."""
        classes = _CLASS[data]
        places = np.flatnonzero(classes)
        kinds = classes[places]
        quotes = kinds == _QUOTE
        quotes &= ~self._escaped(places, kinds, len(data))
        before = np.cumsum(quotes) - quotes + self.in_string  # quotes up to here: odd within a string
        self.in_string = bool((self.in_string + int(quotes.sum())) % 2)
        counts = (before % 2 == 0) & (kinds >= _COMMA)
        places, kinds = places[counts], kinds[counts]
        depths = self.depth + np.cumsum(_DEPTH[kinds])
        self.depth = int(depths[-1]) if len(depths) else self.depth
        ends = np.flatnonzero(depths <= 0)
        stop = len(depths) if not len(ends) else int(ends[0])
        outer = (depths[:stop] == 1) & (kinds[:stop] != _CLOSE)
        return places[:stop][outer], None if not len(ends) else int(places[stop])

    def _escaped(self, places: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.bool_]:
        """Which of the bytes at `places` follow an odd number of backslashes."""
        is_backslash = kinds == _BACKSLASH
        carried, self.backslashes = self.backslashes, 0
        if not is_backslash.any():
            escaped = np.zeros(len(places), dtype=bool)
            if carried % 2 and len(places) and places[0] == 0:
                escaped[0] = True
            return escaped
        adjoins = np.zeros(len(places), dtype=bool)  # whether the byte before is a backslash of this piece
        adjoins[1:] = is_backslash[:-1] & (np.diff(places) == 1)
        order = np.arange(len(places))
        run_start = np.maximum.accumulate(np.where(adjoins, 0, order))
        before = order - run_start  # backslashes of this piece in the run that ends just before
        before += np.where(places - before == 0, carried, 0)  # the run began at the piece's first byte
        if is_backslash[-1] and places[-1] == size - 1:
            self.backslashes = int(before[-1]) + 1
        odd: npt.NDArray[np.bool_] = before % 2 == 1
        return odd


def scan_list(file: BinaryIO, stamp: FileStamp) -> Iterator[tuple[Offsets, Offsets]]:
    """Find the elements of a list; see `IndexKind.scan`. An element's bytes end one before the next one's offset."""
    for offsets in _elements(file, stamp):
        if isinstance(offsets, str):
            raise ConfigError(f"{stamp.shown}: not valid JSON: {_first_damage(stamp) or offsets}")
        yield offsets, _NONE


def _elements(file: BinaryIO, stamp: FileStamp) -> Iterator[Offsets | str]:
    """Where elements begin, piece by piece, and where the list ends; last, what is wrong if it is no list."""
    base, first = first_chunk(file, stamp.shown)
    machine = _Machine()
    is_open = False
    pieces = chunks(file, first)
    for data in pieces:
        if not is_open:
            text = np.flatnonzero(~IS_SPACE[data])
            if len(text) and data[text[0]] != ord("["):
                yield f"byte {base + int(text[0]) + 1:,} should open a list."
                return
            is_open = bool(len(text))
        separators, end = machine.separators(data)
        yield (base + separators + 1).astype(np.int64)
        base += len(data)
        if end is not None:
            stop = base - len(data) + end + 1
            yield np.array([stop], dtype=np.int64)
            if any((~IS_SPACE[rest]).any() for rest in chain([data[end + 1 :]], pieces)):
                yield f"its list ends at byte {stop:,}, but more follows. Does it hold several lists?"
            return
    if is_open:
        within = "within a string" if machine.in_string else f"within {machine.depth:,} open bracket(s)"
        yield f"it ends at byte {base:,} {within}. It was cut short."
    yield np.array([base], dtype=np.int64)


def _first_damage(stamp: FileStamp) -> str | None:
    """Where the first element is that is no JSON: brackets and quotes after it tell nothing any more."""
    place, start = 0, -1  # of the element that is open
    with open(stamp.path, "rb", buffering=0) as file, open(stamp.path, "rb") as elements:
        for offsets in _elements(file, stamp):
            if isinstance(offsets, str):  # the open element has no end; behind the list's end there is none
                is_open = place > 0 and not _ends_the_list(elements, start)
                fault = _fault(elements, start, stamp.size) if is_open else None
                return _placed(stamp, place, start, fault) if fault else None
            for stop in offsets.tolist():
                fault = _fault(elements, start, stop - 1) if place else None
                if fault:
                    return _placed(stamp, place, start, fault)
                place, start = place + 1, stop
    return None


def _placed(stamp: FileStamp, place: int, start: int, fault: str) -> str:
    with open(stamp.path, "rb") as file:
        file.seek(start)
        head = file.read(index.SCAN_BYTES)
    start += len(head) - len(head.lstrip(_SPACE))
    return f"element {place:,}, which begins at byte {start + 1:,} (line {_line(stamp, start):,}): {fault}."


def _ends_the_list(file: BinaryIO, start: int) -> bool:
    file.seek(start - 1)
    return file.read(1) == b"]"


def _fault(file: BinaryIO, start: int, stop: int) -> str | None:
    if stop - start > _LONGEST_BLAMED:
        return f"{stop - start:,} bytes and no end; a quote or a bracket is missing"
    file.seek(start)
    data = file.read(stop - start)
    if not data.strip(_SPACE):
        return "nothing stands between two commas" if stop < os.fstat(file.fileno()).st_size else None
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return str(error.msg)
    return None


def _line(stamp: FileStamp, byte: int) -> int:
    """The line in which `byte` of the file is, counted from 1."""
    lines = 1
    with open(stamp.path, "rb", buffering=0) as file:
        while byte > 0 and (data := file.read(min(byte, index.SCAN_BYTES))):
            lines += data.count(b"\n")
            byte -= len(data)
    return lines


class JsonListSource(JsonFile):
    """The rows of a `.json` file that holds one list of objects, of any size.

    A file whose brackets or quotes do not match is refused with the place; an element that is damaged otherwise is an
    error of its row. A record's line is its place in the list, counted from 1. Arguments and errors: see `JsonFile`.
    """

    _KIND = IndexKind(name="list", version=1, scan=scan_list)
    _SEPARATOR_BYTES = 1

    def _count(self, found: RowIndex) -> int:
        if found.rows != 1:
            return found.rows
        # Of a list without commas only a look can tell whether it has one element or none.
        start, stop = map(int, found.offsets)
        return 1 if self._bytes(start, stop - 1).strip(_SPACE) else 0
