"""An evaluation takes every row once, weighs every token alike, and leaves training as it is."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import tolerances
from tests.runs.harness import Run, Runner

pytestmark = pytest.mark.run

COMMON = (
    "--packing-dataset tests.runs.datasets:GivenIds --seq-length 64 --global-batch-size 4 "
    "--train-iters 3 --lr-decay-iters 3 --eval-interval 1"
)
PACKED = f"{COMMON} --max-seqlen-per-dp-cp-rank 64"
PADDED = f"{COMMON} --varlen-sbhd-validation"
FROZEN = "--lr 0 --min-lr 0 --init-method-std 0.3"  # weights that never change, losses that differ between samples

LENGTHS = (40, 3, 9, 64, 17, 2, 30, 5, 60, 11, 23)  # 11 rows: 3 steps of 4, the last without its fourth
OTHER = (7, 50, 4, 21, 33)


def _write(path: Path, lengths: Iterable[int], learn: Iterable[bool] = ()) -> Path:
    learned = list(learn)
    rows = [
        {"ids": [(1 + 37 * length + k) % 250 for k in range(length + 1)], "learn": learned[i] if learned else True}
        for i, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("evaluation") / "train.jsonl", [5 + 4 * i for i in range(12)])


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("evaluation")
    return _write(folder / "valid.jsonl", LENGTHS), _write(folder / "other.jsonl", OTHER)


@pytest.fixture(scope="session")
def expected(runner: Runner, training: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Each set's loss by stock means: unpacked, in as many steps as its rows fill up with rows without targets."""
    losses = []
    for name, lengths in (("valid", LENGTHS), ("other", OTHER)):
        steps = -(-len(lengths) // 4)
        missing = 4 * steps - len(lengths)
        learn = [True] * len(lengths) + [False] * missing
        path = _write(tmp_path_factory.mktemp("expected") / f"{name}.jsonl", [*lengths, *[4] * missing], learn)
        data = f"--train-data-path {training} --valid-data-path {path} --eval-iters {steps}"
        losses.append(_losses(runner.train(PADDED, FROZEN, data, data=None))[0])
    return losses


def _losses(run: Run, name: str = "") -> list[float]:
    return [float(x) for x in re.findall(rf"validation{name} loss at .*?lm loss value: (\S+)", run.log)]


def _assert_all(losses: list[float], expected: float, count: int) -> None:
    assert len(losses) == count
    for loss in losses:  # printed with 7 digits
        assert abs(loss - expected) <= 2 * tolerances.LOSS_PER_ITERATION * max(1.0, expected)


# name -> (flags, ranks)
LAYOUTS = {
    "1 rank, 2 workers": (f"{PACKED} --num-workers 2", 1),
    "2 ranks, reference": (PADDED, 2),
    "2 ranks, packed alike by other means": (
        f"{PACKED} --packing-eval-scheduler dp_balanced --packing-eval-max-seqlen-per-dp-cp-rank 200",
        2,
    ),
    "CP2 DP2": (f"{PACKED} --context-parallel-size 2", 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_row_once(
    name: str, runner: Runner, training: Path, sets: tuple[Path, Path], expected: list[float]
) -> None:
    """11 rows for validation, 5 for the test, which ends two steps earlier; after each step the same loss again."""
    flags, ranks = LAYOUTS[name]
    data = f"--train-data-path {training} --valid-data-path {sets[0]} --test-data-path {sets[1]} --full-validation"
    run = runner.train(flags, FROZEN, data, data=None, ranks=ranks)
    *validations, test = _losses(run)
    _assert_all(validations, expected[0], 4)
    _assert_all([test], expected[1], 1)
    assert "every row is evaluated once: 11 + 5 rows in steps of 4" in run.log


def test_several_validation_sets(
    runner: Runner, training: Path, sets: tuple[Path, Path], expected: list[float]
) -> None:
    data = f"--train-data-path {training} --valid-data-path {sets[0]} {sets[1]} --multiple-validation-sets"
    flags = f"{FROZEN} {data} --full-validation"
    run = runner.train(PACKED, flags, "--tensor-model-parallel-size 2", data=None, ranks=2)
    for number in (0, 1):
        _assert_all(_losses(run, f"-{number}"), expected[number], 4)
    # A stage in the middle reads nothing. Megatron draws other weights for it.
    run = runner.train(PACKED, flags, "--pipeline-model-parallel-size 3 --num-layers 3", data=None, ranks=3)
    first, second = (set(_losses(run, f"-{number}")) for number in (0, 1))
    assert len(first) == len(second) == 1
    assert first != second


def test_training_does_not_notice(runner: Runner, training: Path, sets: tuple[Path, Path]) -> None:
    """With dropout, shuffling and workers, whose random numbers an evaluation could move."""
    flags = f"{PACKED} --packing-shuffle --num-workers 2 --hidden-dropout 0.1 --train-data-path {training}"
    plain = runner.train(flags, data=None)
    evaluated = runner.train(flags, f"--valid-data-path {sets[0]} --full-validation", data=None)
    assert len(_losses(evaluated)) == 4
    assert evaluated.iterations == plain.iterations


def test_long_rows_of_an_evaluation_have_a_policy_of_their_own(
    runner: Runner, training: Path, expected: list[float], tmp_path: Path
) -> None:
    path = _write(tmp_path / "long.jsonl", [*LENGTHS[:4], 80, *LENGTHS[4:]])
    data = f"--train-data-path {training} --valid-data-path {path} --full-validation"
    run = runner.train(PACKED, FROZEN, data, "--packing-eval-overlong drop", data=None)
    _assert_all(_losses(run), expected[0], 4)


def test_a_validation_set_without_rows(runner: Runner, training: Path) -> None:
    run = runner.attempt(PACKED, f"--data-path {training} --split 100,0,0 --full-validation", data=None, ranks=2)
    assert all(code not in (0, None) for code in run.exit_codes)
    assert all("--full-validation: a validation set has no rows" in log for log in run.logs)
