"""Real runs on Transformer Engine's attention: from the rows of a file to its own forward, and back."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.runs.harness import ROOT, Run, Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED, assert_same_training

CONTRACT = f"{PACKED} --packing-attention te --own-script {ROOT / 'tests' / 'te' / 'contract_pretrain.py'}"
GIVEN = "--packing-dataset tests.runs.datasets:GivenIds --train-iters 3"
LAYERS = 2


def test_a_packed_run_equals_megatrons_own_unpacked_run(runner: Runner, chats: Path) -> None:
    reference = runner.train(PADDED, data=chats)
    packed = runner.train(CONTRACT, data=chats)
    assert_same_training(packed, reference)
    assert calls_of(packed)["kernels"] == ["UnfusedDotProductAttention"]


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    """Of 24 samples, three steps of 8."""
    return random.Random(3).choices(range(1, 61), k=24)


@pytest.fixture(scope="module")
def rows(lengths: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"ids": [1] * (length + 1)}) + "\n" for length in lengths), encoding="utf-8")
    return path


SHARED = "--bf16 --context-parallel-size 2"
UNFUSED, FUSED = "UnfusedDotProductAttention", "FusedAttention"


@pytest.mark.parametrize(
    ("flags", "ranks", "alignment", "kernel"),
    [
        ("", 1, 1, UNFUSED),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2, 2, UNFUSED),
        (SHARED, 2, 4, FUSED),
        (f"{SHARED} --cp-comm-type a2a --window-size 7,0", 2, 4, FUSED),
    ],
    ids=["no padding", "TP 2, padding between samples", "CP 2", "CP 2 by all-to-all, sliding window"],
)
def test_the_boundaries_that_arrive_are_those_of_the_files_samples(
    flags: str, ranks: int, alignment: int, kernel: str, runner: Runner, rows: Path, lengths: list[int]
) -> None:
    flags = f"{CONTRACT.replace('--use-varlen-dataset', '')} {GIVEN} {flags}"
    run = runner.train(flags, data=rows, ranks=ranks)
    padded = [-(-length // alignment) * alignment for length in lengths]
    assert len(run.losses) == 3
    assert all(map(math.isfinite, run.losses))
    for rank in range(ranks):
        assert calls_of(run, rank)["kernels"] == [kernel]
        for layer in range(1, LAYERS + 1):
            arrived = [call["lengths"] for call in calls_of(run, rank)["calls"] if call["layer"] == layer]
            assert sorted(itertools.chain.from_iterable(arrived)) == sorted(padded)
            assert max(map(sum, arrived)) <= 128 * (2 if SHARED in flags else 1)


def calls_of(run: Run, rank: int = 0) -> dict[str, Any]:
    """What tests/te/contract_pretrain.py tells of a rank."""
    (line,) = (line for line in run.logs[rank].splitlines() if line.startswith("calls of Transformer Engine"))
    return json.loads(line.partition(": ")[2])
