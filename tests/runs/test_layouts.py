"""Every parallel layout against Megatron's own unpacked run: same samples, same losses, same weights.

A layout is compared with its own unpacked twin. Stock local attention refuses context parallelism, so that a layout
with CP is compared with the unpacked run without it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tolerances
from tests.conftest import LAYOUT_ROWS
from tests.runs.harness import Run, Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED, assert_same_training, later_wins

pytestmark = pytest.mark.run

TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
# Deep toy models learn at a gentler rate, or rounding is amplified from step to step in any layout, one rank included.
PP2, PP3 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 3 --num-layers 3 --lr 5e-3"
PP4 = "--pipeline-model-parallel-size 4 --num-layers 4 --lr 5e-3"
VPP = "--pipeline-model-parallel-size 2 --num-layers 4 --lr 5e-3 --num-virtual-stages-per-pipeline-rank 2"
CP2 = "--context-parallel-size 2 --max-seqlen-per-dp-cp-rank 64"
CP4 = "--context-parallel-size 4 --max-seqlen-per-dp-cp-rank 32"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
EP2 = f"{EXPERTS} --expert-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BALANCED = "--sequence-packing-scheduler balanced"
ONE_SHAPE = "--pad-packed-seq-alignment max --thd-max-packed-sequences 6"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout, and what only its packed run is given."""

    flags: str
    ranks: int
    packed_only: str = ""
    usual: bool = False
    """Whether an ordinary test run includes it."""


LAYOUTS = {
    "TP2": Layout(flags=TP2, ranks=2, usual=True),
    "TP2 SP": Layout(flags=SP, ranks=2, usual=True),
    "PP2": Layout(flags=PP2, ranks=2, usual=True),
    "PP3": Layout(flags=PP3, ranks=3),
    "PP4 TP2": Layout(flags=f"{PP4} {TP2}", ranks=8),
    "PP2 VPP2": Layout(flags=VPP, ranks=2, usual=True),
    "PP2 DP2": Layout(flags=PP2, ranks=4, usual=True),
    "EP1": Layout(flags=EXPERTS, ranks=1),
    "EP2": Layout(flags=EP2, ranks=2, usual=True),
    "EP2, balanced": Layout(flags=EP2, ranks=2, packed_only=BALANCED, usual=True),
    "PP2 DP2, balanced": Layout(flags=PP2, ranks=4, packed_only=BALANCED),
    "PP2 VPP2, balanced": Layout(flags=VPP, ranks=2, packed_only=BALANCED),
    "CP2 DP2, balanced": Layout(flags=CP2, ranks=4, packed_only=BALANCED),
    "EP2 DP4": Layout(flags=EP2, ranks=4),
    "EP2 TP2 SP": Layout(flags=f"{EP2} {SP}", ranks=4),
    "EP2 TP2 SP, experts' TP1": Layout(flags=f"{EP2} {SP} --expert-tensor-parallel-size 1", ranks=2),
    "EP2 PP2": Layout(flags=f"{EP2} {PP2}", ranks=4, usual=True),
    "EP2 PP2 VPP2": Layout(flags=f"{EP2} {VPP}", ranks=4),
    "EP2 CP2": Layout(flags=f"{EP2} {CP2}", ranks=4),
    "EP2 CP2, folded": Layout(flags=f"{EP2} {CP2}", ranks=2),
    "EP2 TP2 SP CP2, experts' TP1": Layout(flags=f"{EP2} {SP} {CP2} --expert-tensor-parallel-size 1", ranks=4),
    "TP2 SP PP2 CP2": Layout(flags=f"{SP} {PP2} {CP2}", ranks=8),
    "PP2 VPP2 CP2": Layout(flags=f"{VPP} {CP2}", ranks=4),
    "CP2": Layout(flags=CP2, ranks=2, usual=True),
    "CP4": Layout(flags=CP4, ranks=4),
    "CP2 DP2": Layout(flags=CP2, ranks=4, usual=True),
    "TP2 SP CP2": Layout(flags=f"{SP} {CP2}", ranks=4, usual=True),
    "CP2 PP2": Layout(flags=f"{CP2} {PP2}", ranks=4, usual=True),
    "CP2 PP2, one shape": Layout(flags=f"{CP2} {PP2}", ranks=4, packed_only=ONE_SHAPE, usual=True),
    "TP2 SP, rows in 32s": Layout(flags=SP, ranks=2, packed_only="--pad-packed-seq-alignment 32"),
    "EP2, one shape": Layout(flags=EP2, ranks=2, packed_only=ONE_SHAPE),
    "TP2 SP, distributed optimizer, DP2": Layout(flags=SP, ranks=4, packed_only=DISTRIBUTED),
    "PP2 DP2, distributed optimizer": Layout(flags=PP2, ranks=4, packed_only=DISTRIBUTED),
    "CP2 DP2, distributed optimizer": Layout(flags=CP2, ranks=4, packed_only=DISTRIBUTED),
    "EP2 DP4, distributed optimizer": Layout(flags=EP2, ranks=4, packed_only="--use-distributed-optimizer"),
    "TP2 SP, recompute": Layout(flags=SP, ranks=2, packed_only=RECOMPUTE, usual=True),
    "PP2, recompute": Layout(flags=PP2, ranks=2, packed_only=RECOMPUTE),
    "CP2, recompute": Layout(flags=CP2, ranks=2, packed_only=RECOMPUTE),
    "CP2, selective recompute": Layout(flags=CP2, ranks=2, packed_only=SELECTIVE),
    "TP2 SP, selective recompute": Layout(flags=SP, ranks=2, packed_only=SELECTIVE),
    "PP2, selective recompute": Layout(flags=PP2, ranks=2, packed_only=SELECTIVE),
    "PP2 VPP2, recompute": Layout(flags=VPP, ranks=2, packed_only=RECOMPUTE),
    "EP2, recompute": Layout(flags=EP2, ranks=2, packed_only=RECOMPUTE),
    # What the recipes of examples/sft have besides.
    "TP2 SP, MLP recompute": Layout(flags=SP, ranks=2, packed_only=f"{SELECTIVE} --recompute-modules mlp"),
    "EP2, shared expert, MoE recompute": Layout(
        flags=f"{EP2} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate --moe-router-pre-softmax",
        ranks=2,
        packed_only=f"{SELECTIVE} --recompute-modules moe",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_its_unpacked_run(name: str, runner: Runner, chats: Path, request: pytest.FixtureRequest) -> None:
    layout = LAYOUTS[name]
    if not layout.usual and not request.config.getoption("--all-layouts"):
        pytest.skip("not among the usual layouts; --all-layouts runs it")
    packed = runner.train(later_wins(PACKED, layout.flags, layout.packed_only), data=chats, ranks=layout.ranks)
    reference = unpacked_run(layout, runner, chats)
    rows = request.config.stash.setdefault(LAYOUT_ROWS, [])
    rows.append((name, layout.ranks, f"{loss_difference(packed, reference):.1e}", f"{distance(packed, reference):.1e}"))
    assert_same_training(packed, reference)


@pytest.mark.parametrize("name", ["CP2", "PP2 DP2"])
def test_two_runs_of_a_layout_are_bit_equal(name: str, runner: Runner, chats: Path) -> None:
    layout = LAYOUTS[name]
    flags = later_wins(PACKED, layout.flags)
    again = f"{flags} --packing-log-interval 7"  # any flag that changes nothing makes it another run
    first, second = (runner.train(f, data=chats, ranks=layout.ranks) for f in (flags, again))
    assert first.iterations == second.iterations


@pytest.mark.parametrize("name", ["TP2 SP", "PP2", "PP2 VPP2", "CP2", "EP2", "EP2 PP2", "TP2 SP CP2", "CP2 PP2"])
def test_bf16_error_is_that_of_the_unpacked_run(
    name: str, runner: Runner, chats: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--all-layouts"):
        pytest.skip("--all-layouts runs bf16 in every kind of layout")
    layout = LAYOUTS[name]
    packed = runner.train(later_wins(PACKED, layout.flags), "--bf16", data=chats, ranks=layout.ranks)
    exact = unpacked_run(layout, runner, chats)
    plain = unpacked_run(layout, runner, chats, "--bf16")
    assert rms(packed, exact) <= tolerances.BF16_ERROR_FACTOR * rms(plain, exact)


@pytest.mark.parametrize("name", ["TP2 SP", "PP2", "CP2"])
def test_step_without_targets_and_evaluation_in_a_layout(name: str, runner: Runner, chats: Path) -> None:
    """All ranks skip together; evaluation's loss is that of the unpacked run."""
    layout = LAYOUTS[name]
    steps = "--train-iters 8 --lr-decay-iters 8 --eval-iters 2 --eval-interval 4 --split 80,20,0"
    masked = "--packing-dataset tests.runs.datasets:MaskedSteps"
    run = runner.train(later_wins(PACKED, layout.flags, masked, steps), data=chats, ranks=layout.ranks)
    assert [step.iteration for step in run.iterations if step.skipped] == [3, 7]
    assert run.iterations[2].state == run.iterations[1].state
    assert run.iterations[3].state != run.iterations[2].state
    packed = runner.train(later_wins(PACKED, layout.flags, steps), data=chats, ranks=layout.ranks)
    reference = unpacked_run(layout, runner, chats, steps)
    mine, theirs = (
        [float(x) for x in re.findall(r"validation loss at iteration \d+ .*?lm loss value: (\S+)", each.log)]
        for each in (packed, reference)
    )
    assert len(mine) == len(theirs) >= 2
    assert mine == pytest.approx(theirs, abs=2 * tolerances.LOSS_PER_ITERATION * max(theirs))  # printed with 7 digits


def unpacked_run(layout: Layout, runner: Runner, chats: Path, more: str = "") -> Run:
    """Megatron's own run of the layout, without the context parallelism that stock local attention refuses."""
    without_cp = re.sub(r"--context-parallel-size \d --max-seqlen-per-dp-cp-rank \d+", "", layout.flags)
    cp, ep = (re.search(rf"--{kind}-parallel-size (\d)", layout.flags) for kind in ("context", "expert-model"))
    ranks = max(layout.ranks // (int(cp[1]) if cp else 1), int(ep[1]) if ep else 1)
    return runner.train(later_wins(PADDED, without_cp, more), data=chats, ranks=ranks)


def loss_difference(packed: Run, reference: Run) -> float:
    pairs = zip(packed.losses, reference.losses, strict=True)
    return max(abs(mine - theirs) / max(1.0, theirs) for mine, theirs in pairs)


def distance(packed: Run, reference: Run) -> float:
    return max(
        float((weight - reference.weights[name]).norm() / reference.weights[name].norm())
        for name, weight in packed.weights.items()
    )


def rms(run: Run, exact: Run) -> float:
    """How far a run's losses are from the exact ones."""
    pairs = zip(run.losses, exact.losses, strict=True)
    return (sum((mine - theirs) ** 2 for mine, theirs in pairs) / len(exact.losses)) ** 0.5
