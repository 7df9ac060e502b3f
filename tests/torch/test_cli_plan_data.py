"""Does `megatron-packing plan --data` plan the samples that training would see?"""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from megatron_packing.cli.data_lengths import data_lengths
from megatron_packing.cli.main import app
from megatron_packing.schedule import make_plan, mean_metrics
from megatron_packing.topology import Topology

NULL = ("--tokenizer", "null:100")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Documents of 2 to 13 ids and EOS, of lengths 2 to 13 after the shift, and one without anything to learn."""
    path = tmp_path / "rows.jsonl"
    texts = [" ".join(["7"] * count) for count in (*range(2, 14), 0)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_a_data_file_gives_the_plan_of_its_lengths(rows: Path, tmp_path: Path) -> None:
    listed = tmp_path / "lengths.txt"
    listed.write_text("\n".join(map(str, range(2, 14))))
    flags = ("--seq-length", 16, "--global-batch-size", 4, "--dp", 2, "--cp", 2, "--scheduler", "balanced", "--json")
    of_data = run("--data", rows, *NULL, *flags, "--lr", 1)
    of_lengths = run("--lengths", listed, *flags)
    assert (of_data.exit_code, of_lengths.exit_code) == (0, 0), of_data.output + of_lengths.output
    data, lengths = json.loads(of_data.stdout), json.loads(of_lengths.stdout)
    for report in (data, lengths):
        del report["schedulers"]["balanced"]["plan_ms"]
    assert data["schedulers"]["balanced"].pop("dropped") == 1
    assert lengths["schedulers"]["balanced"].pop("dropped") == 0
    assert data == lengths
    assert "1 of 13 rows make no sample" in of_data.stderr
    assert "no bearing on the data, passed over: --lr" in of_data.stderr


def test_both_answers_of_a_pair_share_a_pack_and_count_their_own_work(tmp_path: Path) -> None:
    """Rows are counted as in a run, whose default capacity holds two samples; work is a**2 + b**2."""
    path, words = tmp_path / "pairs.jsonl", [(5, 1), (2, 2), (3, 4), (1, 6), (7, 7), (2, 3), (4, 1), (6, 6)]
    rows = [
        {"prompt": "7", **{k: " ".join(["7"] * n) for k, n in zip(("chosen", "rejected"), pair, strict=True)}}
        for pair in words
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--data", path, *NULL, "--packing-dataset", "preference", "--seq-length", 16, "--json")
    result = run(*flags, "--global-batch-size", 4, "--dp", 2, "--scheduler", "balanced")
    assert result.exit_code == 0, result.output
    assert "each row's 2 samples share a pack; --global-batch-size counts rows" in result.stderr
    report = json.loads(result.stdout)
    lengths = data_lengths([str(word) for word in flags[:-3]], seq_length=16, seed=0).lengths
    assert len(lengths) == 16
    steps = np.split(lengths, 2)
    plans = [make_plan(step, "balanced", Topology(dp=2), 32, units=[2] * 4) for step in steps]
    mean = mean_metrics([plan.metrics(step) for plan, step in zip(plans, steps, strict=True)])
    figures = report["schedulers"]["balanced"]
    assert (figures["steps"], figures["step_imbalance"]) == (2, pytest.approx(mean.step_imbalance))
    apart = [make_plan(step, "balanced", Topology(dp=2), 32).metrics(step).step_imbalance for step in steps]
    assert figures["step_imbalance"] != pytest.approx(sum(apart) / 2)
    assert all(choice["max_tokens_per_rank"] * choice["cp"] >= 16 for choice in report["advice"]["choices"])


def test_the_first_rows_and_trainings_own_flags(rows: Path) -> None:
    """Of 5 rows, those of 4, 5 and 6 tokens are cut to 3."""
    words = ("--data-path", rows, "--tokenizer-type", "NullTokenizer", "--vocab-size", 100, "--limit", 5)
    result = run(*words, "--packing-overlong", "truncate", "--seq-length", 3, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["padded"]["real_tokens"] == 2 + 3 + 3 + 3 + 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "ROWS", *NULL, "--seq-lenght", 9], "--seq-lenght"),
        (["--data", "missing.jsonl", *NULL], "missing.jsonl"),
        (["--data", "ROWS"], "--tokenizer is missing"),
        (["--data", "ROWS", *NULL, "--limit", 0], "--limit"),
        ([], "nothing to plan: give --lengths FILE, or --data PATH with --tokenizer NAME"),
    ],
)
def test_what_cannot_be_read_is_refused(rows: Path, words: list[object], said: str) -> None:
    result = run(*(rows if word == "ROWS" else word for word in words), "--seq-length", 16)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr.splitlines()[-1]
