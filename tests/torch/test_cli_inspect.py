"""Does `megatron-packing inspect` show what training would see? Through Megatron's own tokenizers."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from megatron_packing.cli.inspection import target_texts
from megatron_packing.cli.main import app
from megatron_packing.data import TokenizedSample

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
    assert report == expected
    assert list(report) == list(expected)
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
    for shown in ("all 6 rows", "skipped: bad_json", "skipped: overlong", "length, p95"):
        assert shown in result.stdout


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
        ((*NULL, "--hidden-size", 8), "unrecognized arguments: --hidden-size 8"),
        ((*NULL, "--sft"), "--sft"),
        ((*NULL, "--schema", "nonesuch"), "'nonesuch' is unknown"),
        ((*NULL, "--packing-train-on", "users"), "last-assistant"),
        ((*NULL, "--packing-chat-format", "plain"), "bare"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(rows: Path, flags: tuple[object, ...], said: str) -> None:
    assert said in refused("--data", rows, *LIMIT, *flags)


def test_a_missing_file_is_refused_before_megatron_is_loaded(tmp_path: Path) -> None:
    assert "no such file" in refused("--data", tmp_path / "none.jsonl", *NULL, *LIMIT)
