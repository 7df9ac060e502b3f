"""Whatever ends a rank: all others end within 30 s, none with 0, and the last line of each tells the first cause."""

import re
import time
from pathlib import Path

import pytest

from tests.runs.harness import ROOT, Run, Runner
from tests.runs.test_equals_unpacked import PACKED

pytestmark = pytest.mark.run

END_SECONDS = 30.0
FAULTY = f"--own-script {ROOT / 'scripts' / 'faulty_pretrain.py'} --train-iters 6 --packing-data-timeout 3"

# fault (kind:rank:step:seed) -> (words of the first cause, more flags)
CASES = {
    "dataset-raises:1:3:0": ("of a dataset with a bug", "--num-workers 2"),
    "bad-row:1:3:0": ("chats.jsonl:", ""),
    "reader-stalls:1:3:0": ("is missing. It waits for a loader's worker", "--num-workers 2"),
    "reader-stalls:1:2:0": ("scripts/faulty_pretrain.py:", ""),
    # After evaluations, which draw under the same clock: the reader is still interrupted, and says where it stood.
    "reader-stalls:1:3:1": ("scripts/faulty_pretrain.py:", "--eval-interval 1 --eval-iters 1 --split 80,20,0"),
    "reader-stalls-swallows:1:3:0": ("the reader of rank 1 gave nothing for 3 s", ""),
    "reader-stalls-in-c:1:3:0": ("rank 1 ended without a word", ""),
    "planner-raises:1:3:0": ("a planner with a bug", ""),
    "plan-differs:1:3:0": ("plan of this step differs", ""),
    "model-raises:1:3:0": ("a model with a bug", "--pipeline-model-parallel-size 2"),
    "killed-in-forward:1:3:0": ("rank 1 ended without a word", "--pipeline-model-parallel-size 2"),
    "killed-in-forward:0:3:0": ("rank 0 ended without a word", "--num-workers 2"),
    "worker-killed:1:3:0": ("DataLoader worker", "--num-workers 2"),
    # In the thread that plans the next step, and in the main thread while that one is at work.
    "planner-raises:1:3:1": ("a planner with a bug", "--packing-prefetch"),
    "killed-planning:1:3:1": ("rank 1 ended without a word", "--packing-prefetch"),
    "reader-stalls:1:3:2": ("of iteration 3 is missing. It stands in", "--packing-prefetch"),
    "killed-in-forward:1:3:1": ("rank 1 ended without a word", "--packing-prefetch --num-workers 1"),
    "disk-full:1:3:0": ("checkpoint write failed on rank 1", "--save {folder} --save-interval 3"),
}


@pytest.mark.parametrize("fault", CASES)
def test_every_rank_ends_soon_and_tells_the_cause(fault: str, runner: Runner, chats: Path, tmp_path: Path) -> None:
    cause, flags = CASES[fault]
    kind, rank, *_ = fault.split(":")
    run = runner.attempt(PACKED, FAULTY, f"--fault {fault}", flags.format(folder=tmp_path), data=chats, ranks=2)
    seconds = time.time() - _struck_at(run)
    killed = {int(rank)} if kind.startswith("killed") else set()
    for number, code in enumerate(run.exit_codes):
        assert code == -9 if number in killed else code > 0, f"exit codes {run.exit_codes}\n{run.log[-3000:]}"
    assert seconds < END_SECONDS
    for number, log in enumerate(run.logs):
        if kind == "reader-stalls-in-c" and number == int(rank):
            assert "stall_with_the_lock" in log, "where it stands"
        else:
            assert number in killed or cause in _last_word(log)


def _struck_at(run: Run) -> float:
    found = re.search(r"^fault \S+ struck at ([\d.]+)$", run.log, re.MULTILINE)
    assert found, f"no fault struck\n{run.log[-3000:]}"
    return float(found[1])


def _last_word(log: str) -> str:
    return next((line for line in reversed(log.splitlines()) if "megatron_packing: error:" in line), "")
