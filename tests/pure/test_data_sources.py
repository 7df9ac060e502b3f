import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_packing.data import sources
from megatron_packing.data.sources import JsonListSource, JsonlSource, open_source
from megatron_packing.errors import ConfigError, SampleError


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


LINES = st.lists(st.sampled_from(["", "  ", "\t", '{"text":"a"}', '  {"text":"bb"} ', '{"text":"' + "c" * 40 + '"}']))


@given(
    lines=LINES, end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans(), last=st.booleans(), chunk=st.integers(1, 64)
)
def test_rows_are_the_lines_that_are_not_blank(tmp_path_factory, lines, end, bom, last, chunk):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    write(path, ("\ufeff" if bom else "") + end.join(lines) + (end if last else ""))
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SCAN_BYTES", chunk)  # lines that lie across two reads, and reads that end on a newline
        if not expected:
            with pytest.raises(ConfigError, match=r"rows\.jsonl"):
                JsonlSource(path)
            return
        source = JsonlSource(path)
        again = pickle.loads(pickle.dumps(source))
        for reader in (source, again):
            assert len(reader) == len(expected)
            assert [(row.line, row.fields) for row in map(reader.__getitem__, range(len(reader)))] == expected
    assert source[-1] == source[len(source) - 1]
    with pytest.raises(IndexError):
        source[len(source)]


def test_text_stays_text(tmp_path):
    source = open_source(write(tmp_path / "a.jsonl", '{"text":"00123"}\n{"text":"4"}\n{"text":"null"}'))
    assert [source[row].fields["text"] for row in range(3)] == ["00123", "4", "null"]


def test_a_broken_line_is_named_and_spares_its_neighbours(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text":"a"}\n\n{"text":\n[1]\n\x00\x00\n"s"\n{"text":"\xff"}\n{"text":"z"}')
    source = open_source(path)
    assert len(source) == 7  # a run of NUL bytes is damage, not a blank line
    assert source[6].fields == {"text": "z"}
    expected = [(1, 3, "bad_json"), (2, 4, "not_an_object"), (3, 5, "bad_json"), (4, 6, "not_an_object")]
    for row, line, reason in [*expected, (5, 7, "bad_json")]:
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


def test_what_cannot_be_read_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"'\.csv'; known are \.jsonl"):
        open_source(write(tmp_path / "a.csv", "x"))
    with pytest.raises(ConfigError, match="directory"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match=r"bad\.json:2: not valid JSON"):
        open_source(write(tmp_path / "bad.json", '[{"text":"a"},\n{]'))
    monkeypatch.setattr(sources, "JSON_LIST_LIMIT_BYTES", 5)
    with pytest.raises(ConfigError, match="JSON lines"):
        open_source(write(tmp_path / "large.json", '[{"text":"a"}]'))
