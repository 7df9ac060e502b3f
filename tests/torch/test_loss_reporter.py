"""What does the log say of lost rows? Each reason's first rows at once, totals as they grow, all of it at the end."""

from collections import Counter

import pytest

from megatron_packing.mcore.lost import TRUNCATED, LostInStep
from megatron_packing.mcore.report import LossReporter


def lost(counts: dict[str, int], *news: tuple[str, str]) -> LostInStep:
    return LostInStep(counts=Counter(counts), news=news)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_losses_are_told_once_and_totalled_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = LossReporter()
    reporter.add(lost({"empty": 2}, ("empty", "a.jsonl:3: says nothing")), training=True)
    assert lines_of(capsys) == ["megatron_packing: a row was dropped (empty) in training: a.jsonl:3: says nothing"]
    reporter.write_totals()
    assert lines_of(capsys) == ["packing, rows lost or cut since the start | empty: 2 |"]
    reporter.add(lost({}), training=True)
    reporter.add(lost({TRUNCATED: 5}, (TRUNCATED, "a.jsonl:9: cut")), training=True)
    reporter.add(None, training=True)
    assert lines_of(capsys) == ["megatron_packing: a row was truncated in training: a.jsonl:9: cut"]
    reporter.write_totals()
    assert lines_of(capsys) == []  # nothing was dropped
    reporter.add(lost({"bad_json": 1_000, "empty": 1}, ("bad_json", "a.jsonl:4: no JSON")), training=True)
    reporter.add(lost({"empty": 1}, ("empty", "valid.jsonl:1: says nothing")), training=False)
    lines_of(capsys)
    reporter.write_totals()
    assert lines_of(capsys) == [
        "packing, rows lost or cut since the start | bad_json: 1,000 | empty: 3 | truncated: 5 |"
    ]
    reporter.write_summary()
    assert lines_of(capsys) == [
        "megatron_packing: rows lost or cut in training, over all ranks: 1,008",
        "megatron_packing: bad_json 1,000 a.jsonl:4: no JSON",
        "megatron_packing: empty 3 a.jsonl:3: says nothing",
        "megatron_packing: truncated 5 a.jsonl:9: cut",
        "megatron_packing: rows lost or cut in evaluation, over all ranks: 1",
        "megatron_packing: empty 1 valid.jsonl:1: says nothing",
    ]


def test_a_run_without_losses_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = LossReporter()
    reporter.add(lost({}), training=True)
    reporter.write_totals()
    reporter.write_summary()
    assert lines_of(capsys) == []
