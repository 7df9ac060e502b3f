"""Datasets that the `datasets` library wrote, and those of the hub: nothing here reaches a network."""

import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_packing.data.sources import hub, open_source
from megatron_packing.errors import ConfigError, MissingDependency

datasets = pytest.importorskip("datasets", reason="needs the extra hub")

ROWS = [
    {"text": "00123", "messages": None},
    {"text": None, "messages": [{"role": "user", "content": "4"}, {"role": "assistant", "content": None}]},
    {"text": "", "messages": None},
]
FIELDS = [{name: value for name, value in row.items() if value is not None} for row in ROWS]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    return folder


def fields(source: Any) -> list[dict[str, Any]]:
    return [source[row].fields for row in range(len(source))]


def test_a_saved_dataset_has_its_rows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "rows")
    source = open_source(folder)
    copy = pickle.loads(pickle.dumps(source))
    assert fields(source) == fields(copy) == FIELDS
    assert (source[1].path, source[1].line, source.path) == (str(folder), 2, str(folder))
    assert len(pickle.dumps(source)) < 3_000
    source[1].fields["messages"].clear()
    assert source[1].fields == FIELDS[1]
    assert open_source(folder).fingerprint == source.fingerprint == copy.fingerprint
    shutil.rmtree(folder)
    datasets.Dataset.from_list(ROWS[:1]).save_to_disk(folder)
    assert open_source(folder).fingerprint != source.fingerprint


def test_a_saved_dict_asks_for_one_of_its_splits(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"both holds the splits test, train; name one, such as .*both/test"):
        open_source(tmp_path / "both")
    assert fields(open_source(tmp_path / "both" / "train")) == FIELDS


def test_a_damaged_or_empty_dataset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "rows")
    (arrow,) = folder.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:50])
    with pytest.raises(ConfigError, match=f"{folder}: the saved dataset cannot be read"):
        open_source(folder)
    monkeypatch.setattr(hub, "download", lambda *_: datasets.Dataset.from_list(ROWS).select([]))
    with pytest.raises(ConfigError, match="hf://owner/none holds no rows"):
        open_source("hf://owner/none")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hf://owner/name", ("owner/name", None, "train")),
        ("hf://owner/name:test", ("owner/name", None, "test")),
        ("hf://owner/name/small:train[:10%]", ("owner/name", "small", "train[:10%]")),
    ],
)
def test_the_prefix_alone_leads_to_the_hub(monkeypatch: pytest.MonkeyPatch, path: str, asked: tuple[Any, ...]) -> None:
    calls = []

    def downloaded(*arguments: Any) -> Any:
        calls.append(arguments)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(hub, "download", downloaded)
    source = open_source(path)
    assert fields(source) == FIELDS
    assert (source.path, source[0].path, calls) == (path, path, [asked])
    with pytest.raises(ConfigError, match="owner/name: no such file"):
        open_source("owner/name")
    assert len(calls) == 1


def test_what_the_hub_cannot_give_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> Any:
        raise FileNotFoundError("Dataset 'owner/gone' doesn't exist on the Hub\nmore")

    monkeypatch.setattr(hub, "download", failing)
    with pytest.raises(ConfigError, match=r"hf://owner/gone cannot be loaded from the hub: .*on the Hub\. Check"):
        open_source("hf://owner/gone")
    monkeypatch.setattr(hub, "download", lambda *_: datasets.DatasetDict(a=datasets.Dataset.from_list(ROWS)))
    with pytest.raises(ConfigError, match="is a DatasetDict, not one dataset"):
        open_source("hf://owner/name")
    for path in ("hf://name", "hf://", "hf://a/b:"):
        with pytest.raises(ConfigError, match=r"is written hf://owner/name\[/config\]\[:split\]"):
            open_source(path)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "rows")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in (str(folder), "hf://owner/name"):
        with pytest.raises(MissingDependency, match=rf"datasets is needed to read {path}.*megatron-packing\[hub\]"):
            open_source(path)
