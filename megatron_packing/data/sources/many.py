"""How do many files become one source? Row after row, file after file, sorted by name.

Cost: opening every file once; after that a few files are open at a time, however many there are.
"""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_packing.data.sources.cache import say_once
from megatron_packing.data.sources.record import FileSource, checked_row
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError

FILES_OPEN = 32
"""Files that a process keeps open of one folder, the last used: shuffled rows of a thousand shards must not run into
the limit of open files."""

Opener = Callable[[str, str | None], FileSource]


class ManySource:
    """The rows of several files, one after the other. A record names its own file and its line there.

    Pickles to the pattern and a digest of what it stood for; the process that receives it looks for the files again.

    Args:
        path: the folder or pattern, as the user named it.
        find: `path` -> the files, sorted; must be importable by name.
        open_file: opens one of them; likewise.
        cache: `--data-cache-path`.

    Raises:
        ConfigError: a file cannot be read; none holds a row; or the files change while in use.
    """

    def __init__(self, path: str, find: Callable[[str], Sequence[str]], open_file: Opener, cache: str | None) -> None:
        self._path, self._find, self._open_file, self._cache = path, find, open_file, cache
        self._sources: OrderedDict[int, FileSource] = OrderedDict()
        self._files: Sequence[str] | None = None
        self._starts: list[int] = []
        self._fingerprint = ""
        self._look()
        if self._starts[-1] == 0:
            raise ConfigError(f"{path}: none of its files holds a row. Training needs at least one row.")

    @property
    def path(self) -> str:
        """The folder or pattern, as the user named it."""
        return self._path

    @property
    def fingerprint(self) -> str:
        """A digest of the files' own fingerprints, in order."""
        return self._fingerprint

    @property
    def files(self) -> Sequence[str]:
        """The files that hold rows, in order."""
        if self._files is None:
            self._look_again()
        assert self._files is not None
        return self._files

    @property
    def starts(self) -> Sequence[int]:
        """[files + 1], the row at which each file begins, and the number of rows."""
        if self._files is None:
            self._look_again()
        return self._starts

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Any:
        """Row `row`, counted from 0 over all files; raises what its file's source raises."""
        row = checked_row(row, self._rows)
        if self._files is None:
            self._look_again()
        place = bisect_right(self._starts, row) - 1
        return self._source(place)[row - self._starts[place]]

    def close(self) -> None:
        """Give all files back; the next row opens its own again."""
        while self._sources:
            self._sources.popitem()[1].close()

    def _look(self) -> None:
        files = self._find(self._path)
        kept, rows, prints, empty = [], [], [], []
        for file in files:
            if FileStamp.of(file).size == 0:
                empty.append(file)
                continue
            source = self._open_file(file, self._cache)
            kept.append(file)
            rows.append(len(source))
            prints.append(source.fingerprint)
            source.close()
        if empty:
            say_once(f"{self._path}: {len(empty):,} of {len(files):,} files are empty (0 bytes), the first {empty[0]}")
        self._files = kept
        self._starts = [0, *np.cumsum(rows, dtype=np.int64).tolist()]
        self._rows = self._starts[-1]
        self._fingerprint = f"many1:{hashlib.sha256('\n'.join(prints).encode()).hexdigest()}"

    def _look_again(self) -> None:
        """After a pickle: find the files anew, and make sure that they are the same."""
        expected = self._fingerprint
        self._look()
        if self._fingerprint != expected:
            raise ConfigError(
                f"{self._path}: its files are not those that were there when it was opened. Data must not change "
                "during a run: write new files elsewhere and start again."
            )

    def _source(self, place: int) -> FileSource:
        if place in self._sources:
            self._sources.move_to_end(place)
            return self._sources[place]
        assert self._files is not None
        if len(self._sources) >= FILES_OPEN:
            self._sources.popitem(last=False)[1].close()
        source = self._sources[place] = self._open_file(self._files[place], self._cache)
        return source

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_starts": [], "_sources": OrderedDict()}
