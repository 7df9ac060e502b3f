"""Do several ranks that look at parts of a file find what one would, and does each say the same?"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data import Encoder, JsonlSource, Survey, survey
from megatron_packing.data.survey import ENCODED_ROWS, EXAMPLES, describe_losses, merged, share_of_rows
from megatron_packing.errors import SampleError
from tests.pure.data_toys import EncodedRows, Toy

GOOD, EMPTY = '{"text": "1 2 3"}', '{"text": ""}'
FAULTY_TO_READ = ('{"text": 5}', "{", "[1]")
FAULTY = (*FAULTY_TO_READ, '{"text": "1 2 3 4 5 6"}', '{"text": "1 x"}')


def shown(seen: Survey) -> dict[str, object]:
    """Everything in a survey, as plain values."""
    return json.loads(seen.to_json())


def rows_of(path: Path, lines: list[str], overlong: str = "error") -> EncodedRows:
    path.write_text("\n".join(lines) + "\n")
    return EncodedRows(source=JsonlSource(path), encoder=Encoder(Toy(), 4, overlong))


@given(
    lines=st.lists(st.sampled_from((GOOD, EMPTY, *FAULTY)), min_size=1, max_size=40),
    ranks=st.integers(1, 7),
    encoded=st.integers(0, 20),
    most=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_ranks_together_find_what_one_finds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ranks: int, encoded: int, most: int
) -> None:
    rows = rows_of(tmp_path_factory.mktemp("survey") / "rows.jsonl", lines)
    encode, read = share_of_rows(len(rows), most=most, encode=encoded)
    assert [*encode, *read] == list(range(min(len(lines), max(encoded, most))))
    shares = [share_of_rows(len(rows), most=most, encode=encoded, rank=rank, ranks=ranks) for rank in range(ranks)]
    alone = survey(rows, encode=encode, read=read)
    parts = [survey(rows, encode=part) for part, _ in shares]
    parts += [survey(rows, encode=range(0), read=part) for _, part in shares]
    together = merged([Survey.from_json(part.to_json()) for part in parts])
    assert shown(together) == shown(alone)
    # The first bad row is the first in the file, whoever found it.
    fault = together.first_error
    faulty = [i for i in [*encode, *read] if lines[i] in (FAULTY if i in encode else FAULTY_TO_READ)]
    assert (fault.line - 1 if fault else None) == (faulty[0] if faulty else None)


def test_a_bad_row_that_was_only_read_is_told(tmp_path: Path) -> None:
    lines = [GOOD] * 9_999
    lines[8_999:9_003] = ['{"text": 5}', "{", "{", "{"]
    rows = rows_of(tmp_path / "rows.jsonl", lines)
    encode, read = share_of_rows(len(rows), most=100_000)
    assert (len(encode), len(read)) == (ENCODED_ROWS, 8_999)
    seen = survey(rows, encode=encode, read=read)
    assert (seen.rows, seen.rows_read, seen.samples) == (1_000, 8_999, 1_000)
    with pytest.raises(SampleError, match=r"rows\.jsonl:9000: field 'text' is 5"):
        seen.check()
    seen.check(bad_rows="skip")
    assert seen.skipped == {"bad_content": 1, "bad_json": 3}


def test_each_reason_has_its_first_three_rows(tmp_path: Path) -> None:
    lines = ["{", '{"text": ""}', "{", "{", "{", '{"text": "1 2 3 4 5 6"}', "{"]
    seen = survey(rows_of(tmp_path / "rows.jsonl", lines, overlong="drop"))
    assert seen.skipped == {"bad_json": 5, "empty": 1, "overlong": 1}
    where = [text.partition(": ")[0].rpartition(":")[2] for text in seen.examples["bad_json"]]
    assert where == ["1", "3", "4"]
    assert len(where) == EXAMPLES
    assert seen.examples["empty"] == [f"{tmp_path / 'rows.jsonl'}:2: says nothing"]
    table = describe_losses(seen.skipped, seen.examples)
    assert len(table) == 5
    assert table[0].split()[:2] == ["bad_json", "5"]
    assert table[3].split()[:2] == ["empty", "1"]
