"""Which source reads this path? Chosen by what it is and how it ends."""

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from megatron_packing.data.sources import index
from megatron_packing.data.sources.cache import OWN_SUFFIXES, say_once
from megatron_packing.data.sources.compressed import PACKED_SUFFIXES, packed_name, unpacked
from megatron_packing.data.sources.hub import HUB_PREFIX, is_saved_dataset, open_hub, open_saved
from megatron_packing.data.sources.json_list import JsonListSource
from megatron_packing.data.sources.lines import BOM, JsonlSource
from megatron_packing.data.sources.many import ManySource
from megatron_packing.data.sources.parquet import ParquetSource
from megatron_packing.data.sources.record import FileSource, Source
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError


class _Reader(Protocol):
    def __call__(
        self, path: str | os.PathLike[str], cache: str | None = None, *, origin: FileStamp | None = None
    ) -> FileSource: ...


def _open_json(
    path: str | os.PathLike[str], cache: str | None = None, *, origin: FileStamp | None = None
) -> FileSource:
    """A `.json` file is a list, or, as many exporters name it, JSON lines."""
    FileStamp.of(path)
    with open(path, "rb") as file:
        head = file.read(index.SCAN_BYTES).removeprefix(BOM).lstrip()
    reader: _Reader = JsonListSource if head.startswith(b"[") else JsonlSource
    return reader(path, cache, origin=origin)


_JSON_READERS: dict[str, _Reader] = {".jsonl": JsonlSource, ".ndjson": JsonlSource, ".json": _open_json}
_OTHER_READERS: dict[str, Callable[[str, str | None], FileSource]] = {".parquet": ParquetSource}

KNOWN_FILES = (
    f"{', '.join(_JSON_READERS)}, each also as {' or '.join(PACKED_SUFFIXES)}, and {', '.join(_OTHER_READERS)}"
)
"""The endings that can be read, in words."""

_TOKENIZED = (".bin", ".idx")


def open_source(path: str | os.PathLike[str], cache: str | None = None) -> Source:
    """The source that reads `path`.

    Args:
        path: a file, a folder of files, or a glob pattern (`**` for folders in folders); the rows of several files
            follow each other in the order of their names. Or a folder that `save_to_disk` of the `datasets` library
            wrote, or, on the Hugging Face hub, `hf://owner/name[/config][:split]`.
        cache: where to keep what took long to find out about a file (`--data-cache-path`); None: beside it.

    Raises:
        ConfigError: no such file, nothing in it, an ending that no source reads, or damage.
        MissingDependency: a library that this kind of file needs.
    """
    path = os.fspath(path)
    if path.startswith(HUB_PREFIX):
        return open_hub(path)
    if os.path.isdir(path) and is_saved_dataset(path):
        return open_saved(path)
    if os.path.isdir(path):
        return ManySource(path, files_in_folder, open_file, cache)
    if glob.has_magic(path) and not os.path.exists(path):
        return ManySource(path, files_of_pattern, open_file, cache)
    return open_file(path, cache)


def open_file(path: str, cache: str | None) -> FileSource:
    """The source that reads one file, chosen by its ending; see `open_source`."""
    stamp = FileStamp.of(path)  # a mistyped name is a missing file first, whatever its suffix
    content = packed_name(path)
    suffix = Path(content or path).suffix.lower()
    if suffix in _JSON_READERS:
        if content is None:
            return _JSON_READERS[suffix](path, cache)
        return _JSON_READERS[suffix](unpacked(stamp, cache), origin=stamp)
    if content is None and suffix in _OTHER_READERS:
        return _OTHER_READERS[suffix](path, cache)
    hint = "Convert the file, or rename it."
    if suffix in _TOKENIZED:
        hint = "Of tokenized documents, give the name without .bin or .idx, as Megatron takes it."
    raise ConfigError(f"{path} ends in {''.join(Path(path).suffixes[-2:])!r}; known are {KNOWN_FILES}. {hint}")


def files_in_folder(folder: str) -> Sequence[str]:
    """The data files of a folder, sorted by name; not those of folders in it.

    Raises:
        ConfigError: there is none.
    """
    try:
        entries = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}.") from error
    entries = [name for name in entries if not name.startswith(".") and not name.endswith(OWN_SUFFIXES)]
    files = [os.path.join(folder, name) for name in entries if _is_known(name)]
    others = [name for name in entries if not _is_known(name)]
    if not files:
        found = f"; it holds {len(others):,} other files, such as {others[0]}" if others else ""
        raise ConfigError(
            f"{folder}: no data file in this folder{found}. Known are {KNOWN_FILES}. For files in folders in it, give "
            f"a pattern such as '{os.path.join(folder, '**', '*.jsonl')}'."
        )
    if others:
        say_once(f"{folder}: {len(files):,} data files; {len(others):,} others are left out, such as {others[0]}")
    return files


def files_of_pattern(pattern: str) -> Sequence[str]:
    """The files that a glob pattern names, sorted.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    found = [name for name in found if not name.endswith(OWN_SUFFIXES)]
    if not found:
        raise ConfigError(f"{pattern}: no such file; nothing matches this pattern. Check the path given as data.")
    return found


def _is_known(name: str) -> bool:
    content = packed_name(name)
    suffix = Path(content or name).suffix.lower()
    return suffix in _JSON_READERS or (content is None and suffix in _OTHER_READERS)
