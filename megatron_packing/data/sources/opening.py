"""Which source reads this path? Chosen by what it is and how it ends."""

import os
from collections.abc import Callable
from pathlib import Path

from megatron_packing.data.sources import index
from megatron_packing.data.sources.json_list import JsonListSource
from megatron_packing.data.sources.lines import BOM, JsonlSource
from megatron_packing.data.sources.record import Source
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError


def _open_json(path: str, cache: str | None) -> Source:
    """A `.json` file is a list, or, as many exporters name it, JSON lines."""
    FileStamp.of(path)
    with open(path, "rb") as file:
        head = file.read(index.SCAN_BYTES).removeprefix(BOM).lstrip()
    return JsonListSource(path, cache) if head.startswith(b"[") else JsonlSource(path, cache)


_OPENERS: dict[str, Callable[[str, str | None], Source]] = {
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".json": _open_json,
}


def open_source(path: str | os.PathLike[str], cache: str | None = None) -> Source:
    """The source that reads `path`.

    Args:
        path: a file.
        cache: where to keep what took long to find out about it (`--data-cache-path`); None: beside it.

    Raises:
        ConfigError: no such file, nothing in it, or a suffix that no source reads.
    """
    path = os.fspath(path)
    FileStamp.of(path)  # a mistyped name is a missing file first, whatever its suffix
    suffix = Path(path).suffix.lower()
    if suffix not in _OPENERS:
        raise ConfigError(
            f"{path} ends in {suffix!r}; known are {', '.join(_OPENERS)}. Convert the file, or rename it."
        )
    return _OPENERS[suffix](path, cache)
