"""How are datasets of the Hugging Face hub read, and those that `save_to_disk` wrote? Through the `datasets` library.

Only a path that begins with `hf://` is looked for on the hub, so that a mistyped file is never taken for one. The
library keeps downloads in its own cache ($HF_HOME) and maps them. Cost: the download, once; a row's copy after that.
"""

import os
import re
from pathlib import Path
from typing import Any

from megatron_packing.data.sources.optional import needed
from megatron_packing.data.sources.record import Record, checked_row
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError

HUB_PREFIX = "hf://"
_DEFAULT_SPLIT = "train"
_HUB_PATH = re.compile(r"hf://(?P<name>[^/:\s]+/[^/:\s]+)(?:/(?P<config>[^:\s]+))?(?::(?P<split>.+))?")

_SAVED = ("dataset_info.json", "state.json")
_SAVED_DICT = "dataset_dict.json"


def is_saved_dataset(folder: str) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    names = set(os.listdir(folder))
    return names.issuperset(_SAVED) or _SAVED_DICT in names


class ArrowSource:
    """The rows of a dataset of the `datasets` library, as plain Python objects.

    A column without a value in a row is absent from the row's fields, as it would be in JSON; images and the like are
    not decoded. Pickles to the names of the files that it maps.

    Args:
        path: how the user named it.
        dataset: a `datasets.Dataset`.
        fingerprint: what its rows depend on.

    Raises:
        ConfigError: it has no row.
    """

    def __init__(self, path: str, dataset: Any, fingerprint: str) -> None:
        if not isinstance(dataset, _library(path).Dataset):
            raise ConfigError(f"{path} is a {type(dataset).__name__}, not one dataset whose rows have numbers.")
        self._path, self._fingerprint = path, fingerprint
        self._table = dataset.with_format("arrow")
        if len(self) == 0:
            raise ConfigError(f"{path} holds no rows. Training needs at least one row.")

    @property
    def path(self) -> str:
        """The dataset, as the user named it."""
        return self._path

    @property
    def fingerprint(self) -> str:
        """What the rows depend on."""
        return self._fingerprint

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> Record:
        """Row `row`, counted from 0."""
        row = checked_row(row, len(self))
        (fields,) = self._table[row].to_pylist()
        return Record(self._path, row + 1, {name: value for name, value in fields.items() if value is not None})


def open_saved(folder: str) -> ArrowSource:
    """The dataset that `save_to_disk` wrote to `folder`.

    Raises:
        ConfigError: it is damaged or empty, or holds several splits.
        MissingDependency: datasets.
    """
    datasets = _library(folder)
    if (Path(folder) / _SAVED_DICT).exists():
        splits = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        raise ConfigError(
            f"{folder} holds the splits {', '.join(splits) or '(none)'}; name one, such as "
            f"{os.path.join(folder, (splits or [_DEFAULT_SPLIT])[0])}."
        )
    try:
        dataset = datasets.load_from_disk(folder)
    except Exception as error:  # the library lets through whatever JSON and Arrow raise
        raise ConfigError(f"{folder}: the saved dataset cannot be read: {_first_line(error)}") from error
    stamps = [FileStamp.of(file["filename"]).fingerprint for file in dataset.cache_files]
    return ArrowSource(folder, dataset, ":".join(["arrow1", str(dataset._fingerprint), *stamps]))


def open_hub(path: str) -> ArrowSource:
    """The dataset of the hub that `hf://owner/name[/config][:split]` names; without a split, "train".

    Raises:
        ConfigError: the path has another form, or the hub has no such dataset or cannot be reached.
        MissingDependency: datasets.
    """
    named = _HUB_PATH.fullmatch(path)
    if named is None:
        raise ConfigError(f"{path}: a dataset of the hub is written hf://owner/name[/config][:split].")
    _library(path)
    try:
        dataset = download(named["name"], named["config"], named["split"] or _DEFAULT_SPLIT)
    except Exception as error:  # the library and the network raise what they like
        raise ConfigError(
            f"{path} cannot be loaded from the hub: {_first_line(error)} Check the name, the configuration and the "
            "split; where there is no network, download it before (HF_HUB_OFFLINE=1 then reads the local copy)."
        ) from error
    return ArrowSource(path, dataset, f"arrow1:{path}:{getattr(dataset, '_fingerprint', '')}")


def download(name: str, config: str | None, split: str) -> Any:
    """One split of a dataset of the hub; from the library's cache once it is there."""
    return _library(name).load_dataset(name, config, split=split)


def _library(path: str) -> Any:
    return needed("datasets", extra="hub", to=f"to read {path}")


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."
