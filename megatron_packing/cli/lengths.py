"""Which lengths does a file hold? `.npy`, `.txt` (one a line) or `.json` (a list, or counts by length).

Cost: the file is read whole; about 1 s for 5 million lengths of text.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import ConfigError, PackingError
from megatron_packing.schedule.plan import as_lengths

type Int64Array = npt.NDArray[np.int64]

_MOST_LENGTHS = 100_000_000
"""A histogram is a small file that can ask for any amount of memory; this many lengths take 800 MB."""


def load_lengths(path: Path, seed: int) -> Int64Array:
    """The lengths in `path`, in tokens, int64 [N] with N of at least 1.

    Args:
        path: the file; its suffix says how it is read.
        seed: a histogram says nothing of order. Its lengths are written out in ascending order, each as often as it
            counts, and then shuffled with this seed. The order in a list is kept.

    Raises:
        ConfigError: no such file, a suffix that is not read, or something in it that is no length.
    """
    if path.suffix.lower() not in _READERS:
        raise ConfigError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(_READERS)}.")
    try:
        raw = _READERS[path.suffix.lower()](path, seed)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text (byte {error.start:,} is not UTF-8). Check the file.") from error
    try:
        lengths = as_lengths(raw)
    except PackingError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not lengths.size:
        raise ConfigError(f"{path} holds no lengths; planning needs at least 1.")
    return lengths


def _read_npy(path: Path, seed: int) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)  # a pickle could run code
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path} is no .npy file of plain numbers ({error}). Write it with numpy.save.") from error
    if not isinstance(loaded, np.ndarray):
        raise ConfigError(f"{path} holds several arrays under a .npy name. Save one array of lengths.")
    return loaded


def _read_txt(path: Path, seed: int) -> list[int]:
    lengths = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            word = line.strip()
            if word:
                lengths.append(_as_count(word, f"{path}:{number}"))
    return lengths


def _read_json(path: Path, seed: int) -> list[int] | Int64Array:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}).") from error
    if isinstance(content, _Pairs):
        return _expanded(content, path, seed)
    if not isinstance(content, list):
        raise ConfigError(f'{path} holds neither a list of lengths nor counts by length, such as {{"512": 3}}.')
    for place, item in enumerate(content):
        if type(item) is not int:  # true is no length, and 512.0 may be a rounded one
            raise ConfigError(f"{path}: item {place}, counted from 0, is {_short(item)}; a length is an integer.")
    return content


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its repeated keys, which a dict would lose."""


def _expanded(histogram: _Pairs, path: Path, seed: int) -> Int64Array:
    counts: dict[int, int] = {}
    for key, count in histogram:
        length = _as_count(key, f"{path}: a key")
        if length in counts:
            raise ConfigError(f"{path}: length {length:,} is counted twice. Add its counts up.")
        if type(count) is not int or count < 0:
            raise ConfigError(f"{path}: length {key} counts {_short(count)}; a count is an integer of at least 0.")
        counts[length] = count
    total = sum(counts.values())
    if total > _MOST_LENGTHS:
        raise ConfigError(f"{path} counts {total:,} lengths; the limit is {_MOST_LENGTHS:,}. Scale the counts down.")
    ascending = sorted(counts)
    try:
        written_out = np.repeat(np.array(ascending, dtype=np.int64), [counts[length] for length in ascending])
    except OverflowError as error:
        raise ConfigError(f"{path}: length {ascending[-1]:,} does not fit in 64 bits.") from error
    return np.random.default_rng(seed).permutation(written_out)


def _as_count(word: str, where: str) -> int:
    if not (word.isascii() and word.isdigit()):  # int() would also take "1_0", "+10" and digits of other scripts
        raise ConfigError(f"{where} is {_short(word)}; a length is an integer of at least 1.")
    return int(word)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_READERS: dict[str, Callable[[Path, int], Any]] = {".npy": _read_npy, ".txt": _read_txt, ".json": _read_json}
