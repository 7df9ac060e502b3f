"""Which lengths and ids does mock data have? A function of the configuration, the seed and the row number alone.

Cost: a few microseconds a row plus its length; nothing is drawn ahead or kept.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index as as_integer
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from megatron_packing.errors import ConfigError

MOCK_ROWS = 1_000_000
"""Rows of a source whose lengths are drawn, as many as upstream's."""

_MAX_STEP = 4
"""Ids of a row rise by 1 to this many at a time: learnable within a few iterations, yet not one single sequence."""

_BOUNDS = ("min_seq_len", "max_seq_len", "mean_seq_len")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "distribution/lognormal": ("mode", "type", *_BOUNDS, "lognormal_sigma"),
    "distribution/uniform": ("mode", "type", "min_seq_len", "max_seq_len"),
    "file": ("mode", "path"),
    "lengths": ("mode", "lengths"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MockLengths:
    """Where the length of each mock row comes from: a list, or a distribution. Lengths count tokens after the shift."""

    kind: str
    """lognormal, uniform or listed."""
    lowest: int = 1
    """Shortest length drawn."""
    highest: int = 1
    """Longest length drawn."""
    mean: float = 1.0
    """Mean of the lognormal before it is cut to lowest..highest."""
    sigma: float = 1.0
    """Standard deviation of the logarithm."""
    listed: npt.NDArray[np.int64] | None = None
    """int64 [rows], for listed."""

    def draw(self, row: int, rng: np.random.Generator) -> int:
        """The length of a row, in tokens."""
        if self.listed is not None:
            return int(self.listed[row % len(self.listed)])
        if self.kind == "uniform":
            return int(rng.integers(self.lowest, self.highest + 1))
        # With this mu the mean of the uncut lognormal is `mean`, as upstream draws it.
        drawn = rng.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return int(np.clip(drawn, self.lowest, self.highest))


def mock_lengths(config: Mapping[str, Any] | str | None, seq_length: int) -> MockLengths:
    """Understand a mock configuration.

    Args:
        config: a mapping, JSON text, the name of a JSON file, or None: lognormal from half of `seq_length` to all of
            it, mean three quarters, sigma 1.1.
        seq_length: `--seq-length`, for the default.

    Raises:
        ConfigError: unknown or missing keys, an unknown mode, or values that cannot be lengths.
    """
    if config is None:
        half = max(1, seq_length // 2)
        return _lognormal(half, max(half, seq_length), max(1, seq_length * 3 // 4), 1.1)
    given = _parsed(config)
    mode = given.get("mode")
    if mode == "verification":
        raise ConfigError(
            'Mock mode "verification" is not supported: it replays an indexed dataset. Train on that dataset.'
        )
    kind = f"{mode}/{given.get('type')}" if mode == "distribution" else str(mode)
    if kind not in _KEYS:
        raise ConfigError(f"Mock mode {kind!r} is unknown. Known are {', '.join(_KEYS)} (mode, or mode/type).")
    keys = _KEYS[kind]
    wrong = [f"unknown {key!r}" for key in given if key not in keys] + [
        f"no {key!r}" for key in keys if key not in given
    ]
    if wrong:
        raise ConfigError(f"Mock configuration of {kind} has {', '.join(wrong)}. Its keys are {', '.join(keys)}.")
    if kind == "file":
        return _listed(_read_lengths(given["path"]), str(given["path"]))
    if kind == "lengths":
        return _listed(given["lengths"], "lengths")
    if kind == "distribution/uniform":
        lowest, highest = _bounds(given["min_seq_len"], given["max_seq_len"])
        return MockLengths(kind="uniform", lowest=lowest, highest=highest)
    return _lognormal(*(given[key] for key in (*_BOUNDS, "lognormal_sigma")))


class MockSource:
    """Rows of ids that a model can learn: arithmetic sequences that wrap around the vocabulary, ended by EOS.

    Args:
        config: see `mock_lengths`.
        vocab_size: ids are below it.
        seed: rows depend on it and on their number, on nothing else.
        eos_id: ends each row, and stands nowhere else.
        seq_length: `--seq-length`.
        rows: how many, where lengths are drawn; a list has as many as it lists.

    Raises:
        ConfigError: see `mock_lengths`; or a vocabulary without room.
    """

    path = "<mock data>"

    def __init__(
        self,
        config: Mapping[str, Any] | str | None,
        vocab_size: int,
        seed: int,
        *,
        eos_id: int,
        seq_length: int,
        rows: int = MOCK_ROWS,
    ) -> None:
        if vocab_size < 2 or not 0 <= eos_id < vocab_size:
            raise ConfigError(
                f"Mock data: vocabulary of {vocab_size}, EOS id {eos_id}; EOS must be in it, and one id besides."
            )
        if seed < 0:
            raise ConfigError(f"Mock data: seed {seed}; it must be at least 0.")
        self._lengths = mock_lengths(config, seq_length)
        self._vocab_size, self._seed, self._eos_id = vocab_size, seed, eos_id
        self._rows = rows if self._lengths.listed is None else len(self._lengths.listed)

    @property
    def fingerprint(self) -> str:
        """All that the rows depend on."""
        listed = None if self._lengths.listed is None else self._lengths.listed.tolist()
        lengths = dataclasses.replace(self._lengths, listed=None)
        return f"mock:{lengths}:{listed}:{self._vocab_size}:{self._seed}:{self._eos_id}:{self._rows}"

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> npt.NDArray[np.int64]:
        """Row `row`: int64 [length + 1], the last of them EOS."""
        row = as_integer(row)
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        rng = np.random.default_rng((self._seed, row))
        length = self._lengths.draw(row, rng)
        usable = self._vocab_size - 1  # all but EOS
        start, step = int(rng.integers(usable)), int(rng.integers(1, _MAX_STEP + 1))
        ids = (start + step * np.arange(length, dtype=np.int64)) % usable
        ids += ids >= self._eos_id
        return np.append(ids, np.int64(self._eos_id))


def _parsed(config: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    text: str | bytes = config
    if not config.lstrip().startswith("{"):
        try:
            with open(config, "rb") as file:
                text = file.read()
        except OSError as error:
            raise ConfigError(
                f"Mock configuration {config!r} is neither a JSON object nor a readable file ({error.strerror})."
            ) from error
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"Mock configuration {config!r} is not valid JSON ({error.msg}, column {error.colno})."
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"Mock configuration {config!r} is no JSON object. It needs a mode; known: {', '.join(_KEYS)}."
        )
    return given


def _lognormal(lowest: object, highest: object, mean: object, sigma: object) -> MockLengths:
    low, high = _bounds(lowest, highest)
    for name, value in (("mean_seq_len", mean), ("lognormal_sigma", sigma)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"Mock configuration: {name} is {value!r}; it must be a number above 0.")
    assert isinstance(mean, int | float)
    assert isinstance(sigma, int | float)
    return MockLengths(kind="lognormal", lowest=low, highest=high, mean=float(mean), sigma=float(sigma))


def _bounds(lowest: object, highest: object) -> tuple[int, int]:
    if type(lowest) is not int or type(highest) is not int or not 1 <= lowest <= highest:
        raise ConfigError(
            f"Mock configuration: min_seq_len {lowest!r}, max_seq_len {highest!r}; they count tokens and must be "
            "integers with 1 <= min <= max."
        )
    return lowest, highest


def _listed(lengths: object, subject: str) -> MockLengths:
    if not isinstance(lengths, list) or not lengths:
        raise ConfigError(f"Mock configuration: {subject} holds no lengths; at least one integer is needed.")
    for place, length in enumerate(lengths):
        if type(length) is not int or not 1 <= length < 2**31:
            raise ConfigError(
                f"Mock configuration: {subject} has {length!r} at place {place + 1}; lengths count tokens and must be "
                "integers of at least 1."
            )
    return MockLengths(kind="listed", listed=np.array(lengths, dtype=np.int64))


def _read_lengths(path: object) -> list[object]:
    """Lengths from a text file, separated by commas, line ends or both; a first line of words is a heading."""
    if not isinstance(path, str):
        raise ConfigError(f"Mock configuration: path is {path!r}; it must name a file.")
    try:
        with open(os.fspath(path), encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Mock lengths {path}: cannot be read ({error}).") from error
    if lines and any(character.isalpha() for character in lines[0]):
        lines = lines[1:]
    words = [word.strip() for line in lines for word in line.split(",")]
    return [int(word) if word.isdecimal() else word for word in words if word]
