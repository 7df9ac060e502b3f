"""Groups of ranks chosen anew in every microbatch, against Megatron's own unpacked run: the same training.

An ordinary run of the tests takes 12 steps of a few layouts, each of which covers several features; `--all-layouts`
takes 30 steps of all. The unpacked run needs no data parallelism: it sees the same samples without.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tolerances
from tests.conftest import LAYOUT_ROWS
from tests.runs.harness import Run, Runner
from tests.runs.test_equals_unpacked import PADDED, assert_same_training, later_wins
from tests.runs.test_layouts import (
    DISTRIBUTED,
    EP2,
    EXPERTS,
    PP2,
    RECOMPUTE,
    SELECTIVE,
    SP,
    TP2,
    VPP,
    distance,
    loss_difference,
    rms,
)

pytestmark = pytest.mark.run

# Samples have up to 60 tokens. Two ranks hold 44 each, four 24: then every step has groups of several sizes.
ON_TWO, ON_FOUR = ("--max-seqlen-per-dp-cp-rank 44", "--max-seqlen-per-dp-cp-rank 24")
DYNAMIC = f"--use-varlen-dataset --dynamic-context-parallel {ON_TWO}"
DYNAMIC_4 = later_wins(DYNAMIC, ON_FOUR)
EVALUATED = "--eval-iters 1 --eval-interval 7 --split 80,20,0"
STEPS, LEARNED = 12, 0.85
# Without decay, so that few steps teach enough for a difference to be seen. With warm-up: Adam's first steps are the
# signs of the gradients, and turn rounding into other weights.
SHORT = f"{EVALUATED} --train-iters {STEPS} --lr-decay-iters {STEPS} --lr-decay-style constant"
LEARNED_POSITIONS = "--position-embedding-type learned_absolute"
CP2 = "--context-parallel-size 2"
SHALLOW = "--num-layers 1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout with groups that change."""

    flags: str = ""
    """Of both runs."""
    packed_only: str = ""
    ranks: int
    reference_ranks: int = 1
    usual: bool = False
    """Whether an ordinary test run includes it."""


CASES = {
    "DP2": Case(ranks=2, usual=True),
    "DP4, recompute, distributed optimizer": Case(
        packed_only=f"{ON_FOUR} {RECOMPUTE} {DISTRIBUTED}", ranks=4, usual=True
    ),
    "TP2 SP DP2, 1 layer": Case(flags=f"{SP} {SHALLOW}", ranks=4, reference_ranks=2, usual=True),
    "EP2 CP2, folded, 1 layer": Case(flags=f"{EP2} {SHALLOW}", packed_only=CP2, ranks=2, reference_ranks=2, usual=True),
    "PP2 DP2, learned positions, prefetch": Case(
        flags=f"{PP2} {LEARNED_POSITIONS}", packed_only="--packing-prefetch", ranks=4, reference_ranks=2, usual=True
    ),
    "DP4": Case(packed_only=ON_FOUR, ranks=4),
    "DP4, groups of at least 2": Case(packed_only="--min-dynamic-context-parallel-size 2", ranks=4),
    "DP2, learned positions": Case(flags=LEARNED_POSITIONS, ranks=2),
    "DP2, at most 1 sample a pack": Case(packed_only="--thd-max-packed-sequences 1", ranks=2),
    "TP2 SP DP2": Case(flags=SP, ranks=4, reference_ranks=2),
    "TP2 DP2": Case(flags=TP2, ranks=4, reference_ranks=2),
    "TP2 SP DP2, selective recompute": Case(flags=SP, packed_only=SELECTIVE, ranks=4, reference_ranks=2),
    "TP2 SP DP2, distributed optimizer": Case(flags=SP, packed_only=DISTRIBUTED, ranks=4, reference_ranks=2),
    "CP2": Case(packed_only=CP2, ranks=2),
    "CP2 DP2": Case(packed_only=f"{ON_FOUR} {CP2}", ranks=4),
    "CP4": Case(packed_only=f"{ON_FOUR} --context-parallel-size 4", ranks=4),
    "TP2 SP CP2": Case(flags=SP, packed_only=CP2, ranks=4, reference_ranks=2),
    "PP2 CP2": Case(flags=PP2, packed_only=CP2, ranks=4, reference_ranks=2),
    "EP2 CP2, folded": Case(flags=EP2, packed_only=CP2, ranks=2, reference_ranks=2),
    "experts, DP2": Case(flags=EXPERTS, ranks=2),
    "EP2 DP2": Case(flags=EP2, ranks=2, reference_ranks=2),
    "EP2 DP4": Case(flags=EP2, packed_only=ON_FOUR, ranks=4, reference_ranks=2),
    "EP2 DP4, distributed optimizer": Case(
        flags=EP2, packed_only=f"{ON_FOUR} --use-distributed-optimizer", ranks=4, reference_ranks=2
    ),
    "EP2 DP2, recompute": Case(flags=EP2, packed_only=RECOMPUTE, ranks=2, reference_ranks=2),
    "EP2 TP2 SP DP2": Case(flags=f"{EP2} {SP}", ranks=4, reference_ranks=4),
    "EP2 TP2 SP DP2, experts' TP1": Case(
        flags=f"{EP2} {SP} --expert-tensor-parallel-size 1", ranks=4, reference_ranks=2
    ),
    "EP2 PP2 DP2": Case(flags=f"{EP2} {PP2}", ranks=4, reference_ranks=4),
    "PP2 DP2, recompute": Case(flags=PP2, packed_only=RECOMPUTE, ranks=4, reference_ranks=2),
    "PP2 VPP2 DP2": Case(flags=VPP, ranks=4, reference_ranks=2),
}


@pytest.mark.parametrize("name", CASES)
def test_dynamic_cp_equals_unpacked_run(
    name: str, runner: Runner, chats: Path, few_chats: Path, request: pytest.FixtureRequest
) -> None:
    case, thorough = CASES[name], request.config.getoption("--all-layouts")
    if not case.usual and not thorough:
        pytest.skip("not among the usual layouts; --all-layouts runs it")
    steps, data = (EVALUATED, chats) if thorough else (SHORT, few_chats)
    reference = runner.train(later_wins(PADDED, case.flags, steps), data=data, ranks=case.reference_ranks)
    flags = later_wins(DYNAMIC, case.flags, case.packed_only, steps)
    packed = runner.train(flags, data=data, ranks=case.ranks)
    if thorough:
        figures = f"{loss_difference(packed, reference):.1e}", f"{distance(packed, reference):.1e}"
        request.config.stash.setdefault(LAYOUT_ROWS, []).append((f"{name}, groups that change", case.ranks, *figures))
    assert_same_training(packed, reference, *((30, 0.7) if thorough else (STEPS, LEARNED)))
    assert_same_validation(packed, reference)


def assert_same_validation(packed: Run, reference: Run) -> None:
    mine, theirs = map(validation_losses, (packed, reference))
    assert len(mine) == len(theirs) >= 2
    assert mine == pytest.approx(theirs, abs=2 * tolerances.LOSS_PER_ITERATION * max(theirs))  # printed with 7 digits


def validation_losses(run: Run) -> list[float]:
    return [float(x) for x in re.findall(r"validation loss at iteration \d+ .*?lm loss value: (\S+)", run.log)]


@pytest.fixture(scope="session")
def few_chats(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many as the short runs train and evaluate on: each of them reads the whole file at its start."""
    path = tmp_path_factory.mktemp("data") / "few_chats.jsonl"
    path.write_text("".join(chats.read_text().splitlines(keepends=True)[: 10 * STEPS + 20]))
    return path


@pytest.fixture
def on_two(runner: Runner, few_chats: Path) -> Run:
    return runner.train(later_wins(DYNAMIC, SHORT), data=few_chats, ranks=2)


@pytest.fixture
def on_four(runner: Runner, few_chats: Path) -> Run:
    flags = later_wins(DYNAMIC, CASES["DP4, recompute, distributed optimizer"].packed_only, SHORT)
    return runner.train(flags, data=few_chats, ranks=4)


def test_long_samples_were_shared_and_short_ones_were_not(on_two: Run, on_four: Run) -> None:
    """Or equality would say little. A pack is noted once, on the first rank of its group."""
    for run in (on_two, on_four):
        noted = [[len(packs) for packs in step.packs] for step in run.iterations]
        assert all(of_rank[0] > 0 for of_rank in noted)
        assert any(of_rank[1] < of_rank[0] for of_rank in noted), "no pack was shared"
        assert any(of_rank[1] > 0 for of_rank in noted), "every pack was shared"
    assert any(of_rank[2] < of_rank[0] for of_rank in noted), "no pack was shared by all four"
    assert any(of_rank[1] < of_rank[2] for of_rank in noted), "no pack was shared by the first two alone"
    assert "each microbatch has groups of 1, 2, 4 ranks, chosen by an algorithm of our own" in on_four.log


def test_flops_are_counted_once_a_sample(runner: Runner, few_chats: Path, on_two: Run, on_four: Run) -> None:
    folded = CASES["EP2 CP2, folded, 1 layer"]
    shared = runner.train(later_wins(DYNAMIC, folded.flags, folded.packed_only, SHORT), data=few_chats, ranks=2)
    rows = [json.loads(row)["messages"] for row in few_chats.read_text().splitlines()]
    lengths = [sum(len(turn["content"].split()) for turn in row) for row in rows]
    for run in (on_two, on_four, shared):
        for number, step in enumerate(run.iterations):
            drawn = lengths[8 * number : 8 * number + 8]
            assert (step.real_tokens, step.squared_lengths) == (sum(drawn), sum(n * n for n in drawn))


def test_two_runs_are_bit_equal(runner: Runner, few_chats: Path, on_four: Run) -> None:
    flags = later_wins(DYNAMIC, CASES["DP4, recompute, distributed optimizer"].packed_only, SHORT, "--exit-interval 4")
    assert runner.train(flags, data=few_chats, ranks=4).iterations == on_four.iterations[:4]


def test_resumed_run_is_the_uninterrupted_run(runner: Runner, few_chats: Path, tmp_path: Path, on_two: Run) -> None:
    saving = f"--save {tmp_path} --save-interval 3 --exit-interval 3 --ckpt-format torch_dist"
    first = runner.train(later_wins(DYNAMIC, SHORT, saving), data=few_chats, ranks=2)
    second = runner.train(later_wins(DYNAMIC, SHORT, f"--load {tmp_path} --exit-interval 6"), data=few_chats, ranks=2)
    assert first.iterations + second.iterations == on_two.iterations[:6]


def test_bf16_error_is_that_of_the_unpacked_run(runner: Runner, chats: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--all-layouts"):
        pytest.skip("--all-layouts runs bf16")
    packed = runner.train(DYNAMIC, "--bf16", data=chats, ranks=2)
    exact, plain = (runner.train(PADDED, flags, data=chats) for flags in ("", "--bf16"))
    assert rms(packed, exact) <= tolerances.BF16_ERROR_FACTOR * rms(plain, exact)


def test_a_step_without_targets_leaves_the_weights_alone(runner: Runner, few_chats: Path) -> None:
    masked = "--packing-dataset tests.runs.datasets:MaskedSteps --exit-interval 4"
    flags = later_wins(DYNAMIC.removeprefix("--use-varlen-dataset"), SHORT, masked)
    run = runner.train(flags, data=few_chats, ranks=2)
    assert [step.skipped for step in run.iterations] == [False, False, True, False]
    assert run.iterations[2].state == run.iterations[1].state
    assert run.iterations[3].state != run.iterations[2].state
