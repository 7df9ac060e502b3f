"""What stands in row i of a JSON file, given its index? One `pread` and one parse; the file is never held in memory."""

import os
from typing import Any, ClassVar

import numpy as np

from megatron_packing.data.sources.index import IndexKind, RowIndex, load_or_build
from megatron_packing.data.sources.record import Record, checked_row, parse_object
from megatron_packing.data.sources.stamp import FileStamp, no_rows
from megatron_packing.errors import ConfigError


class JsonFile:
    """Rows of a file that are found by byte offset.

    Pickles to its path, stamp and row count, a few hundred bytes for any number of rows; the process that receives it
    maps the same index.

    Args:
        path: the file.
        cache: `--data-cache-path`, where its index is kept; None: beside the file.
        origin: for an unpacked copy, the stamp of the archive that it is of.

    Raises:
        ConfigError: the file is missing, unreadable, damaged or holds no row, or changes while in use.
    """

    _KIND: ClassVar[IndexKind]
    _SEPARATOR_BYTES: ClassVar[int]
    """At the end of each row, no part of its JSON."""

    def __init__(
        self, path: str | os.PathLike[str], cache: str | None = None, *, origin: FileStamp | None = None
    ) -> None:
        self._stamp = FileStamp.of(path, shown=None if origin is None else origin.path)
        self._origin = origin or self._stamp
        self._cache = cache
        self._file: Any = None
        self._index: RowIndex | None = self._load(verify=True)
        self._rows = self._count(self._index)
        if self._rows == 0:
            raise ConfigError(no_rows(self.path, self._origin.size))

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self._stamp.shown

    @property
    def fingerprint(self) -> str:
        """Path, size, time of change and format."""
        return f"{self._KIND.name}{self._KIND.version}:{self._origin.fingerprint}"

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Record:
        """Row `row`, counted from 0.

        Raises:
            SampleError: its bytes are no JSON ("bad_json", "bad_utf8") or no JSON object ("not_an_object").
        """
        row = checked_row(row, self._rows)
        index = self._mapped()
        # A row's bytes run to the next row's first byte: blank lines in between are white space to the parser.
        start, stop = int(index.offsets[row]), int(index.offsets[row + 1]) - self._SEPARATOR_BYTES
        line = row + 1 + int(np.searchsorted(index.blanks, row, side="right"))
        return Record(self.path, line, parse_object(self._bytes(start, stop), self.path, line))

    def close(self) -> None:
        """Give file descriptors and the index back; the next row opens them again."""
        if self._file is not None:
            self._file.close()
        self._file = self._index = None

    def _count(self, found: RowIndex) -> int:
        return found.rows

    def _mapped(self) -> RowIndex:
        if self._index is None:
            self._stamp.check_unchanged()
            self._index = self._load(verify=False)
        return self._index

    def _load(self, *, verify: bool) -> RowIndex:
        return load_or_build(self._stamp, self._KIND, self._cache, verify=verify)

    def _bytes(self, start: int, stop: int) -> bytes:
        if self._file is None:
            self._stamp.check_unchanged()
            self._file = open(self._stamp.path, "rb", buffering=0)  # noqa: SIM115 - lives as long as the source
        # `pread` carries its own position, so a descriptor that a forked worker inherited is safe to share.
        data = os.pread(self._file.fileno(), stop - start, start)
        while len(data) < stop - start:
            more = os.pread(self._file.fileno(), stop - start - len(data), start + len(data))
            if not more:
                self._stamp.check_unchanged()
                raise ConfigError(f"{self.path} ends before byte {stop:,}, where one of its rows does.")
            data += more
        return data

    def __getstate__(self) -> dict[str, Any]:
        # Without the index the pickle is as small for a billion rows as for one.
        return {**self.__dict__, "_index": None, "_file": None}
