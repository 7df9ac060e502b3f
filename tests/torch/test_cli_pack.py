"""Does `megatron-packing pack` write packs of the rows that training would see?"""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from megatron_packing.cli.main import app
from megatron_packing.schedule.pack_file import PackFile, PackRules

LENGTHS = [2 + 7 * i % 30 for i in range(200)]
EMPTY = (0, 17, 18)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A text of n numbers is a sample of n tokens: the EOS behind it is its last label."""
    texts = ["" if row in EMPTY else " ".join(["1"] * length) for row, length in enumerate(LENGTHS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(data: Path, *words: object) -> Result:
    usual = ["--data", data, "--tokenizer", "null:9", "--seq-length", 32, "--out", data.with_name("packs.idx")]
    return CliRunner().invoke(app, ["pack", *map(str, usual), *map(str, words)])


def refused(data: Path, *words: object) -> str:
    result = run(data, *words)
    assert (result.exit_code, result.stdout, data.with_name("packs.idx").exists()) == (2, "", False)
    return result.stderr


def test_packs_of_a_data_file_are_those_of_its_rows(data: Path) -> None:
    result = run(data, "--json", "--max-seqlen-per-dp-cp-rank", 32, "--cp", 2, "--max-seqs", 6)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    packs = PackFile(data.with_name("packs.idx"))
    assert packs.rules == PackRules(capacity=64, alignment=4, max_seqs=6)
    listed = [packs[number] for number in range(len(packs))]
    assert sorted(np.concatenate(listed).tolist()) == [row for row in range(200) if row not in EMPTY]
    assert [pack[0] for pack in listed] == sorted(pack[0] for pack in listed)
    padded = -(-np.array(LENGTHS) // 4) * 4
    assert all(padded[pack].sum() <= 64 and len(pack) <= 6 for pack in listed)
    real = sum(length for row, length in enumerate(LENGTHS) if row not in EMPTY)
    assert {name: figures[name] for name in ("rows", "samples", "skipped", "truncated", "packs", "fill")} == {
        "rows": 200,
        "samples": 197,
        "skipped": {"empty": 3},
        "truncated": 0,
        "packs": len(packs),
        "fill": real / (64 * len(packs)),
    }
    assert figures["packs_lower_bound"] <= len(packs) <= figures["packs_lower_bound"] + 1


def test_known_lengths_spare_the_tokenizing_and_give_the_same_file(data: Path, tmp_path: Path) -> None:
    out = data.with_name("packs.idx")
    lines = data.read_text().splitlines()
    data.write_text("\n".join(line for line in lines if line != '{"text": ""}'))
    assert run(data, "--packing-overlong", "truncate").exit_code == 0
    tokenized = out.read_bytes()
    out.unlink()
    lengths = [length for row, length in enumerate(LENGTHS) if row not in EMPTY]
    listed = tmp_path / "lengths.json"
    listed.write_text(json.dumps(lengths))
    result = run(data, "--packing-overlong", "truncate", "--lengths", listed)
    assert result.exit_code == 0, result.output
    assert out.read_bytes() == tokenized
    out.unlink()
    for wrong, words in (
        (lengths[:-1], "holds 196 lengths; "),
        ([*lengths[:4], 31, *lengths[5:]], "length 4, counted from 0, is 31; that row of"),
        ({"5": 197}, "counts by length"),
    ):
        listed.write_text(json.dumps(wrong))
        assert words in refused(data, "--packing-overlong", "truncate", "--lengths", listed)


def test_lengths_beyond_the_rows_looked_at_must_fit_too(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "1 2"}\n' * 600)
    listed = tmp_path / "lengths.txt"
    listed.write_text("2\n" * 550 + "33\n" + "2\n" * 49)
    assert "row 551 of" in refused(data, "--lengths", listed)


def test_the_table_says_what_was_left_out_and_passed_over(data: Path) -> None:
    result = run(data, "--micro-batch-size", 1, "--thd-max-packed-sequences", 6)
    assert result.exit_code == 0
    for words in ("rows", "200", "left out: empty", "3", "packs", "at least", "fill"):
        assert words in result.stdout
    (note,) = [line for line in result.stderr.splitlines() if "passed over" in line]
    assert note.endswith(": --micro-batch-size")


def test_what_training_would_refuse_is_refused(data: Path) -> None:
    assert ":4: has 23 tokens; --seq-length is 16" in refused(data, "--seq-length", 16)
    assert "--split 90,10,0" in refused(data, "--split", "90,10,0")
    assert "a row of a plan is one sample" in refused(data, "--sft")
    data.write_text('{"text": ""}\n')
    assert "none of its 1 rows makes a sample" in refused(data)


def test_help_names_training_s_flags() -> None:
    result = CliRunner().invoke(app, ["pack", "--help"])
    assert result.exit_code == 0
    for words in ("--out FILE", "--lengths FILE", "--packing-overlong", "--data-path", "without bearing on the packs"):
        assert words in result.stdout
