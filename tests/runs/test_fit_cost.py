"""--packing-fit-cost changes how samples are packed, once, on all ranks alike, and nothing that is learned."""

from pathlib import Path

import pytest

from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PACKED

pytestmark = pytest.mark.run

ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
BALANCED = f"{PACKED} --sequence-packing-scheduler balanced --global-batch-size 16 --train-iters 6 --lr-decay-iters 6"


def test_a_run_that_measures_its_cost_learns_the_same(runner: Runner, chats: Path) -> None:
    """Ranks that planned apart would be told: plans are compared in each step."""
    without = runner.train(BALANCED, data=chats, ranks=2)
    measuring = runner.train(BALANCED, "--packing-fit-cost 3", data=chats, ranks=2)
    assert "packing-fit-cost" not in without.log
    assert measuring.log.count("--packing-fit-cost: ") == 1, "what was found, or that a busy machine hid it"
    assert measuring.iterations[:4] == without.iterations[:4], "up to the fit, bit for bit"
    for mine, theirs in zip(measuring.iterations, without.iterations, strict=True):
        assert (mine.samples, mine.targets) == (theirs.samples, theirs.targets)
        assert mine.loss is not None
        assert theirs.loss is not None
        assert abs(mine.loss - theirs.loss) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs.loss)


def test_a_resumed_run_goes_by_the_cost_of_the_run_before_it(runner: Runner, chats: Path, tmp_path: Path) -> None:
    """Bit for bit the run that did not stop; in the middle of measuring, the rest is measured after the resume."""
    saving = f"--packing-fit-cost 2 --save-interval 2 --ckpt-format torch_dist --use-distributed-optimizer {ASYNC}"
    whole = runner.train(BALANCED, saving, f"--save {tmp_path}", data=chats, ranks=2)
    (found,) = [line for line in whole.log.splitlines() if "--packing-fit-cost: " in line]
    loading = f"{saving} --load {tmp_path}"
    second = runner.train(BALANCED, loading, "--ckpt-step 4", data=chats, ranks=2)
    assert f"{found} (from the checkpoint)" in second.log
    assert second.iterations == whole.iterations[4:]
    earlier = runner.train(BALANCED, loading, "--ckpt-step 2", data=chats, ranks=2)
    assert "microbatches were measured before the checkpoint" in earlier.log
    assert earlier.iterations[:1] == whole.iterations[2:3], "the step before the fit"
    assert earlier.log.count("--packing-fit-cost: ") == 2
