"""Packing changes the layout and nothing else: against Megatron's own unpacked run, on stock attention."""

from pathlib import Path

import pytest

from tests import tolerances
from tests.runs.harness import Run, Runner

pytestmark = pytest.mark.run

PADDED = "--use-varlen-dataset --varlen-sbhd-validation"
PACKED = "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 128"

# name -> (flags of the packed run alone, flags of both, ranks)
CASES = {
    "one rank": ("", "", 1),
    "capacity of one sample": ("--max-seqlen-per-dp-cp-rank 64", "", 1),
    "dp_balanced": ("--sequence-packing-scheduler dp_balanced", "", 1),
    "at most 3 samples a pack": ("--thd-max-packed-sequences 3", "", 1),
    "one shape": ("--pad-packed-seq-alignment max --thd-max-packed-sequences 6", "", 1),
    "full recompute": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "", 1),
    "selective recompute": ("--recompute-granularity selective", "", 1),
    "2 loader workers": ("--num-workers 2", "", 1),
    "learned positions": ("", "--position-embedding-type learned_absolute", 1),
    "no positions": ("", "--position-embedding-type none", 1),
    "Llama 3 rope scaling": ("", "--use-rope-scaling", 1),
    "rope interpolation": ("", "--rotary-seq-len-interpolation-factor 4", 1),
    "half of the head rotated": ("", "--rotary-percent 0.5", 1),
    "a sliding window in one of two layers": ("", "--window-size 8,0 --window-attn-skip-freq 2", 1),
    "DP 2": ("", "", 2),
    "DP 2, balanced": ("--sequence-packing-scheduler balanced", "", 2),
    "DP 2, distributed optimizer, overlap": (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "",
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_run_equals_unpacked_run(name: str, runner: Runner, chats: Path) -> None:
    packed_only, both, ranks = CASES[name]
    reference = runner.train(PADDED, both, data=chats, ranks=ranks)
    packed = runner.train(later_wins(PACKED, both, packed_only), data=chats, ranks=ranks)
    assert_same_training(packed, reference)


def assert_same_training(packed: Run, reference: Run, iterations: int = 30, learned: float = 0.7) -> None:
    """The same samples, losses and weights; `learned`: the last loss over the first is at most that."""
    assert len(packed.losses) == len(reference.losses) == iterations
    for mine, theirs in zip(packed.iterations, reference.iterations, strict=True):
        assert mine.iteration == theirs.iteration
        assert mine.samples == theirs.samples, f"iteration {mine.iteration} saw other samples"
        assert len(mine.samples) == 8
        assert (mine.targets, mine.consumed_samples) == (theirs.targets, theirs.consumed_samples)
        assert mine.loss is not None
        assert theirs.loss is not None
        limit = tolerances.LOSS_PER_ITERATION * max(1.0, theirs.loss)
        assert abs(mine.loss - theirs.loss) <= limit, f"iteration {mine.iteration}: {mine.loss} against {theirs.loss}"
    assert reference.losses[-1] < learned * reference.losses[0], "the model must have learned, or equality says little"
    assert packed.weights.keys() == reference.weights.keys()
    for name, weight in packed.weights.items():
        distance = (weight - reference.weights[name]).norm() / reference.weights[name].norm()
        assert distance <= tolerances.WEIGHTS_REL_L2, f"{name}: relative distance {distance}"


def later_wins(*parts: str) -> str:
    """Flags of all parts; a flag that a later part sets anew leaves the earlier one out."""
    flags: dict[str, list[str]] = {}
    for part in parts:
        name = ""
        for word in part.split():
            if word.startswith("--"):
                name = word
                flags[name] = []
            else:
                flags[name].append(word)
    return " ".join(" ".join([name, *values]) for name, values in flags.items())


def test_the_log_recommends_balanced_once_and_says_what_it_keeps_small(runner: Runner, chats: Path) -> None:
    recommended = "--sequence-packing-scheduler balanced comes near that"
    packed_only, both, ranks = CASES["DP 2"]
    log = runner.train(later_wins(PACKED, both, packed_only), data=chats, ranks=ranks).log
    assert log.count(recommended) == 1
    packed_only, both, ranks = CASES["DP 2, balanced"]
    log = runner.train(later_wins(PACKED, both, packed_only), data=chats, ranks=ranks).log
    assert recommended not in log
    assert "balanced: keeps the busiest rank's work small, over the whole step (step)" in log
