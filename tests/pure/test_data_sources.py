import io
import json
import os
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data.sources import JsonListSource, JsonlSource, index, open_source
from megatron_packing.data.sources.json_file import JsonFile
from megatron_packing.data.sources.json_list import scan_list
from megatron_packing.data.sources.lines import scan_lines
from megatron_packing.data.sources.stamp import FileStamp
from megatron_packing.errors import ConfigError, SampleError


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


LINES = st.lists(st.sampled_from(["", "  ", "\t", '{"text":"a"}', '  {"text":"bb"} ', '{"text":"' + "c" * 40 + '"}']))


STAMP = FileStamp(path="rows", size=0, mtime_ns=0, shown="rows")


def scanned(scan: Callable[..., Any], data: bytes, chunk: int) -> tuple[list[int], list[int]]:
    """(offsets, blanks) of `data`, read `chunk` bytes at a time: rows lie across reads, and reads end on a newline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "SCAN_BYTES", chunk)
        parts = list(scan(io.BytesIO(data), STAMP))
    return [int(at) for offsets, _ in parts for at in offsets], [int(n) for _, blanks in parts for n in blanks]


@settings(deadline=None)
@given(
    lines=LINES, end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans(), last=st.booleans(), chunk=st.integers(1, 64)
)
def test_rows_are_the_lines_that_are_not_blank(lines, end, bom, last, chunk):
    data = (("\ufeff" if bom else "") + end.join(lines) + (end if last else "")).encode()
    offsets, blanks = scanned(scan_lines, data, chunk)
    rows = [json.loads(data[start:stop]) for start, stop in pairwise(offsets)]
    numbers = [row + 1 + sum(before <= row for before in blanks) for row in range(len(rows))]
    assert list(zip(numbers, rows, strict=True)) == [
        (number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()
    ]


TEXT = st.text(st.sampled_from('\\"[]{},:a é\n'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    values=st.lists(VALUES, min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 1]),
    ascii_only=st.booleans(),
    around=st.sampled_from(["", " ", "\r\n\t"]),
    chunk=st.integers(1, 40),
)
def test_rows_are_the_elements_of_a_list(values, indent, ascii_only, around, chunk):
    data = (around + json.dumps(values, indent=indent, ensure_ascii=ascii_only) + around).encode()
    offsets, _ = scanned(scan_list, data, chunk)
    assert [json.loads(data[start : stop - 1]) for start, stop in pairwise(offsets)] == values


@settings(deadline=None)
@given(data=st.binary(max_size=60) | st.text(st.sampled_from('[]{},"\\a1 '), max_size=40).map(str.encode))
def test_a_list_with_damage_is_refused_or_has_a_damaged_row(tmp_path_factory, data):
    data = b"[" + data
    path = write(tmp_path_factory.getbasetemp() / f"{len(data)}.json", data)
    rows = error = None
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JsonFile, "_load", lambda self, verify: index.in_memory(self._stamp, self._KIND))
            source = JsonListSource(path)
        rows = [source[row].fields for row in range(len(source))]
    except (ConfigError, SampleError) as raised:
        error = str(raised)
    assert str(path) in error if rows is None else rows == json.loads(data)


def test_numbers_stay_exact_and_text_that_looks_like_one_stays_text(tmp_path):
    numbers = [2**63, 2**64, -(2**70), 10**40, 1.5, 0.1234567890123456789, 123456789012345678]
    row = {"numbers": numbers, "text": "1" * 30, "deep": {"id": [2**65]}}
    assert open_source(write(tmp_path / "a.jsonl", json.dumps(row)))[0].fields == row


def test_text_stays_text(tmp_path):
    source = open_source(write(tmp_path / "a.jsonl", '{"text":"00123"}\n{"text":"4"}\n{"text":"null"}'))
    assert [source[row].fields["text"] for row in range(3)] == ["00123", "4", "null"]


def test_a_broken_line_is_named_and_spares_its_neighbours(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text":"a"}\n\n{"text":\n[1]\n\x00\x00\n"s"\n{"text":"\xff"}\n{"text":"z"}')
    source = open_source(path)
    assert len(source) == 7  # a run of NUL bytes is damage, not a blank line
    assert source[6].fields == {"text": "z"}
    expected = [(1, 3, "bad_json"), (2, 4, "not_an_object"), (3, 5, "bad_json"), (4, 6, "not_an_object")]
    for row, line, reason in [*expected, (5, 7, "bad_utf8")]:
        with pytest.raises(SampleError) as caught:
            source[row]
        assert (caught.value.line, caught.value.reason) == (line, reason)
        assert str(caught.value).startswith(f"{path}:{line}: ")


def test_the_pickle_does_not_grow_with_the_rows(tmp_path):
    small = open_source(write(tmp_path / "a.jsonl", '{"text":"a"}\n'))
    large = open_source(write(tmp_path / "b.jsonl", '{"text":"a"}\n' * 20_000))
    listed = open_source(write(tmp_path / "b.json", json.dumps([{"text": "a"}] * 20_000)))
    large[5], listed[5]
    assert len(pickle.dumps(large)) <= len(pickle.dumps(small)) + 16
    assert len(pickle.dumps(listed)) < 500
    copy = pickle.loads(pickle.dumps(large))
    assert len(copy) == 20_000
    assert copy[19_999].line == 20_000


def test_a_file_that_changed_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text":"a"}\n')
    source = pickle.loads(pickle.dumps(open_source(path)))
    write(path, '{"text":"abc"}\n')
    with pytest.raises(ConfigError, match="must not change"):
        source[0]


def test_fetching_again_gives_an_equal_object_of_its_own(tmp_path):
    data = [{"text": "a", "tags": [1]}, {"text": "b", "tags": [2]}]
    for path in (
        write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, data))),
        write(tmp_path / "a.json", json.dumps(data, indent=1)),
    ):
        source = open_source(path)
        first = source[0]
        first.fields["tags"].append(9)
        assert source[1].fields == data[1]
        assert source[0].fields == data[0]


def test_a_json_list_and_json_lines_under_that_name(tmp_path):
    listed = open_source(write(tmp_path / "a.json", '\ufeff [\n{"text":"00123"},\n 5 ]'))
    assert isinstance(listed, JsonListSource)
    assert (len(listed), listed[0].line, listed[0].fields) == (2, 1, {"text": "00123"})
    with pytest.raises(SampleError, match=":2: ") as caught:
        listed[1]
    assert caught.value.reason == "not_an_object"
    assert isinstance(open_source(write(tmp_path / "b.json", '{"text":"a"}\n{"text":"b"}\n')), JsonlSource)


@pytest.mark.parametrize("name", ["gone.jsonl", "owner/gone", "gone.json", "gone.xyz"])
def test_a_missing_file_is_a_missing_file(tmp_path, name):
    with pytest.raises(ConfigError, match="no such file") as caught:
        open_source(tmp_path / name)
    assert name in str(caught.value)
    assert "hub" not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "data"), [("a.jsonl", ""), ("a.jsonl", "\ufeff\n \r\n"), ("a.json", ""), ("a.json", "[]")]
)
def test_a_file_without_rows_is_refused_by_name(tmp_path, name, data):
    path = write(tmp_path / name, data)
    with pytest.raises(ConfigError) as caught:
        open_source(path)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'\.csv'; known are \.jsonl"):
        open_source(write(tmp_path / "a.csv", "x"))
    with pytest.raises(ConfigError, match=r"no data file in this folder; it holds 1 other files, such as a\.csv"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match=r"without \.bin or \.idx"):
        open_source(write(tmp_path / "a.bin", "x"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="is a pipe or device"):
        open_source(tmp_path / "pipe.jsonl")
    for data, what in (
        (b"\xff\xfe{\x00", "UTF-16"),
        (b"\x1f\x8b\x08", r"gzip archive. Let its name end in \.gz"),
        (b"PAR1", r"\.parquet"),
    ):
        with pytest.raises(ConfigError, match=what):
            open_source(write(tmp_path / "text.jsonl", data))


@pytest.mark.parametrize(
    ("data", "place", "why"),
    [
        ('[{"a":1},\n{]', r"element 2, which begins at byte 11 \(line 2\)", "string key"),
        ('[{"a":1},{"b":"x},{"c":2}]', "element 2", "character"),
        ('[{"a":1},{"b":2}', "it ends at byte 16 within 1 open bracket", "cut short"),
        ('[{"a":1},', "it ends at byte 9", "cut short"),
        ('[{"a":1},\n\n{"b":[', r"element 2, which begins at byte 12 \(line 3\)", ""),
        ('[{"a":1}] {"b":2}', "its list ends at byte 9", "more follows"),
        ('[{"a":{"b":1}, {"c":2}]', "element 1", "expected"),
    ],
)
def test_a_list_cut_short_or_unbalanced_is_refused_with_the_place(tmp_path, data, place, why):
    with pytest.raises(ConfigError, match=f"bad.json: not valid JSON: .*({place}).*({why})"):
        open_source(write(tmp_path / "bad.json", data))
