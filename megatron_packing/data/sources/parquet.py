"""What stands in row i of a Parquet file? Its row group is read and kept for a while, never the file as a whole.

Cost: a row group's decoding when a row of it is asked for and it is not among the last few. A run that shuffles asks
for them in no order, so files of many small row groups (10,000 rows or less) are read best.
"""

import os
from bisect import bisect_right
from collections import OrderedDict
from typing import Any

import numpy as np

from megatron_packing.data.sources.cache import say_once
from megatron_packing.data.sources.optional import needed
from megatron_packing.data.sources.record import Record, checked_row
from megatron_packing.data.sources.stamp import FileStamp, no_rows
from megatron_packing.errors import ConfigError, SampleError

KEPT_BYTES = 64 << 20
"""Decoded row groups, the last used of all files together, that a process keeps; the one in use is always kept."""
_LARGE_GROUP_BYTES = 256 << 20

_kept: OrderedDict[tuple[str, int], Any] = OrderedDict()  # (fingerprint, row group) -> table


class ParquetSource:
    """The rows of a Parquet file, as plain Python objects: text is text, lists are lists, structs are dicts.

    A column without a value in a row is absent from the row's fields, as it would be in JSON: a file has the same
    columns in every row. Pickles to its path, stamp and row count.

    Args:
        path: the file.
        cache: not needed; the file holds its own index.

    Raises:
        ConfigError: the file is missing, unreadable, damaged or holds no row, or changes while in use.
        MissingDependency: pyarrow.
    """

    def __init__(self, path: str | os.PathLike[str], cache: str | None = None) -> None:
        self._stamp = FileStamp.of(path)
        self._file: Any = None
        self._process = -1
        self._rows = int(self._opened().metadata.num_rows)
        if self._rows == 0:
            raise ConfigError(no_rows(self.path, self._stamp.size))

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self._stamp.shown

    @property
    def fingerprint(self) -> str:
        """Path, size, time of change and format."""
        return f"parquet1:{self._stamp.fingerprint}"

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Record:
        """Row `row`, counted from 0.

        Raises:
            ConfigError: its row group is damaged.
            SampleError: its text is not UTF-8 ("bad_utf8").
        """
        row = checked_row(row, self._rows)
        self._opened()
        group = bisect_right(self._starts, row) - 1
        try:
            (fields,) = self._group(group).slice(row - self._starts[group], 1).to_pylist()
        except UnicodeDecodeError as error:
            why = f"its text is not UTF-8 ({error.reason}). Mend or remove the row."
            raise SampleError(self.path, row + 1, why, reason="bad_utf8") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: row group {group} is damaged: {_first_line(error)}") from error
        return Record(self.path, row + 1, {name: value for name, value in fields.items() if value is not None})

    def close(self) -> None:
        """Give the file back; the next row opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _opened(self) -> Any:
        # A forked worker must not share its parent's file: reading moves the position.
        if self._file is None or self._process != os.getpid():
            parquet = needed("pyarrow.parquet", extra="data", to=f"to read {self.path}")
            self._stamp.check_unchanged()
            try:
                self._file = parquet.ParquetFile(self._stamp.path, memory_map=False, pre_buffer=False)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.path} is no whole Parquet file: {_first_line(error)}") from error
            self._process = os.getpid()
            metadata = self._file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            self._starts: list[int] = [0, *np.cumsum([group.num_rows for group in groups]).tolist()]
            largest = max((group.total_byte_size for group in groups), default=0)
            if largest > _LARGE_GROUP_BYTES:
                say_once(
                    f"{self.path} has row groups of up to {largest / 1e6:,.0f} MB; each process holds one, and a "
                    "shuffled run decodes one for nearly every row. Write it with smaller ones (row_group_size=10000)."
                )
        return self._file

    def _group(self, group: int) -> Any:
        key = (self.fingerprint, group)
        table = _kept.pop(key, None)
        if table is None:
            table = self._file.read_row_group(group, use_threads=False)  # loader workers are the threads
        room = KEPT_BYTES - table.nbytes
        while _kept and sum(other.nbytes for other in _kept.values()) > room:
            _kept.popitem(last=False)
        _kept[key] = table
        return table

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_file": None, "_process": -1}
        state.pop("_starts", None)
        return state


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
