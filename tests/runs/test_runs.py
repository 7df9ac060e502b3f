"""What a run does besides equalling its reference: resume, bf16, steps without targets, logs, and standing aside."""

import json
import re
from pathlib import Path

import pytest

from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED

pytestmark = pytest.mark.run


# --- save and resume ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_resumed_run_is_bit_equal(optimizer: str, runner: Runner, chats: Path, tmp_path: Path) -> None:
    ranks = 2 if optimizer else 1
    saving = f"--save {tmp_path} --save-interval 15 --ckpt-format torch_dist {optimizer}"
    whole = runner.train(PACKED, saving, data=chats, ranks=ranks)
    resumed = runner.train(PACKED, optimizer, f"--load {tmp_path} --ckpt-step 15", data=chats, ranks=ranks)
    assert [step.iteration for step in resumed.iterations] == list(range(16, 31))
    assert resumed.iterations == whole.iterations[15:], "samples, losses, weights and optimizer state, bit for bit"
    assert whole.iterations == runner.train(PACKED, optimizer, data=chats, ranks=ranks).iterations, (
        "saving changes nothing"
    )


# --- precision ------------------------------------------------------------------------------------


def test_bf16_error_is_that_of_the_unpacked_run(runner: Runner, chats: Path) -> None:
    exact = runner.train(PADDED, data=chats).losses
    padded = runner.train(PADDED, "--bf16", data=chats).losses
    packed = runner.train(PACKED, "--bf16", data=chats).losses
    plain_error, packed_error = _rms(padded, exact), _rms(packed, exact)
    assert plain_error > 0
    assert packed_error <= tolerances.BF16_ERROR_FACTOR * plain_error


def _rms(losses: list[float], exact: list[float]) -> float:
    return (sum((a - b) ** 2 for a, b in zip(losses, exact, strict=True)) / len(exact)) ** 0.5


# --- steps without targets ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_without_targets_is_skipped_by_all_ranks(ranks: int, runner: Runner, chats: Path) -> None:
    """Every target of steps 3 and 7 is masked, on all ranks: nothing moves, nothing is NaN, both are counted."""
    flags = "--packing-dataset tests.runs.datasets:MaskedSteps --max-seqlen-per-dp-cp-rank 128 --train-iters 8"
    run = runner.train(flags, data=chats, ranks=ranks)
    states = [step.state for step in run.iterations]
    assert [step.iteration for step in run.iterations if step.skipped] == [3, 7]
    assert states[2] == states[1]
    assert states[6] == states[5]
    assert len(set(states)) == 6
    assert "steps without targets, skipped: 2" in run.log
    assert "nan |" not in run.log.lower()
    assert all(loss == loss for loss in run.losses)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_without_targets_leave_their_step(ranks: int, runner: Runner, tmp_path: Path) -> None:
    """Steps of fewer samples, a step of none, and a rank that has none; against the padded run on the same file."""
    data = tmp_path / "some_empty.jsonl"
    # With 2 ranks rows alternate: rank 1 has nothing in step 2; step 4 has nothing at all.
    empty = {9, 11, 13, 15, *range(24, 32), 33, 40}
    data.write_text("".join(json.dumps(_row(i, learn=i not in empty)) + "\n" for i in range(64)))
    length = "--train-iters 8 --lr-decay-iters 8"
    packed = runner.train(PACKED, length, data=data, ranks=ranks)
    padded = runner.train(PADDED, length, data=data, ranks=ranks)
    assert [len(step.samples) for step in packed.iterations] == [8, 4, 8, 0, 7, 7, 8, 8]
    assert packed.iterations[3].skipped
    assert packed.iterations[3].state == packed.iterations[2].state
    # Up to the empty step the two must agree; there, stock Megatron steps on momentum, and we do not.
    for mine, theirs in zip(packed.iterations[:3], padded.iterations[:3], strict=True):
        assert mine.samples == theirs.samples
        assert mine.targets == theirs.targets
        assert abs(mine.loss - theirs.loss) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs.loss)
    assert "dropped (no_targets)" in packed.log
    assert "rows dropped: 14" in packed.log


def _row(index: int, *, learn: bool) -> dict:
    words = [str((7 * index + step) % 250) for step in range(4 + index % 9)]
    turns = [{"role": "user", "content": " ".join(words[:2])}]
    if learn:
        turns.append({"role": "assistant", "content": " ".join(words[2:])})
    return {"messages": turns}


# --- datasets -------------------------------------------------------------------------------------


def test_sft_rows_are_taken_apart_and_packed_anew(runner: Runner, chats: Path, tmp_path: Path) -> None:
    """Two conversations a row, 4 rows a step, against the same conversations one a row, 8 a step."""
    short = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    short = [turns for turns in short if sum(len(turn["content"].split()) for turn in turns) < 30][:120]
    system = {"role": "system", "content": "1"}
    single, double = tmp_path / "single.jsonl", tmp_path / "double.jsonl"
    single.write_text("".join(json.dumps({"messages": [system, *turns]}) + "\n" for turns in short))
    pairs = zip(short[::2], short[1::2], strict=True)
    double.write_text("".join(json.dumps({"messages": [system, *a, system, *b]}) + "\n" for a, b in pairs))
    reference = runner.train(PADDED, "--train-iters 15 --lr-decay-iters 15", data=single)
    sft = runner.train(
        "--sft --sequence-packing-scheduler first_fit --max-seqlen-per-dp-cp-rank 128 --global-batch-size 4",
        "--train-iters 15 --lr-decay-iters 15",
        data=double,
    )
    assert [step.samples for step in sft.iterations] == [step.samples for step in reference.iterations]
    assert [step.consumed_samples for step in sft.iterations] == [4 * i for i in range(1, 16)]
    for mine, theirs in zip(sft.losses, reference.losses, strict=True):
        assert abs(mine - theirs) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs)
    assert sft.arguments["sft"] == "False"


def test_blend_and_evaluation(runner: Runner, chats: Path, tmp_path: Path) -> None:
    """Two files with weights and splits; evaluation's loss is that of the padded run."""
    other = tmp_path / "documents.jsonl"
    other.write_text(
        "".join(json.dumps({"text": " ".join(str((i + k) % 250) for k in range(5 + i % 30))}) + "\n" for i in range(90))
    )
    blend = f"--data-path 0.7 {chats} 0.3 {other} --split 80,20,0 --eval-iters 2 --eval-interval 10 --train-iters 20"
    packed = runner.train(PACKED, blend, data=None)
    padded = runner.train(PADDED, blend, data=None)
    assert [step.samples for step in packed.iterations] == [step.samples for step in padded.iterations]
    evaluations = [
        [float(x) for x in re.findall(r"validation loss at iteration \d+ .*?lm loss value: (\S+)", run.log)]
        for run in (packed, padded)
    ]
    assert len(evaluations[0]) == len(evaluations[1]) >= 2
    for mine, theirs in zip(*evaluations, strict=True):
        assert abs(mine - theirs) <= 2 * tolerances.LOSS_PER_ITERATION * max(1.0, theirs)  # printed with 7 digits


def test_mock_lengths(runner: Runner) -> None:
    lengths = {"mode": "distribution", "type": "lognormal", "min_seq_len": 4, "max_seq_len": 60, "mean_seq_len": 20}
    inline = json.dumps({**lengths, "lognormal_sigma": 1.1}, separators=(",", ":"))
    flags = f"--mock-data --varlen-mock-dataset-config-json {inline} --train-iters 10"
    packed = runner.train(PACKED, flags, data=None)
    padded = runner.train(PADDED, flags, data=None)
    assert len(packed.losses) == 10
    for mine, theirs in zip(packed.iterations, padded.iterations, strict=True):
        assert (mine.samples, mine.targets) == (theirs.samples, theirs.targets)
        assert abs(mine.loss - theirs.loss) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs.loss)


# --- standing aside, and saying what is done ------------------------------------------------------


def test_without_our_flags_the_script_runs_as_if_we_were_not_there(runner: Runner) -> None:
    flags = "--mock-data --train-iters 5 --lr-decay-iters 5"
    with_hooks = runner.train(flags, data=None)
    without = runner.train(flags, data=None, hooks=False)
    assert with_hooks.losses == without.losses
    assert len(with_hooks.losses) == 5
    assert with_hooks.iterations == without.iterations
    ours = {name for name in with_hooks.arguments if name not in without.arguments}
    upstreams = ("use_varlen", "varlen_", "sequence_packing", "thd_", "pad_packed_", "dynamic_context_", "min_dynamic_")
    assert all(name.startswith(("packing_", *upstreams)) for name in ours), sorted(ours)
    unlike = {n for n, value in without.arguments.items() if with_hooks.arguments[n] != value}
    assert not unlike


def test_log_names_objective_scheduler_and_figures(runner: Runner, chats: Path) -> None:
    log = runner.train(PACKED, data=chats).log
    assert "objective: token-weighted" in log
    assert "per-token loss enforced" in log
    assert "scheduler first_fit, capacity 128 tokens" in log
    line = next(line for line in log.splitlines() if "packing iteration" in line)
    for word in (
        "samples: 8",
        "packs:",
        "microbatches:",
        "fill:",
        "padding:",
        "targets:",
        "targets/s:",
        "real tokens/s:",
    ):
        assert word in line


def test_dropout_is_warned_of(runner: Runner, chats: Path) -> None:
    flags = "--hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 2"
    run = runner.train(PACKED, flags, data=chats)
    assert "packed and an unpacked run draw different random numbers" in run.log
    assert "draw different random numbers" not in runner.train(PACKED, data=chats).log


def test_tensorboard_gets_the_figures(runner: Runner, chats: Path, tmp_path: Path) -> None:
    runner.train(PACKED, f"--train-iters 3 --tensorboard-dir {tmp_path}", data=chats)
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"packing/fill", "packing/targets", "packing/real tokens/s"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("packing/fill")] == [1, 2, 3]
    shares = ("fill", "alignment waste", "tail waste", "dummy waste")
    for one in zip(*(events.Scalars(f"packing/{name}") for name in shares), strict=True):
        assert sum(event.value for event in one) == pytest.approx(1, abs=1e-6), "every slot is accounted for"
    for name in ("step imbalance", "lockstep imbalance", "least lockstep imbalance", "least packs"):
        assert all(event.value >= 1 for event in events.Scalars(f"packing/{name}"))
