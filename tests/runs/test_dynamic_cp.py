"""Groups of ranks chosen anew in every microbatch, against Megatron's own unpacked run: the same training."""

import json
import re
from pathlib import Path

import pytest

from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED, assert_same_training, later_wins
from tests.runs.test_layouts import rms

pytestmark = pytest.mark.run

# A rank holds half of what a sample may have, so that long samples need groups and short ones do not.
ON_ONE_RANK = 32
DYNAMIC = f"--use-varlen-dataset --dynamic-context-parallel --max-seqlen-per-dp-cp-rank {ON_ONE_RANK}"

# Of 4 ranks, each holds a quarter: then there are groups of 1, 2 and 4.
QUARTER = "--max-seqlen-per-dp-cp-rank 16"
DYNAMIC_4 = later_wins(DYNAMIC, QUARTER)

# name -> (flags of the packed run alone, flags of both, ranks)
CASES = {
    "2 ranks": ("", "", 2),
    "4 ranks": (QUARTER, "", 4),
    "learned positions": ("", "--position-embedding-type learned_absolute", 2),
    "groups of at least 2 ranks, recompute, distributed optimizer, overlap": (
        "--min-dynamic-context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "",
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_dynamic_cp_equals_unpacked_run(name: str, runner: Runner, chats: Path) -> None:
    packed_only, both, ranks = CASES[name]
    reference = runner.train(PADDED, both, data=chats, ranks=ranks)
    assert_same_training(runner.train(later_wins(DYNAMIC, both, packed_only), data=chats, ranks=ranks), reference)


def test_long_samples_were_shared_and_short_ones_were_not(runner: Runner, chats: Path) -> None:
    """Or equality would say little. A pack is noted once, on the first rank of its group."""
    words = [[m["content"].split() for m in json.loads(row)["messages"]] for row in chats.read_text().splitlines()]
    assert max(sum(map(len, row)) for row in words[:240]) > ON_ONE_RANK + 1
    for ranks, flags in ((2, DYNAMIC), (4, DYNAMIC_4)):
        run = runner.train(flags, data=chats, ranks=ranks)
        noted = [[len(packs) for packs in step.packs] for step in run.iterations]
        assert all(of_rank[0] > 0 for of_rank in noted)
        assert any(of_rank[1] < of_rank[0] for of_rank in noted), "no pack was shared"
        assert any(of_rank[1] > 0 for of_rank in noted), "every pack was shared"
    assert any(of_rank[2] < of_rank[0] for of_rank in noted), "no pack was shared by all four"
    assert any(of_rank[1] < of_rank[2] for of_rank in noted), "no pack was shared by the first two alone"
    assert "each microbatch has groups of 1, 2, 4 ranks, chosen by an algorithm of our own" in run.log


def test_flops_are_counted_once_a_sample(runner: Runner, chats: Path) -> None:
    static = runner.train(PACKED, data=chats)
    for ranks, flags in ((2, DYNAMIC), (4, DYNAMIC_4)):
        run = runner.train(flags, data=chats, ranks=ranks)
        for mine, theirs in zip(run.iterations, static.iterations, strict=True):
            assert theirs.real_tokens
            assert (mine.real_tokens, mine.squared_lengths) == (theirs.real_tokens, theirs.squared_lengths)


def test_two_runs_are_bit_equal(runner: Runner, chats: Path) -> None:
    again = f"{DYNAMIC_4} --packing-log-interval 7"  # any flag that changes nothing makes it another run
    first, second = (runner.train(flags, data=chats, ranks=4) for flags in (DYNAMIC_4, again))
    assert first.iterations == second.iterations


def test_resumed_run_is_the_uninterrupted_run(runner: Runner, chats: Path, tmp_path: Path) -> None:
    six = "--train-iters 6 --lr-decay-iters 6"
    saving = f"--save {tmp_path} --save-interval 3 --exit-interval 3 --ckpt-format torch_dist"
    whole = runner.train(DYNAMIC, six, data=chats, ranks=2)
    first = runner.train(DYNAMIC, six, saving, data=chats, ranks=2)
    second = runner.train(DYNAMIC, six, f"--load {tmp_path}", data=chats, ranks=2)
    assert first.iterations + second.iterations == whole.iterations


def test_bf16_error_is_that_of_the_unpacked_run(runner: Runner, chats: Path) -> None:
    packed = runner.train(DYNAMIC, "--bf16", data=chats, ranks=2)
    exact, plain = (runner.train(PADDED, flags, data=chats, ranks=2) for flags in ("", "--bf16"))
    assert rms(packed, exact) <= tolerances.BF16_ERROR_FACTOR * rms(plain, exact)


def test_evaluation_and_a_step_without_targets(runner: Runner, chats: Path) -> None:
    steps = "--train-iters 8 --lr-decay-iters 8 --eval-iters 2 --eval-interval 4 --split 80,20,0"
    masked = "--packing-dataset tests.runs.datasets:MaskedSteps"
    run = runner.train(later_wins(DYNAMIC.removeprefix("--use-varlen-dataset"), masked, steps), data=chats, ranks=2)
    assert [step.iteration for step in run.iterations if step.skipped] == [3, 7]
    assert run.iterations[2].state == run.iterations[1].state
    mine, theirs = (
        [
            float(x)
            for x in re.findall(
                r"validation loss at iteration \d+ .*?lm loss value: (\S+)",
                runner.train(later_wins(flags, steps), data=chats, ranks=2).log,
            )
        ]
        for flags in (DYNAMIC, PADDED)
    )
    assert len(mine) == len(theirs) >= 2
    assert mine == pytest.approx(theirs, abs=2 * tolerances.LOSS_PER_ITERATION * max(theirs))  # printed with 7 digits
