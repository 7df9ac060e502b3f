"""The index of a file's rows: built once, whole or absent, never used when stale or torn, and small in memory."""

import errno
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_packing.data import progress
from megatron_packing.data.sources import cache, index, open_source
from megatron_packing.data.sources.lines import JsonlSource, scan_lines
from megatron_packing.errors import ConfigError

ROOT = Path(__file__).parents[2]
SUFFIX = ".lines.mpidx"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "_said", set())
    monkeypatch.setattr(cache, "_swept", set())


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read to find their rows."""
    seen: list[str] = []

    def counted(file: Any, stamp: Any) -> Iterator[Any]:
        seen.append(Path(stamp.path).name)
        yield from scan_lines(file, stamp)

    kind = index.IndexKind(name="lines", version=1, scan=counted)
    monkeypatch.setattr(JsonlSource, "_KIND", kind)
    return seen


def rows_file(folder: Path, rows: int = 3, name: str = "a.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(f'{{"text": "{row}"}}\n' for row in range(rows)))
    return path


def texts(path: Path, **options: Any) -> list[str]:
    source = open_source(path, **options)
    return [source[row].fields["text"] for row in range(len(source))]


def test_it_is_built_once_and_stands_beside_the_file(tmp_path: Path, scans: list[str]) -> None:
    path = rows_file(tmp_path / "data")
    for _ in range(3):
        assert texts(path) == ["0", "1", "2"]
    copy = pickle.loads(pickle.dumps(open_source(path)))
    assert copy[2].fields == {"text": "2"}
    assert scans == ["a.jsonl"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.jsonl", f"a.jsonl{SUFFIX}"]


def test_a_cache_path_keeps_files_of_one_name_apart(tmp_path: Path, scans: list[str]) -> None:
    here, there = rows_file(tmp_path / "here", 2), rows_file(tmp_path / "there", 3)
    kept = tmp_path / "not" / "yet"
    for _ in range(2):
        assert len(texts(here, cache=str(kept))) == 2
        assert len(texts(there, cache=str(kept))) == 3
    assert len(scans) == 2
    assert len(list(kept.iterdir())) == 2
    assert [file.name for file in here.parent.iterdir()] == ["a.jsonl"]


def test_a_stale_index_is_built_anew(tmp_path: Path, scans: list[str]) -> None:
    path = rows_file(tmp_path / "data")
    texts(path)
    path.write_text('{"text": "x"}\n{"text": "longer"}\n')
    assert texts(path) == ["x", "longer"]
    path.write_text('{"text": "yy"}\n{"text": "short"}\n')  # as long as before, and at once
    assert texts(path) == ["yy", "short"]
    stamp = path.stat()
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    texts(path)
    assert len(scans) == 4


def test_a_file_just_written_gets_time_so_that_a_later_write_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_file(tmp_path / "data")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for age_ns, pauses in ((-1_000_000_000, 1), (1_000_000_000, 0)):
        os.utime(path, ns=(time.time_ns() - age_ns,) * 2)
        slept.clear()
        open_source(path)
        assert len(slept) == pauses


def _cut(data: bytes) -> bytes:
    return data[:-8]


def _emptied(data: bytes) -> bytes:
    return b""


def _zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def _one_offset_changed(data: bytes) -> bytes:
    return data[:136] + bytes([data[136] ^ 1]) + data[137:]


def _of_another_size(data: bytes) -> bytes:
    return data[:30] + bytes([data[30] ^ 1]) + data[31:]


@pytest.mark.parametrize("tear", [_cut, _emptied, _zeroed, _one_offset_changed, _of_another_size])
def test_a_torn_index_is_not_used(
    tmp_path: Path, scans: list[str], capsys: pytest.CaptureFixture[str], tear: Any
) -> None:
    path = rows_file(tmp_path / "data")
    texts(path)
    kept = path.with_name(path.name + SUFFIX)
    kept.write_bytes(tear(kept.read_bytes()))
    for _ in range(2):
        assert texts(path) == ["0", "1", "2"]
    assert len(scans) == 2
    assert capsys.readouterr().err.count(f"{kept} is torn") == 1


def test_nothing_is_left_of_a_build_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows_file(tmp_path / "data")

    def failing(file: Any, stamp: Any) -> Iterator[Any]:
        yield from list(scan_lines(file, stamp))[:1]
        raise KeyboardInterrupt

    monkeypatch.setattr(JsonlSource, "_KIND", index.IndexKind(name="lines", version=1, scan=failing))
    with pytest.raises(KeyboardInterrupt):
        open_source(path)
    assert [file.name for file in path.parent.iterdir()] == ["a.jsonl"]


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "data")
    old, fresh, other = (
        path.with_name(name) for name in (f"b.jsonl{SUFFIX}.1-aa.part", f"c.jsonl{SUFFIX}.2-bb.part", "somebodys.part")
    )
    for left in (old, fresh, other):
        left.write_bytes(b"half")
    for left in (old, other):
        os.utime(left, (time.time() - 2 * 24 * 3600,) * 2)
    open_source(path)
    assert [left.exists() for left in (old, fresh, other)] == [False, True, True]


def test_a_file_written_to_while_it_is_indexed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows_file(tmp_path / "data")

    def growing(file: Any, stamp: Any) -> Iterator[Any]:
        yield from scan_lines(file, stamp)
        with path.open("a") as more:
            more.write('{"text": "late"}\n')

    monkeypatch.setattr(JsonlSource, "_KIND", index.IndexKind(name="lines", version=1, scan=growing))
    with pytest.raises(ConfigError, match="must not change"):
        open_source(path)
    assert not path.with_name(path.name + SUFFIX).exists()


def _refuse(monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, ...], code: int) -> None:
    """Files cannot be made in `folders`; permissions would not do, as root may write anywhere."""
    real = open

    def refusing(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "x" in mode and any(folder in Path(path).parents for folder in folders):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, mode, *args, **options)

    monkeypatch.setattr(cache, "open", refusing, raising=False)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_where_the_folder_cannot_be_written_the_users_cache_serves(
    tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    path = rows_file(tmp_path / "data")
    _refuse(monkeypatch, (path.parent,), code)
    for _ in range(2):
        assert texts(path) == ["0", "1", "2"]
    assert len(scans) == 1
    (kept,) = (tmp_path / "home" / "megatron_packing").iterdir()
    assert capsys.readouterr().err.count(str(kept)) == 1


def test_a_folder_that_is_to_stay_as_it_is_is_left_alone_by_root_too(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "data")
    path.parent.chmod(0o555)
    try:
        assert texts(path) == ["0", "1", "2"]
        assert os.listdir(path.parent) == ["a.jsonl"]
    finally:
        path.parent.chmod(0o755)


def test_where_nothing_can_be_written_memory_serves(
    tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows_file(tmp_path / "data")
    _refuse(monkeypatch, (tmp_path,), errno.EROFS)
    source = open_source(path, cache=str(tmp_path / "cache"))
    assert source[2].fields == {"text": "2"}
    assert pickle.loads(pickle.dumps(source))[1].fields == {"text": "1"}
    assert len(scans) == 2
    assert capsys.readouterr().err.count("--data-cache-path") == 1


def _open_and_read(path: Path, start: Any) -> None:
    start.wait()
    assert texts(path)[-1] == "4999"


def test_any_number_of_processes_may_build_at_once(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "data", 5_000)
    context = multiprocessing.get_context("fork")
    start = context.Event()
    builders = [context.Process(target=_open_and_read, args=(path, start)) for _ in range(4)]
    for builder in builders:
        builder.start()
    start.set()
    for builder in builders:
        builder.join(30)
    assert [builder.exitcode for builder in builders] == [0] * 4
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.jsonl", f"a.jsonl{SUFFIX}"]


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_shows_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    path = rows_file(tmp_path / "data", 1_000)
    monkeypatch.setattr(progress, "_WORTH_A_BAR_BYTES", 100)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(index, "SCAN_BYTES", 4_000)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert len(open_source(path)) == 1_000
    said = capsys.readouterr().err
    assert ("indexing a.jsonl" if terminal else f"megatron_packing: indexing {path}: ") in said
    assert len(open_source(path)) == 1_000  # nothing to build, nothing to show
    assert capsys.readouterr().err == ""


def test_the_fingerprint_changes_with_the_file_and_only_then(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "data")
    first = open_source(path).fingerprint
    assert open_source(path, cache=str(tmp_path / "cache")).fingerprint == first
    assert str(path) in first
    rows_file(tmp_path / "data", 4)
    assert open_source(path).fingerprint != first


# Prints the growth of the resident set, in bytes, and the size of the pickle.
_MEASURE = """
import json, pickle, resource, sys
import numpy, orjson
from megatron_packing.data.sources import open_source
path = sys.argv[1]
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
source = open_source(path)
rows = len(source)
for row in range(0, rows, 7):
    source[row]
assert [source[row].fields["row"] for row in (0, rows // 2, rows - 1)] == [0, rows // 2, rows - 1]
assert source[rows // 2].line == rows // 2 + 1
print(json.dumps({"rows": rows, "grown": peak() - before, "pickle": len(pickle.dumps(source))}))
"""


@pytest.mark.parametrize("name", ["large.jsonl", "large.json"])
def test_a_large_file_is_not_held_in_memory(tmp_path: Path, name: str) -> None:
    """D7 at 100,000 rows; scripts/bench_data.py measures it at a million."""
    path = tmp_path / name
    lines = [json.dumps({"row": row, "text": "x" * 500}) for row in range(100_000)]
    path.write_text("\n".join(lines) if name.endswith("l") else f"[{',\n'.join(lines)}]")
    measured = {}
    for when in ("built", "opened"):
        found = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stderr
        measured[when] = json.loads(found.stdout)
    assert path.stat().st_size > 50e6
    for figures in measured.values():
        assert figures["rows"] == 100_000
        assert figures["grown"] < 15e6
        assert figures["pickle"] < 1_000
