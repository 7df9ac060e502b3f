"""Do several ranks that look at parts of a file find what one would, and does each say the same?"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data import Encoder, JsonlSource, Survey, open_source, survey
from megatron_packing.data.survey import (
    ENCODED_ROWS,
    EXAMPLES,
    READ_ROWS,
    Stretch,
    describe_losses,
    first_rows,
    merged,
    share_of_rank,
)
from megatron_packing.errors import SampleError
from tests.pure.data_toys import EncodedRows, Toy

GOOD, EMPTY = '{"text": "1 2 3"}', '{"text": ""}'
FAULTY_TO_READ = ('{"text": 5}', "{", "[1]")
FAULTY = (*FAULTY_TO_READ, '{"text": "1 2 3 4 5 6"}', '{"text": "1 x"}')


def rows_of(path: Path, lines: list[str], overlong: str = "error") -> EncodedRows:
    path.write_text("\n".join(lines) + "\n")
    return EncodedRows(source=JsonlSource(path), encoder=Encoder(Toy(), 4, overlong))


@given(
    files=st.lists(st.lists(st.sampled_from((GOOD, EMPTY, *FAULTY)), min_size=1, max_size=20), min_size=1, max_size=4),
    ranks=st.integers(1, 7),
    encode=st.integers(0, 20),
    most=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_ranks_together_find_what_one_finds(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], ranks: int, encode: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("survey")
    for place, lines in enumerate(files):
        (folder / f"{place}.jsonl").write_text("\n".join(lines) + "\n")
    rows = EncodedRows(source=open_source(folder), encoder=Encoder(Toy(), 4))
    look_at = first_rows(rows.starts, encode=encode, most=most)
    shares = [share_of_rank(look_at, rank, ranks) for rank in range(ranks)]
    assert flat(itertools.chain.from_iterable(shares)) == flat(look_at)
    alone = survey(rows, look_at)
    together = merged([Survey.from_json(survey(rows, share).to_json()) for share in shares])
    assert json.loads(together.to_json()) == json.loads(alone.to_json())
    # The first bad row is the first in the order of files and lines, whoever found it.
    lines = list(itertools.chain.from_iterable(files))
    faulty = [row for row, encoded in flat(look_at) if lines[row] in (FAULTY if encoded else FAULTY_TO_READ)]
    fault = together.first_error
    found = None if fault is None else (Path(fault.path).stem, fault.line)
    places = [(str(place), line) for place, of_file in enumerate(files) for line in range(1, len(of_file) + 1)]
    assert found == (places[faulty[0]] if faulty else None)


def flat(stretches: Iterable[Stretch]) -> list[tuple[int, bool]]:
    return [(row, stretch.encoded) for stretch in stretches for row in stretch.rows]


@given(files=st.lists(st.integers(1, 3_000), min_size=1, max_size=30), ranks=st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_every_file_is_looked_at_and_ranks_share_the_work(files: list[int], ranks: int) -> None:
    starts = [0, *itertools.accumulate(files)]
    look_at = first_rows(starts)
    rows = [row for row, _ in flat(look_at)]
    assert rows == sorted(set(rows))
    encoded = {row for row, how in flat(look_at) if how}
    assert set(starts[:-1]) <= encoded
    assert len(encoded) <= max(ENCODED_ROWS, len(files))
    assert len(rows) <= READ_ROWS
    work = [sum(20 if how else 1 for _, how in flat(share_of_rank(look_at, rank, ranks))) for rank in range(ranks)]
    assert max(work) - min(work) <= 2 * 20


def test_a_bad_row_that_was_only_read_is_told(tmp_path: Path) -> None:
    lines = [GOOD] * 9_999
    lines[8_999:9_003] = ['{"text": 5}', "{", "{", "{"]
    rows = rows_of(tmp_path / "rows.jsonl", lines)
    seen = survey(rows, first_rows(rows.starts))
    assert (seen.rows, seen.rows_read, seen.samples) == (1_000, 8_999, 1_000)
    with pytest.raises(SampleError, match=r"rows\.jsonl:9000: field 'text' is 5"):
        seen.check()
    seen.check(bad_rows="skip")
    assert seen.skipped == {"bad_content": 1, "bad_json": 3}


def test_each_reason_has_its_first_three_rows(tmp_path: Path) -> None:
    lines = ["{", '{"text": ""}', "{", "{", "{", '{"text": "1 2 3 4 5 6"}', "{"]
    rows = rows_of(tmp_path / "rows.jsonl", lines, overlong="drop")
    seen = survey(rows, first_rows(rows.starts))
    assert seen.skipped == {"bad_json": 5, "empty": 1, "overlong": 1}
    where = [text.partition(": ")[0].rpartition(":")[2] for text in seen.examples["bad_json"]]
    assert where == ["1", "3", "4"]
    assert len(where) == EXAMPLES
    assert seen.examples["empty"] == [f"{tmp_path / 'rows.jsonl'}:2: says nothing"]
    table = describe_losses(seen.skipped, seen.examples)
    assert len(table) == 5
    assert table[0].split()[:2] == ["bad_json", "5"]
    assert table[3].split()[:2] == ["empty", "1"]
