"""Which rows does a file of JSON lines hold? Every line that is not blank.

Cost: a search for line ends, 1 GB/s or so, once; see `index`.
"""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_packing.data.sources import index
from megatron_packing.data.sources.index import IndexKind, Offsets
from megatron_packing.data.sources.json_file import JsonFile
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError

BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
IS_SPACE = np.zeros(256, dtype=bool)
IS_SPACE[list(b" \t\r\n")] = True  # JSON's white space, no more: a run of NUL bytes is damage, not a blank line

_NOT_TEXT = {
    b"\xff\xfe": "UTF-16 text. Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW",
    b"\xfe\xff": "UTF-16 text. Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW",
    b"\x1f\x8b": "a gzip archive. Let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "a zstd archive. Let its name end in .zst",
    b"PAR1": "a Parquet file. Let its name end in .parquet",
}


def first_chunk(file: BinaryIO, shown: str) -> tuple[int, bytes]:
    """The offset at which text begins, and the first bytes from there; ConfigError if it is no text of ours."""
    head = file.read(index.SCAN_BYTES)
    while len(head) < len(BOM) and (more := file.read(index.SCAN_BYTES)):
        head += more
    for magic, what in _NOT_TEXT.items():
        if head.startswith(magic):
            raise ConfigError(f"{shown} is {what}.")
    return (len(BOM), head[len(BOM) :]) if head.startswith(BOM) else (0, head)


def chunks(file: BinaryIO, first: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of `first` and of the rest of the file, piece by piece, none of them empty."""
    chunk = first
    while chunk or (chunk := file.read(index.SCAN_BYTES)):
        yield np.frombuffer(chunk, dtype=np.uint8)
        chunk = b""


def scan_lines(file: BinaryIO, stamp: FileStamp) -> Iterator[tuple[Offsets, Offsets]]:
    """Find the rows of a file of lines; see `IndexKind.scan`."""
    rows = 0
    base, first = first_chunk(file, stamp.shown)
    open_start, open_has_text = base, False  # the line that the last chunk left unfinished
    for data in chunks(file, first):
        ends = _newlines(data)
        starts = np.concatenate(([open_start], base + ends + 1))
        has_text = _has_text(data, np.concatenate(([0], ends + 1)))
        has_text[0] |= open_has_text
        open_start, open_has_text = int(starts[-1]), bool(has_text[-1])
        done = has_text[:-1]
        blanks = np.zeros(0, dtype=np.int64) if done.all() else rows + np.cumsum(done)[~done]
        yield starts[:-1][done].astype(np.int64), blanks.astype(np.int64)
        rows += int(done.sum())
        base += len(data)
    tail = [open_start, base] if open_has_text else [base]
    yield np.array(tail, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _newlines(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Where newlines are. As `flatnonzero(data == _NEWLINE)`, but with most bytes passed over eight at a time."""
    is_newline = np.zeros(-(-len(data) // 8) * 8, dtype=bool)
    np.equal(data, _NEWLINE, out=is_newline[: len(data)])
    words = is_newline.view("<u8")
    places = np.flatnonzero(words != 0)
    found = words[places]
    if (found & (found - np.uint64(1))).any():  # a word with more than one: short or blank lines
        return np.flatnonzero(is_newline)
    _, bits = np.frexp(found.astype(np.float64))  # found is 256**byte, so that bits is 8 * byte + 1, exactly
    ends: npt.NDArray[np.int64] = places * 8 + bits // 8
    return ends


def _has_text(data: npt.NDArray[np.uint8], firsts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each line that begins at one of `firsts`, whether anything but white space is in its part of `data`."""
    inside = firsts < len(data)  # only the last can fall outside, when the chunk ends with a newline
    has_text = np.zeros(len(firsts), dtype=bool)
    opening = data[firsts[inside]]
    has_text[inside] = ~IS_SPACE[opening]
    # Nearly every line opens with a brace; only where one opens with white space must the rest be looked at.
    if (IS_SPACE[opening] & (opening != _NEWLINE)).any():
        has_text[inside] = np.logical_or.reduceat(~IS_SPACE[data], firsts[inside])
    return has_text


class JsonlSource(JsonFile):
    """The rows of a JSON-lines file; blank lines are not rows, a byte-order mark and CRLF line ends are accepted.

    Its last line may lack a newline. Arguments and errors: see `JsonFile`.
    """

    _KIND = IndexKind(name="lines", version=1, scan=scan_lines)
    _SEPARATOR_BYTES = 0
