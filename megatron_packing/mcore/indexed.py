"""What are the rows of documents that are tokenized already? One a document of Megatron's `.bin/.idx` pair, as it is.

Every id is learned and none is added: whether a document ends in EOS was decided when it was tokenized
(`tools/preprocess_data.py --append-eod`). `open_data` is the one way by which training and `inspect` open any path.

Cost: two files mapped; reading a row copies its ids.
"""

import os
import struct
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from megatron_packing.data import Source, TokenIds, open_source
from megatron_packing.data.sources.record import checked_row
from megatron_packing.data.sources.stamp import FileStamp, no_rows
from megatron_packing.errors import ConfigError

_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, documents + 1
_AGAIN = "Make the pair again, or copy both files anew."


def open_data(path: str | os.PathLike[str], cache: str | None = None) -> Source:
    """The rows of `path`: tokenized documents where `PATH.bin` and `PATH.idx` exist, else what `open_source` reads.

    Args:
        path: as a user gives it to --data-path.
        cache: `--data-cache-path`.

    Raises:
        ConfigError: no such file, nothing in it, or damage; see `open_source`.
    """
    path = os.fspath(path)
    if not os.path.exists(path) and all(os.path.exists(path + suffix) for suffix in (".bin", ".idx")):
        return IndexedSource(path)
    return open_source(path, cache)


class IndexedSource:
    """The documents of a `.bin/.idx` pair. Pickles to its prefix; the process that receives it maps the files again.

    Args:
        path: the prefix, as Megatron names it: without `.bin` or `.idx`.

    Raises:
        ConfigError: the pair is damaged, its parts do not fit each other, or it holds no document of ids.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamps = [FileStamp.of(path + suffix) for suffix in (".bin", ".idx")]
        if self._stamps[0].size == 0:
            raise ConfigError(no_rows(path + ".bin", 0))
        self._pair: IndexedDataset | None = None
        self._rows = len(self._opened().document_indices) - 1
        if self._rows == 0:
            raise ConfigError(no_rows(path, self._stamps[0].size))

    @property
    def path(self) -> str:
        """The prefix, as the user named it."""
        return self._path

    @property
    def fingerprint(self) -> str:
        """Path, size and time of change of both files."""
        return "indexed1:" + ":".join(stamp.fingerprint for stamp in self._stamps)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> TokenIds:
        """Document `row`, counted from 0, whole, however many sentences it was cut into."""
        row = checked_row(row, self._rows)
        pair = self._opened()
        first, end = (int(place) for place in pair.document_indices[row : row + 2])
        sentences = [pair[sentence] for sentence in range(first, end)]
        return TokenIds(np.concatenate([np.zeros(0, dtype=np.int64), *sentences]).astype(np.int64))

    def _opened(self) -> IndexedDataset:
        if self._pair is None:
            for stamp in self._stamps:
                stamp.check_unchanged()
            self._pair = _opened_pair(self._path, self._stamps[0].size)
        return self._pair

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pair": None}


def _opened_pair(path: str, bin_bytes: int) -> IndexedDataset:
    _check_index(path + ".idx")
    try:
        pair = IndexedDataset(path)
    except (AssertionError, ValueError, OSError) as error:
        why = str(error) or "its sequences and documents do not fit each other"
        raise ConfigError(f"{path}.idx cannot be used: {why}. {_AGAIN}") from error
    needed = int(pair.sequence_lengths.sum(dtype=np.int64)) * np.dtype(pair.index.dtype).itemsize
    if needed != bin_bytes:
        raise ConfigError(f"{path}.bin has {bin_bytes:,} bytes; {path}.idx tells of {needed:,}. {_AGAIN}")
    return pair


def _check_index(path: str) -> None:
    """Refuse an index that is cut short or of another kind, which Megatron would only assert on."""
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        size = os.fstat(file.fileno()).st_size
    magic, version, code, sequences, documents = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0, 0)
    if (magic, version) != (b"MMIDIDX\0\0", 1):
        raise ConfigError(f"{path} is no index of tokenized documents. {_AGAIN}")
    if code not in DType or not np.issubdtype(DType.dtype_from_code(code), np.integer):
        raise ConfigError(f"{path}: its documents are not integers (Megatron's type code {code}). {_AGAIN}")
    # int32 lengths and int64 places of sequences, int64 documents; multimodal ones have a byte more a sequence
    needed = _HEAD.size + 12 * sequences + 8 * documents
    if size not in (needed, needed + sequences):
        raise ConfigError(f"{path} has {size:,} bytes instead of {needed:,}: it was cut short. {_AGAIN}")
