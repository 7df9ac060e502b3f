"""Archives, Parquet, folders and patterns: the same rows as of plain JSON lines, whatever holds them."""

import errno
import gzip
import io
import json
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_packing.data.sources import cache, compressed, many, open_source, parquet
from megatron_packing.errors import ConfigError, MissingDependency, SampleError

ROWS = [{"text": "00123"}, {"messages": [{"role": "user", "content": "é\n"}]}, {"text": "4", "n": 2**63}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "_said", set())


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def fields(source: Any) -> list[dict[str, Any]]:
    return [source[row].fields for row in range(len(source))]


# --- archives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
@pytest.mark.parametrize("inner", [".jsonl", ".json", ".ndjson"])
def test_an_archive_has_the_rows_of_its_content(tmp_path: Path, pack: Callable[[bytes], bytes], inner: str) -> None:
    content = json.dumps(ROWS) if inner == ".json" else LINES
    half = len(content) // 2
    suffix = ".gz" if pack is gzip.compress else ".zst"
    data = pack(content[:half].encode()) + pack(content[half:].encode())  # as `cat a.gz b.gz` makes them
    path = write(tmp_path / "data" / f"a{inner}{suffix}", data)
    kept = tmp_path / "cache"
    source = open_source(path, cache=str(kept))
    assert fields(source) == ROWS
    assert fields(pickle.loads(pickle.dumps(source))) == ROWS
    assert (source.path, source[1].path, source[1].line) == (str(path), str(path), 2)
    assert str(path) in source.fingerprint
    assert os.listdir(path.parent) == [path.name]
    assert len(list(kept.iterdir())) == 2  # the copy and its index


def test_an_archive_is_unpacked_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(LINES.encode()))
    unpacked: list[str] = []

    def counted(file: Any, stamp: Any) -> Iterator[bytes]:
        unpacked.append(stamp.shown)
        yield from compressed._gunzipped(file, stamp)

    monkeypatch.setitem(compressed._UNPACKERS, ".gz", counted)
    for _ in range(2):
        assert fields(open_source(path)) == ROWS
    assert len(unpacked) == 1
    write(path, gzip.compress(b'{"text": "new"}\n'))
    assert fields(open_source(path)) == [{"text": "new"}]
    assert len(list(tmp_path.iterdir())) == 3  # nothing of the old copy is left
    (copy,) = tmp_path.glob("*.mpdata")
    copy.write_bytes(copy.read_bytes()[:-4])
    assert fields(open_source(path)) == [{"text": "new"}]
    assert len(unpacked) == 3
    assert f"{copy} is torn" in capsys.readouterr().err


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"not packed at all", lambda d: d[:20]])
def test_a_torn_archive_is_an_error_that_leaves_nothing(tmp_path: Path, pack: Any, damage: Any) -> None:
    suffix = ".gz" if pack is gzip.compress else ".zst"
    path = write(tmp_path / f"a.jsonl{suffix}", damage(pack(os.urandom(3_000).hex().encode())))
    with pytest.raises(ConfigError, match=f"{path} is a torn or damaged archive"):
        open_source(path)
    assert os.listdir(tmp_path) == [path.name]


def test_a_full_disk_is_an_error_that_names_the_folder_and_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "open", lambda path, mode: Full(path, "x+"), raising=False)
    path = write(tmp_path / "data" / "a.jsonl.gz", gzip.compress(LINES.encode()))
    with pytest.raises(ConfigError, match=rf"{path.parent} has no room for the unpacked {path}.*--data-cache-path"):
        open_source(path)
    assert os.listdir(path.parent) == [path.name]


# --- Parquet --------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_rows_are_plain_objects_and_text_stays_text(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "00123"}, {"role": "assistant", "content": None}]
    rows = [
        {"text": f"{row:05}", "n": row, "tags": ["4", "null"], "messages": turns if row % 2 else None}
        for row in range(25)
    ]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=4)
    source = open_source(path)
    for reader in (source, pickle.loads(pickle.dumps(source))):
        assert len(reader) == 25
        for row in (24, 0, 7, 8, 24, 3):
            expected = {name: value for name, value in rows[row].items() if value is not None}
            assert (reader[row].fields, reader[row].line) == (expected, row + 1)
    assert len(pickle.dumps(source)) < 1000
    source[0].fields["tags"].append("x")
    assert source[0].fields["tags"] == ["4", "null"]
    assert list(tmp_path.iterdir()) == [path]  # it holds its own index


def test_few_row_groups_of_all_files_together_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "x" * 100}] * 100
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", rows, row_group_size=10)
    monkeypatch.setattr(parquet, "_kept", OrderedDict())
    source = open_source(tmp_path)
    source[0]
    (one,) = parquet._kept.values()
    monkeypatch.setattr(parquet, "KEPT_BYTES", int(3.5 * one.nbytes))
    assert fields(source) == rows * 2
    assert [group for _, group in parquet._kept] == [7, 8, 9]
    source[70]
    source[170]  # another file's: the one used longest ago gives way
    assert [group for _, group in parquet._kept] == [9, 7, 7]
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    source[0]
    assert len(parquet._kept) == 1


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "a.parquet", [{"text": "x" * 50}] * 100).read_bytes()
    for name, data in (("cut", whole[:-10]), ("empty", b""), ("other", b"{}" * 50)):
        with pytest.raises(ConfigError, match=f"{name}.parquet is no whole Parquet file"):
            open_source(write(tmp_path / f"{name}.parquet", data))
    holed = open_source(write(tmp_path / "holed.parquet", whole[:4] + bytes(60) + whole[64:]))
    with pytest.raises(ConfigError, match="row group 0 is damaged"):
        holed[0]
    with pytest.raises(ConfigError, match="holds no rows"):
        open_source(write_parquet(tmp_path / "none.parquet", []))
    latin = pyarrow.array([b"ok", b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "latin.parquet")
    source = open_source(tmp_path / "latin.parquet")
    assert source[0].fields == {"text": "ok"}
    with pytest.raises(SampleError, match=r"latin\.parquet:2: its text is not UTF-8"):
        source[1]


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.json.zst")])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    path = write(tmp_path / name, zstd(LINES.encode()))
    with pytest.raises(MissingDependency, match=rf"{module} is needed to read {path}.*megatron-packing\[data\]"):
        open_source(path)


# --- folders and patterns -------------------------------------------------------------------------


def shards(folder: Path) -> Path:
    """Rows 0 to 9 in the order of the files' names, of every kind."""
    rows = [{"text": str(row)} for row in range(10)]
    lines = [json.dumps(row) + "\n" for row in rows]
    folder.mkdir(parents=True)
    write(folder / "a.jsonl", "".join(lines[:3]))
    write(folder / "b.json", json.dumps(rows[3:5]))
    write(folder / "c.jsonl.gz", gzip.compress("".join(lines[5:6]).encode()))
    write_parquet(folder / "d.parquet", rows[6:8])
    write(folder / "e.ndjson", "\n" + "".join(lines[8:]))
    return folder


@pytest.mark.parametrize("pattern", ["", "*", "[a-e].*"])
def test_the_files_of_a_folder_or_pattern_follow_each_other_by_name(tmp_path: Path, pattern: str) -> None:
    folder = shards(tmp_path / "data")
    path = str(folder / pattern) if pattern else str(folder)
    for _ in range(2):  # the second time beside what the first has left there
        source = open_source(path)
        copy = pickle.loads(pickle.dumps(source))
        for reader in (source, copy):
            assert [record["text"] for record in fields(reader)] == [str(row) for row in range(10)]
            assert reader.path == path
            assert (reader[9].path, reader[9].line) == (str(folder / "e.ndjson"), 3)
            assert (reader[-3].path, reader[-3].line) == (str(folder / "d.parquet"), 2)
        assert copy.fingerprint == source.fingerprint


def test_folders_in_folders_by_two_stars(tmp_path: Path) -> None:
    for name in ("2/a.jsonl", "1/b.jsonl", "1/a.jsonl"):
        write(tmp_path / name, json.dumps({"text": name}))
    found = fields(open_source(tmp_path / "**" / "*.jsonl"))
    assert [row["text"] for row in found] == ["1/a.jsonl", "1/b.jsonl", "2/a.jsonl"]
    with pytest.raises(ConfigError, match=r"no data file in this folder.*\*\*"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match="no such file; nothing matches"):
        open_source(tmp_path / "*.json")
    odd = write(tmp_path / "a[1].jsonl", '{"text": "odd"}')
    assert fields(open_source(odd)) == [{"text": "odd"}]


def test_what_a_folder_leaves_out_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", '{"text": "a"}')
    write(tmp_path / "README.md", "read me")
    write(tmp_path / "b.jsonl", "")
    for _ in range(2):
        assert len(open_source(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.count("1 others are left out, such as README.md") == 1
    assert said.count(f"1 of 2 files are empty (0 bytes), the first {tmp_path / 'b.jsonl'}") == 1
    write(tmp_path / "a.jsonl", "")
    with pytest.raises(ConfigError, match=f"{tmp_path}: none of its files holds a row"):
        open_source(tmp_path)


def test_damage_in_a_folder_names_the_file_and_its_line(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "a"}\n')
    bad = write(tmp_path / "b.jsonl", '{"text": "b"}\n\n{"text"\n')
    with pytest.raises(SampleError, match=f"{bad}:3: "):
        open_source(tmp_path)[2]


def test_a_thousand_shards_need_few_open_files_and_a_small_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        write(tmp_path / f"{number:03}.jsonl", f'{{"n": {number}}}\n')
    monkeypatch.setattr(many, "FILES_OPEN", 5)
    before = len(os.listdir("/proc/self/fd"))
    source = open_source(tmp_path)
    assert [row["n"] for row in fields(source)] == list(range(60))
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 5
    assert len(pickle.dumps(source)) < 1000
    copy = pickle.loads(pickle.dumps(source))
    write(tmp_path / "999.jsonl", '{"n": 60}\n')
    with pytest.raises(ConfigError, match="must not change"):
        copy[0]
