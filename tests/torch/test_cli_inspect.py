"""Does `megatron-packing inspect` show what training would see? Through Megatron's own tokenizers."""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_packing.cli.main import app
from megatron_packing.cli.row_tables import target_texts
from megatron_packing.cli.survey_tables import histogram
from megatron_packing.data import TokenizedSample
from tests.runs.harness import MODEL, TOKENIZER, TRAINING

ROWS = [
    '{"text": "11 12 13 14"}',
    '{"messages": [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3 4"}]}',
    '{"text": "11 x"}',
    '{"text": ""}',
    "{broken",
    '{"text": "1 2 3 4 5 6 7 8 9 10"}',
]
LIMIT = ("--seq-length", 8)
NULL = ("--tokenizer", "null:100")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


def inspected(*words: object) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words: object) -> str:
    """The line of the error that a refused command says."""
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("megatron-packing: ")]
    assert line.startswith("megatron-packing: error: ")
    return line


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS))
    return path


# --- the whole file -------------------------------------------------------------------------------


def test_every_row_is_counted_once(rows: Path) -> None:
    result = run("--data", rows, *NULL, *LIMIT, "--json")
    assert result.exit_code == 0
    # The document of 4 ids and EOS, and the chat "1 2" -> "3 4" and EOS: lengths 4 and 4, targets 4 and 3.
    expected = {
        "rows": 6,
        "samples": 2,
        "skipped": {"bad_json": 1, "empty": 1, "not_encodable": 1, "overlong": 1},
        "truncated": 0,
        "tokens": 8,
        "targets": 7,
        "lengths": {"min": 4, "p50": 4, "p95": 4, "max": 4},
    }
    report = json.loads(result.stdout)
    assert {key: report[key] for key in expected} == expected
    assert list(report) == [*expected, "examples", "files"]
    assert report["examples"]["empty"] == [f"{rows}:4: says nothing"]
    assert {reason: len(texts) for reason, texts in report["examples"].items()} == expected["skipped"]
    assert "first fault: " in result.stderr
    assert f"{rows}:3: " in result.stderr


def test_the_policy_for_overlong_samples_is_trainings(rows: Path) -> None:
    report = inspected("--data", rows, *NULL, *LIMIT, "--packing-overlong", "truncate")
    assert (report["samples"], report["truncated"], report["lengths"]["max"]) == (3, 1, 8)
    assert "overlong" not in report["skipped"]


def test_a_limit_looks_at_the_first_rows_alone(rows: Path) -> None:
    report = inspected("--data", rows, *NULL, *LIMIT, "--limit", 2)
    assert (report["rows"], report["samples"], report["skipped"]) == (2, 2, {})


def test_a_file_without_samples_is_shown_and_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ""}\n')
    result = run("--data", path, *NULL, *LIMIT, "--json")
    assert json.loads(result.stdout)["lengths"] == {"min": None, "p50": None, "p95": None, "max": None}
    assert "training on it would not start" in result.stderr
    assert run("--data", path, *NULL, *LIMIT).exit_code == 0


def test_the_table_names_what_is_skipped(rows: Path) -> None:
    result = run("--data", rows, *NULL, *LIMIT)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for shown in ("all 6 rows", "skipped: bad_json", "skipped: overlong", "p95 4", f"{rows}:4: says nothing"):
        assert shown in result.stdout


# --- what a run reads ----------------------------------------------------------------------------


def written(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_blend_is_shown_path_by_path(rows: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other.jsonl", "1 2 3", "1", "1 2 3 4 5 6", "")
    report = inspected("--data-path", 3, rows, 1, other, *NULL, *LIMIT, "--split", "50,50,0")
    files = {Path(one["path"]).name: one for one in report["files"]}
    assert [report[key] for key in ("rows", "samples", "tokens")] == [10, 4, 8 + 3 + 6]
    assert report["skipped"] == {"bad_json": 1, "empty": 2, "not_encodable": 1, "overlong": 1, "too_short": 1}
    assert report["examples"]["empty"] == [f"{rows}:4: says nothing", f"{other}:4: says nothing"]
    assert files["other.jsonl"]["uses"] == ["weight 1"]
    assert files["other.jsonl"]["rows_by_split"] == {"train": 2, "valid": 2, "test": 0}
    assert (files["rows.jsonl"]["samples"], files["other.jsonl"]["samples"]) == (2, 2)
    table = run("--data-path", 3, rows, 1, other, *NULL, *LIMIT).stdout
    assert "2 files: all 10 rows" in table
    assert "weight 3" in table


def test_paths_by_split_are_each_looked_at(tmp_path: Path) -> None:
    train, valid = written(tmp_path / "train.jsonl", "1 2 3"), written(tmp_path / "valid.jsonl", "1 2", "1 2")
    report = inspected("--train-data-path", train, "--valid-data-path", 1, valid, *NULL, *LIMIT)
    assert report["rows"] == 3
    assert [one["uses"] for one in report["files"]] == [["train"], ["valid weight 1"]]
    assert report["files"][1]["rows_by_split"] == {"train": 0, "valid": 2, "test": 0}
    # Rows are counted through the paths in order.
    assert inspected("--train-data-path", train, "--valid-data-path", valid, *NULL, *LIMIT, "--row", 2)["tokens"] == [
        1,
        2,
    ]


def test_each_file_of_a_folder_is_shown(tmp_path: Path) -> None:
    for name, rows in {"a": ["1 2 3"] * 6, "b": ["1 2", ""], "c": ["1 2 3 4"] * 2}.items():
        written(tmp_path / f"{name}.jsonl", *rows)
    report = inspected("--data", tmp_path, *NULL, *LIMIT, "--split", "70,30,0")
    assert [Path(one["path"]).name for one in report["files"]] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [one["tokens"] for one in report["files"]] == [18, 2, 8]
    assert [one["rows_by_split"]["train"] for one in report["files"]] == [6, 1, 0]
    assert report["examples"] == {"empty": [f"{tmp_path / 'b.jsonl'}:2: says nothing"]}
    assert inspected("--data", tmp_path, *NULL, *LIMIT, "--limit", 1)["rows"] == 3
    assert inspected("--data", tmp_path, *NULL, *LIMIT, "--row", 8)["tokens"] == [1, 2, 3, 4]


def test_pieces_of_a_split_text_are_samples(tmp_path: Path) -> None:
    path = written(tmp_path / "long.jsonl", "1 2 3 4 5 6 7 8 9 10 11 12")
    report = inspected("--data", path, *NULL, *LIMIT, "--packing-overlong", "split")
    assert (report["rows"], report["samples"], report["lengths"]["max"]) == (1, 2, 8)


def test_the_answers_of_a_pair_are_samples(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    turn = {"role": "user", "content": "1 2"}
    answers = {name: {"role": "assistant", "content": word} for name, word in (("chosen", "3"), ("rejected", "4 5"))}
    path.write_text(json.dumps({"messages": [turn], **answers}))
    report = inspected("--data", path, *NULL, *LIMIT, "--packing-dataset", "preference")
    assert (report["rows"], report["samples"]) == (1, 2)


def test_conversations_of_an_sft_row_are_samples(tmp_path: Path) -> None:
    turn = [{"role": "system", "content": "5"}, {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"messages": turn + turn}))
    report = inspected("--data", path, *NULL, *LIMIT, "--sft")
    assert (report["rows"], report["samples"], report["lengths"]["max"]) == (1, 2, 3)
    row = inspected("--data", path, *NULL, *LIMIT, "--sft", "--row", 0)
    assert row["position_ids"] == [0, 1, 2] * 2
    assert row["sample_lengths"] == [3, 3]
    assert run("--data", path, *NULL, *LIMIT, "--sft", "--row", 0).stdout.count("sample 2 of 2") == 1


def test_a_dataset_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"ids": [1, 2, 3], "learn": true}\n{"ids": [1, 2, 3], "learn": false}\n')
    report = inspected("--data", path, *NULL, *LIMIT, "--packing-dataset", "tests.runs.datasets:GivenIds")
    assert (report["samples"], report["tokens"], report["skipped"]) == (1, 2, {"no_targets": 1})


def test_what_nobody_foresaw_in_a_dataset_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"ids": [1, 2, 3]}\n{"no": "ids"}\n')
    said = refused("--data", path, *NULL, *LIMIT, "--packing-dataset", "tests.runs.datasets:GivenIds")
    assert f"row 2 of {path}: KeyError: 'ids'" in said


def test_made_up_data(tmp_path: Path) -> None:
    lengths = json.dumps({"mode": "lengths", "lengths": [3, 8, 5]})
    report = inspected("--mock-data", "--varlen-mock-dataset-config-json", lengths, *NULL, *LIMIT)
    assert (report["rows"], report["tokens"], report["lengths"]["max"]) == (3, 16, 8)
    assert report["files"][0]["path"] == "mock data"


def test_a_whole_training_command_is_taken_and_what_has_no_bearing_named(tmp_path: Path) -> None:
    command = f"--use-varlen-dataset --micro-batch-size 1 {MODEL} {TRAINING} {TOKENIZER}".split()
    path = written(tmp_path / "rows.jsonl", "1 2 3")
    result = run("--data-path", path, *command, "--context-parallel-size", 2, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["tokens"] == 3
    (note,) = [line for line in result.stderr.splitlines() if "no bearing" in line]
    assert "--hidden-size" in note
    for flag in ("--seq-length", "--data-path", "--json", "--seed", "--vocab-size", "--use-varlen-dataset"):
        assert flag not in note


def test_help_lists_each_data_flag_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'megatron', 'transformers']));"
        "from megatron_packing.cli.main import app; app(['inspect', '--help'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for flag in ("--row", "--json", "--packing-overlong", "--packing-bad-rows", "--data-path"):
        assert flag in shown


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(min_value=1, max_value=10**6), min_size=1))
def test_a_histogram_counts_each_length_in_its_span(lengths: list[int]) -> None:
    edges, counts = histogram(np.array(lengths, dtype=np.int64))
    assert counts == [sum(low <= n < high for n in lengths) for low, high in itertools.pairwise(edges)]
    assert sum(counts) == len(lengths)
    assert 1 <= len(counts) <= 16


# --- one row --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokenizer",
    [NULL, ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100)],
    ids=["guessed", "by-megatrons-flags"],
)
def test_one_row_token_by_token(rows: Path, tokenizer: tuple[object, ...]) -> None:
    report = inspected("--data", rows, *tokenizer, *LIMIT, "--row", 1)
    expected = {
        "tokens": [1, 2, 3, 4],
        "labels": [2, 3, 4, 99],
        "loss_mask": [0, 1, 1, 1],
        "position_ids": [0, 1, 2, 3],
        "target_texts": ["3", " 4", " 99"],
    }
    assert report == expected
    assert list(report) == list(expected)


def test_targets_stand_out_without_colours(rows: Path) -> None:
    result = run("--data", rows, *NULL, *LIMIT, "--row", 1)
    assert "\x1b" not in result.stdout
    marked = [line for line in result.stdout.splitlines() if line.rstrip("\u2502 ").endswith("*")]
    assert len(marked) == 3
    assert "EOS" in marked[-1]


@pytest.fixture(scope="module")
def sentencepiece_model() -> Path:
    found = importlib.util.find_spec("mistral_common")
    path = Path(found.origin).parent / "data" / "tokenizer.model.v1" if found and found.origin else None
    if path is None or not path.is_file():
        pytest.skip("no SentencePiece model: install mistral-common, which ships tokenizer.model.v1")
    return path


def test_a_real_vocabularys_targets_are_the_answers(tmp_path: Path, sentencepiece_model: Path) -> None:
    answers = ["Paris, of course.", "Two lines:\n1. caf\u00e9 \u2603\n2. \U0001f9ff  end"]
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "More."},
        {"role": "assistant", "content": answers[1]},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    report = inspected("--data", path, "--tokenizer", sentencepiece_model, "--seq-length", 200, "--row", 0)
    tokens, labels, mask, texts = (report[key] for key in ("tokens", "labels", "loss_mask", "target_texts"))
    assert tokens[1:] == labels[:-1]
    assert report["position_ids"] == list(range(len(tokens)))
    assert len(texts) == sum(mask)
    assert "".join(texts) == "".join(answers)
    targets = [label for label, counts in zip(labels, mask, strict=True) if counts]
    eos = 2
    ends = [place for place, label in enumerate(targets) if label == eos]
    assert ends[-1] == len(targets) - 1  # each answer's end is learned too
    assert "".join(texts[: ends[0]]) == answers[0]
    assert texts[:4] == ["Paris", ",", " of", " course"]


def sample_of(labels: Sequence[int], mask: Sequence[int]) -> TokenizedSample:
    return TokenizedSample(
        tokens=np.zeros(len(labels), dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """One id a byte: a character may take several."""

    name: str = "bytes"
    eos_id: int = 0
    bos_id: int | None = None
    pad_id: int = 0
    chat: Any = None
    conversation: Any = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_goes_to_its_last() -> None:
    ids = Bytes().encode("a\u2603b")
    assert target_texts(sample_of(ids, [1] * 5), Bytes()) == ["a", "", "", "\u2603", "b"]
    # Runs apart: what was cut off is not made up from another run.
    assert target_texts(sample_of(ids, [1, 1, 0, 0, 1]), Bytes()) == ["a", "\ufffd", "b"]
    assert target_texts(sample_of(ids, [0] * 5), Bytes()) == []


# --- errors ---------------------------------------------------------------------------------------


def test_a_row_that_makes_no_sample_says_why(rows: Path) -> None:
    assert f"{rows}:4: makes no sample: empty" in refused("--data", rows, *NULL, *LIMIT, "--row", 3)
    assert f"{rows}:5: not valid JSON" in refused("--data", rows, *NULL, *LIMIT, "--row", 4)
    assert "has 6 rows" in refused("--data", rows, *NULL, *LIMIT, "--row", 6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--tokenizer is missing"),
        (("--tokenizer", "null:"), "null:1000"),
        (("--tokenizer", "no/such.model"), "no such file or folder"),
        (("--tokenizer", __file__), "Give --tokenizer-type"),
        (("--tokenizer-type", "NullTokenizer"), "--vocab-size"),
        (("--tokenizer-type", "Nulltokenizer"), "invalid choice: 'Nulltokenizer'"),
        (("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer", __file__), "cannot be built"),
        ((*NULL, "--hiden-size", 8), "unrecognized arguments: --hiden-size 8"),
        ((*NULL, "--sft", "--use-varlen-dataset"), "Choose one"),
        ((*NULL, "--mock-data"), "exactly one of --data-path"),
        ((*NULL, "--schema", "nonesuch"), "nonesuch"),
        ((*NULL, "--packing-dataset", "json:JSONDecoder"), "json:JSONDecoder"),
        ((*NULL, "--limit", 0), "--limit"),
        ((*NULL, "--max-seqlen-per-dp-cp-rank", 4), "a pack holds 4 tokens"),
        ((*NULL, "--packing-train-on", "users"), "last-assistant"),
        ((*NULL, "--packing-chat-format", "plain"), "bare"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(rows: Path, flags: tuple[object, ...], said: str) -> None:
    assert said in refused("--data", rows, *LIMIT, *flags)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused("--data", tmp_path / "none.jsonl", *NULL, *LIMIT)
