"""What a run says about itself is true: the work that FLOPs are counted from, throughput, and evaluation's loss."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron_packing import Topology, make_plan
from megatron_packing.schedule import CostModel, TransformerShape
from tests import tolerances
from tests.runs.harness import Run, Runner

pytestmark = pytest.mark.run

DATASET = "--packing-dataset tests.runs.datasets:GivenIds"
COMMON = f"{DATASET} --seq-length 256 --max-position-embeddings 256 --global-batch-size 4"
PACKED = f"{COMMON} --max-seqlen-per-dp-cp-rank 256"
PADDED = f"{COMMON} --varlen-sbhd-validation"
SHORT, FEW = "--train-iters 6 --lr-decay-iters 6", "--train-iters 3 --lr-decay-iters 3"

NOTHING = 0
"""In place of a length: a row without targets, which leaves its step."""

STEPS = [
    (64, 64, 64, 64),
    (256, NOTHING, NOTHING, NOTHING),  # as many tokens, four times the pairs; with 2 ranks one runs a dummy
    (64, 64, 64, 64),
    (NOTHING, 128, NOTHING, NOTHING),
    (5, 9, 3, 12),
    (200, 100, 150, 90),  # more than one microbatch for each of 2 ranks
]


def _write(path: Path, lengths: Iterable[int]) -> Path:
    """Samples of one length are the same sample."""
    rows = [
        {"ids": [(1 + 37 * length + k) % 250 for k in range((length or 4) + 1)], "learn": length != NOTHING}
        for length in lengths
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("accounts") / "train.jsonl", (n for step in STEPS for n in step))


@pytest.fixture(scope="session")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One long sample and three short ones; then each kind alone."""
    lengths = (252, 2, 2, 2, 252, NOTHING, NOTHING, NOTHING, NOTHING, 2, 2, 2)
    return _write(tmp_path_factory.mktemp("accounts") / "valid.jsonl", lengths)


# --- FLOPs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_flops_are_counted_from_real_lengths_over_all_ranks(
    ranks: int, runner: Runner, training: Path, tmp_path: Path
) -> None:
    run = runner.train(PACKED, SHORT, f"--train-data-path {training}", data=None, ranks=ranks)
    assert [step.real_tokens for step in run.iterations] == [sum(step) for step in STEPS]
    assert [step.squared_lengths for step in run.iterations] == [sum(n * n for n in step) for step in STEPS]
    dummies = [sum(pack == () for rank in step.packs for pack in rank) for step in run.iterations]
    assert dummies == ([0] * 6 if ranks == 1 else [0, 1, 0, 1, 0, 0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_log_shows_the_plan_of_each_step(ranks: int, runner: Runner, training: Path) -> None:
    run = runner.train(PACKED, SHORT, f"--train-data-path {training}", data=None, ranks=ranks)
    logged = [_figures(line) for line in run.log.splitlines() if line.startswith(" packing plan ")]
    assert len(logged) == len(STEPS)
    imbalances = set()
    for step, figures in zip(STEPS, logged, strict=True):
        lengths = [n for rank in range(ranks) for n in step[rank::ranks] if n != NOTHING]  # as Megatron deals them out
        metrics = make_plan(
            lengths, topology=Topology(dp=ranks), max_tokens_per_rank=256, cost=_cost(run.arguments)
        ).metrics(lengths)
        slots = metrics.packs * 256
        took = [float(figures.pop(name)) for name in ("plan ms", "exchange ms", "waited ms")]
        assert all(ms > 0 for ms in took)
        assert abs(took[0] + took[1] - took[2]) <= 0.015, "nothing is prefetched here, and each is rounded"
        assert figures == {
            "alignment waste": f"{metrics.alignment_waste / slots:.1%}",
            "tail waste": f"{metrics.tail_waste / slots:.1%}",
            "dummy waste": f"{metrics.dummy_waste / slots:.1%}",
            "least packs": f"{metrics.packs_lower_bound}",
            "step imbalance": f"{metrics.step_imbalance:.3f}",
            "lockstep imbalance": f"{metrics.lockstep_imbalance:.3f}",
            "least lockstep imbalance": f"{metrics.lockstep_lower_bound:.3f}",
        }
        imbalances.add(figures["step imbalance"])
    assert len(imbalances) == (1 if ranks == 1 else 4), "else the steps are too much alike to tell a wrong figure"


def _figures(line: str) -> dict[str, str]:
    """The words of one line of packing figures, by name."""
    return dict(word.strip().split(": ") for word in line.split("|")[1:-1])


def _cost(arguments: dict[str, str]) -> CostModel:
    """FLOPs of the tests' model; see tests/torch/test_costs.py."""
    layers, hidden, heads, groups, ffn, vocabulary = (
        int(arguments[name])
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "padded_vocab_size",
        )
    )
    return CostModel.from_transformer(
        TransformerShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            head_dim=hidden // heads,
            groups=groups,
            ffn=ffn,
            gated=True,
            vocabulary=vocabulary,
        )
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_changes_nothing_in_training(ranks: int, runner: Runner, training: Path, validation: Path) -> None:
    plain = runner.train(PACKED, SHORT, f"--train-data-path {training}", data=None, ranks=ranks)
    evaluated = runner.train(
        PACKED,
        SHORT,
        f"--train-data-path {training} --valid-data-path {validation} --eval-interval 2 --eval-iters 1",
        data=None,
        ranks=ranks,
    )
    assert len(_validation_losses(evaluated)) == 4, "after steps 2, 4 and 6, and at the end"
    assert evaluated.iterations == plain.iterations


def test_throughput_follows_from_the_real_lengths(runner: Runner, training: Path, tmp_path: Path) -> None:
    """TFLOP/s x seconds is linear in tokens and squared lengths; two steps give the factors, the others must fit."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    flags = f"--train-data-path {training} --log-throughput --log-timers-to-tensorboard --tensorboard-dir {tmp_path}"
    run = runner.train(PACKED, SHORT, flags, data=None)
    printed = [float(x) for x in re.findall(r"throughput per GPU \(TFLOP/s/GPU\): (\S+)", run.log)]
    assert len(printed) == 6
    assert all(math.isfinite(x) for x in printed)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    rate = {event.step: event.value for event in events.Scalars("throughput")}
    seconds = {event.step: event.value for event in events.Scalars("iteration-time")}
    flops = {step: rate[step] * seconds[step] for step in range(2, 7)}  # the first step's time is not logged
    of_a_pair = (flops[2] - flops[3]) / (256**2 - 4 * 64**2)
    of_a_token = (flops[3] - of_a_pair * 4 * 64**2) / 256
    assert of_a_pair > 0
    assert of_a_token > 0
    for step in (4, 5, 6):
        lengths = STEPS[step - 1]
        expected = of_a_token * sum(lengths) + of_a_pair * sum(n * n for n in lengths)
        assert flops[step] == pytest.approx(expected, rel=1e-4), "rates and times are logged in single precision"


# --- evaluation -----------------------------------------------------------------------------------

# Weights that never change and are large enough for losses to differ between samples.
FROZEN = "--lr 0 --min-lr 0 --init-method-std 0.3 --eval-interval 1 --eval-iters 1"


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_weighs_every_token_alike(ranks: int, runner: Runner, training: Path, validation: Path) -> None:
    """One sample of 252 tokens among three of 2, in two packs: the mean over tokens, not over packs or samples."""
    data = f"--train-data-path {training} --valid-data-path {validation}"
    packed = _validation_losses(runner.train(PACKED, FEW, FROZEN, data, data=None, ranks=ranks))
    padded = _validation_losses(runner.train(PADDED, FEW, FROZEN, data, data=None, ranks=ranks))
    mixed, long, short = packed[:3]  # after steps 1, 2 and 3
    assert mixed == pytest.approx((252 * long + 6 * short) / 258, abs=2e-6)
    mean_over_samples = (long + 3 * short) / 4
    mean_over_packs = ((252 * long + 4 * short) / 256 + short) / 2
    assert abs(mixed - mean_over_samples) > 0.1
    assert abs(mixed - mean_over_packs) > 0.1
    for mine, theirs in zip(packed, padded, strict=True):
        assert abs(mine - theirs) <= 2 * tolerances.LOSS_PER_ITERATION * max(1.0, theirs)  # printed with 7 digits


def _validation_losses(run: Run) -> list[float]:
    return [float(x) for x in re.findall(r"validation loss at .*?lm loss value: (\S+)", run.log)]
