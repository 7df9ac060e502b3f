"""Which samples did these rows make the last time? Kept on disk, so that no row is tokenized twice.

A cache belongs to one key: whoever asks puts into it all that the samples depend on (the file, the tokenizer, the
rules). Ranks share the work, each writing one part of the rows:

    FOLDER/KEY/
        part-00000-of-00002/    made under another name and renamed once it is whole
        part-00001-of-00002/
        cache.json              written last: without it there is no cache

So whatever is killed halfway is no cache, and its whole parts serve the next attempt. Other keys lie beside: what has
become stale is never read, and is the user's to delete.

Cost: 9 bytes a token on disk; a row is a slice of memory maps that all processes of a machine share.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron_packing.data.encode import Dropped, TokenizedSample
from megatron_packing.data.sources.cache import written_whole
from megatron_packing.errors import ConfigError, PackingError

Encoded = list[TokenizedSample] | Dropped

_MANIFEST = "cache.json"
_FORMAT = 1
_DROPPED = "dropped.json"
_SIZES = "sizes.json"  # of each part: file -> bytes
_COLUMNS: Mapping[str, Any] = {
    "tokens": np.int32,  # of all samples, one after the other
    "labels": np.int32,
    "loss_mask": np.uint8,
    "sample_ends": np.int64,  # [samples], tokens up to the end of each
    "truncated": np.uint8,  # [samples]
    "row_ends": np.int64,  # [rows], samples up to the end of each
}
"""File of each part -> its dtype."""


def part_rows(rows: int, part: int, parts: int) -> range:
    """The rows that part number `part` of `parts` holds: all parts together hold each of `rows` once, in order."""
    return range(rows * part // parts, rows * (part + 1) // parts)


class TokenCache:
    """The samples of every row of one source. Pickles to its folder and sizes.

    Args:
        folder: where `complete` left it.
        manifest: what `cache.json` holds.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._parts: tuple[str, ...] = tuple(manifest["parts"])
        self._rows = int(manifest["rows"])
        self._open_parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        """Rows."""
        return self._rows

    def __getitem__(self, row: int) -> Encoded:
        """What row number `row` makes, in arrays of its own."""
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        parts = len(self._parts)
        number = ((row + 1) * parts - 1) // self._rows  # the last part that begins at or before the row
        part = self._open_parts.get(number)
        if part is None:
            part = self._open_parts[number] = _Part(self._folder / self._parts[number])
        return part.read(row - part_rows(self._rows, number, parts).start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_parts": {}}


def open_cache(folder: str | os.PathLike[str], key: str) -> TokenCache | None:
    """The whole cache of `key` in `folder`; None where there is none, or where files of it are gone or cut short."""
    place = Path(folder, key)
    try:
        manifest = json.loads((place / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if manifest.get("format") != _FORMAT:
        return None
    return TokenCache(place, manifest) if all(_is_whole(place / name) for name in manifest["parts"]) else None


def write_part(
    folder: str | os.PathLike[str],
    key: str,
    *,
    rows: int,
    part: int,
    parts: int,
    encode: Callable[[int], Encoded],
) -> None:
    """Encode and keep the rows of one part; nothing is done where the part is there already.

    Args:
        folder: `--packing-token-cache`; all ranks must share it.
        key: the cache's key, a name for a folder.
        rows: rows of the source.
        part: which part, from 0.
        parts: into how many the rows are divided.
        encode: row -> what it makes; whatever it raises ends the part, and nothing of it stays.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    place = Path(folder, key)
    final = place / _part_name(part, parts)
    if _is_whole(final):
        return
    with _told_as_ours(folder):
        place.mkdir(parents=True, exist_ok=True)
        if final.is_dir():
            shutil.rmtree(final)  # damaged since
        unfinished = Path(tempfile.mkdtemp(prefix=f"{final.name}.unfinished-", dir=place))
        try:
            _write_columns(unfinished, _encoded(part_rows(rows, part, parts), encode))
            _rename_whole(unfinished, final)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def complete(folder: str | os.PathLike[str], key: str, *, rows: int, parts: int) -> TokenCache:
    """Declare the cache whole, once every part is written. Called by one process.

    Raises:
        PackingError: a part is missing: the folder is not shared by all ranks.
        ConfigError: the folder cannot be written to.
    """
    place = Path(folder, key)
    names = [_part_name(part, parts) for part in range(parts)]
    missing = [name for name in names if not _is_whole(place / name)]
    if missing:
        there = open_cache(folder, key)  # another run may have been faster, and have cleared ours away
        if there is not None:
            return there
        raise PackingError(
            f"--packing-token-cache {folder}: {missing[0]} of {parts} parts is not there, though its rank has written "
            "it. All ranks must see the same folder: name one on a shared file system."
        )
    manifest = {"format": _FORMAT, "rows": rows, "parts": names}
    with _told_as_ours(folder), written_whole(place / _MANIFEST) as draft:
        draft.file.write(json.dumps(manifest).encode())
    for left in place.glob("part-*"):  # of attempts that were killed, or with other numbers of ranks
        if left.name not in names:
            shutil.rmtree(left, ignore_errors=True)
    return TokenCache(place, manifest)


def _part_name(part: int, parts: int) -> str:
    return f"part-{part:05d}-of-{parts:05d}"


def _encoded(rows: range, encode: Callable[[int], Encoded]) -> Iterator[Encoded]:
    for row in rows:
        try:
            made = encode(row)
        except OSError as error:  # of the data, not of the cache
            raise PackingError(f"row {row + 1:,} of the data cannot be read: {error}.") from error
        for sample in [] if isinstance(made, Dropped) else made:
            if not np.isin(sample.loss_mask, (0, 1)).all():
                raise ConfigError(
                    f"row {row + 1:,} of the data has a loss_mask with values other than 0 and 1, which "
                    "--packing-token-cache does not keep. Leave the flag out."
                )
        yield made


def _write_columns(folder: Path, encoded: Iterator[Encoded]) -> None:
    """Stream what rows make into one file a column."""
    dropped: dict[int, Dropped] = {}
    tokens = samples = 0
    with contextlib.ExitStack() as files:
        column = {name: files.enter_context((folder / name).open("wb")) for name in _COLUMNS}

        def put(name: str, values: npt.ArrayLike) -> None:
            column[name].write(np.asarray(values).astype(_COLUMNS[name]).tobytes())

        for row, made in enumerate(encoded):
            if isinstance(made, Dropped):
                dropped[row] = made
            else:
                for sample in made:
                    tokens += sample.length
                    samples += 1
                    put("tokens", sample.tokens)
                    put("labels", sample.labels)
                    put("loss_mask", sample.loss_mask)
                    put("sample_ends", tokens)
                    put("truncated", sample.truncated)
            put("row_ends", samples)
        for file in column.values():
            _flush(file)
    _write_json(folder / _DROPPED, {row: dataclasses.asdict(made) for row, made in dropped.items()})
    _write_json(folder / _SIZES, {path.name: path.stat().st_size for path in folder.iterdir()})


class _Part:
    """One part, mapped."""

    def __init__(self, folder: Path) -> None:
        self._column = {name: _mapped(folder / name, dtype) for name, dtype in _COLUMNS.items()}
        dropped = json.loads((folder / _DROPPED).read_bytes())
        self._dropped = {int(row): Dropped(**fields) for row, fields in dropped.items()}

    def read(self, row: int) -> Encoded:
        """What the `row`th row of this part makes."""
        if row in self._dropped:
            return self._dropped[row]
        first = int(self._column["row_ends"][row - 1]) if row else 0
        return [self._sample(number) for number in range(first, int(self._column["row_ends"][row]))]

    def _sample(self, number: int) -> TokenizedSample:
        ends = self._column["sample_ends"]
        tokens = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
        return TokenizedSample(
            tokens=self._column["tokens"][tokens].astype(np.int64),
            labels=self._column["labels"][tokens].astype(np.int64),
            loss_mask=self._column["loss_mask"][tokens].astype(np.float32),
            truncated=bool(self._column["truncated"][number]),
        )


def _mapped(path: Path, dtype: Any) -> npt.NDArray[Any]:
    # An empty file cannot be mapped: a part may hold no sample, or no row.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def _rename_whole(unfinished: Path, final: Path) -> None:
    """Rename a folder into place, unless another process was faster."""
    try:
        unfinished.rename(final)
    except OSError:
        if not final.is_dir():
            raise


def _is_whole(part: Path) -> bool:
    """Whether every file of a part is there, as long as it was written."""
    try:
        sizes = json.loads((part / _SIZES).read_bytes())
        return all((part / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        _flush(file)


def _flush(file: IO[Any]) -> None:
    """To the disk, so that a name never precedes its content."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _told_as_ours(folder: str | os.PathLike[str]) -> Iterator[None]:
    """An error of the file system, with the flag and what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--packing-token-cache {os.fspath(folder)}: {error.strerror or error}. It must be a folder that can be "
            "written to, with room for 9 bytes a token."
        ) from error
