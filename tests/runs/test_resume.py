"""A run that stops and resumes, or runs a step again, is the run that did neither: samples, packs, losses, weights.

24 samples, 4 a step, packs of 16 tokens; the run stops after step 3 of 6.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import tolerances
from tests.runs.harness import Iteration, Run, Runner

pytestmark = pytest.mark.run

LENGTHS = [5, 9, 3, 12, 7, 2, 11, 4, 6, 8, 10, 1] * 2
FLAGS = (
    "--packing-dataset tests.runs.datasets:GivenIds --max-seqlen-per-dp-cp-rank 16 --seq-length 16 "
    "--max-position-embeddings 16 --global-batch-size 4 --train-iters 6 --lr-decay-iters 6 --use-distributed-optimizer"
)
PADDED = FLAGS.replace("--max-seqlen-per-dp-cp-rank 16", "--varlen-sbhd-validation")
SAVING = "--save-interval 3 --exit-interval 3 --ckpt-format torch_dist"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
# Megatron asks for this where the optimizer's state is distributed and TP or PP may change.
ANY_TP_PP = "--dist-ckpt-optim-fully-reshardable"
CYCLIC = "--dataloader-type cyclic"

Stop = Callable[..., tuple[Run, Path]]
"""Flags and ranks to the first half of a run and the folder of its checkpoint."""


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory.mktemp("resume") / "rows.jsonl", not_learned=())


@pytest.fixture(scope="session")
def rows_with_empty_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The steps before and after the stop hold no target."""
    return _written(tmp_path_factory.mktemp("resume") / "empty.jsonl", not_learned=range(8, 16))


@pytest.fixture(scope="session")
def ten_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two and a half steps: epochs end within steps."""
    return _written(tmp_path_factory.mktemp("resume") / "ten.jsonl", not_learned=(), lengths=LENGTHS[:10])


def _written(path: Path, not_learned: range | tuple[()], lengths: list[int] = LENGTHS) -> Path:
    rows = [
        {"ids": [(10 * i + k) % 250 for k in range(length + 1)], "learn": i not in not_learned}
        for i, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def stop(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Stop:
    base = tmp_path_factory.mktemp("checkpoints")

    def first_half(flags: str, data: Path, ranks: int = 1) -> tuple[Run, Path]:
        folder = base / f"{data.stem}-{ranks}-{flags.replace('--', '').replace(' ', '-')}"
        return runner.train(FLAGS, flags, SAVING, f"--save {folder}", data=data, ranks=ranks), folder

    return first_half


def assert_continued(first: Run, second: Run, whole: Run) -> None:
    """Bit for bit: `whole` is the run that did not stop."""
    assert [step.iteration for step in first.iterations] == [1, 2, 3]
    assert [step.iteration for step in second.iterations] == [4, 5, 6]
    assert [step.consumed_samples for step in whole.iterations] == [4, 8, 12, 16, 20, 24]
    assert first.iterations == whole.iterations[:3]
    assert second.iterations == whole.iterations[3:], "samples, packs, losses, weights and optimizer state"


def assert_each_once(*runs: Run) -> None:
    samples = [sample for run in runs for step in run.iterations for sample in step.samples]
    assert len(samples) == len(set(samples)) == len(LENGTHS)


def assert_same_but_for_rounding(run: tuple[Iteration, ...], reference: tuple[Iteration, ...]) -> None:
    for mine, theirs in zip(run, reference, strict=True):
        assert (mine.iteration, mine.consumed_samples) == (theirs.iteration, theirs.consumed_samples)
        assert (mine.samples, mine.targets, mine.skipped) == (theirs.samples, theirs.targets, theirs.skipped)
        assert abs(mine.loss - theirs.loss) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs.loss)


# --- stop and resume ------------------------------------------------------------------------------


# name -> (flags of the first half alone, of the second half alone, of both, ranks)
SAME_LAYOUT = {
    "one rank": ("", "", "", 1),
    "2 ranks, overlap": ("", "", OVERLAP, 2),
    "from 0 to 2 loader workers": ("", "--num-workers 2", "", 1),
    "from 2 to 0 loader workers": ("--num-workers 2", "", "", 1),
    "shuffled by Megatron": ("", "", CYCLIC, 1),
}


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_resumed_run_is_the_uninterrupted_run(name: str, runner: Runner, rows: Path, stop: Stop) -> None:
    before, after, both, ranks = SAME_LAYOUT[name]
    whole = runner.train(FLAGS, both, data=rows, ranks=ranks)
    first, folder = stop(f"{before} {both}".strip(), rows, ranks)
    second = runner.train(FLAGS, both, after, f"--load {folder}", data=rows, ranks=ranks)
    assert_continued(first, second, whole)
    assert_each_once(first, second)
    if CYCLIC in both:
        in_order = runner.train(FLAGS, data=rows)
        assert whole.iterations[0].samples != in_order.iterations[0].samples, "the samples must have been shuffled"


# name -> (ranks of the first half, its flags, ranks of the second half, its flags)
OTHER_LAYOUT = {
    "from 1 rank to 2": (1, "", 2, ""),
    "from 2 ranks to 1": (2, OVERLAP, 1, ""),
    "from CP 1 to CP 2": (1, "", 2, "--context-parallel-size 2"),
    "from TP 2 to PP 2": (2, f"{TP2} {ANY_TP_PP}", 2, f"{PP2} {ANY_TP_PP}"),
    "from PP 2 to 1 rank": (2, f"{PP2} {ANY_TP_PP}", 1, ANY_TP_PP),
    "from 1 rank to TP 2 with SP": (1, ANY_TP_PP, 2, f"{TP2} --sequence-parallel {ANY_TP_PP}"),
    # With data sharding Megatron shuffles by rank, so that other ranks would draw some samples twice.
    "shuffled by Megatron, from 1 rank to 2": (1, CYCLIC, 2, f"{CYCLIC} --no-data-sharding"),
}


@pytest.mark.parametrize("name", OTHER_LAYOUT)
def test_resume_on_another_layout(name: str, runner: Runner, rows: Path, stop: Stop) -> None:
    ranks_before, flags_before, ranks_after, flags_after = OTHER_LAYOUT[name]
    # On the layout of the first half: under PP, Megatron draws each stage's first weights from a seed of its own.
    whole = runner.train(FLAGS, flags_before, data=rows, ranks=ranks_before)
    first, folder = stop(flags_before, rows, ranks_before)
    second = runner.train(FLAGS, flags_after, f"--load {folder}", data=rows, ranks=ranks_after)
    assert_each_once(first, second)
    assert_same_but_for_rounding((*first.iterations, *second.iterations), whole.iterations)


def test_resume_from_a_folder_whose_tracker_a_full_disk_emptied(
    runner: Runner, rows: Path, stop: Stop, tmp_path: Path
) -> None:
    """Every rank is told what to do, and doing it goes on; Megatron alone would end with exit code 0."""
    first, whole_folder = stop("", rows, 1)
    folder = tmp_path / "saved"
    shutil.copytree(whole_folder, folder)
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    refused = runner.attempt(FLAGS, f"--load {folder}", data=rows, ranks=2)
    assert refused.exit_codes == (2, 2)
    for log in refused.logs:
        assert "iter_0000003: write 3 into the file" in log.splitlines()[-1]
    tracker.write_text("3")
    second = runner.train(FLAGS, f"--load {folder}", data=rows)
    assert_continued(first, second, runner.train(FLAGS, data=rows))


def test_shuffled_epochs_that_end_within_steps(runner: Runner, ten_rows: Path, stop: Stop) -> None:
    """Each row once an epoch, the same for the reference, for workers, and after a change to DP 2 and CP 2."""
    shuffle = "--packing-shuffle"
    whole = runner.train(FLAGS, shuffle, data=ten_rows)
    assert "an epoch of 10 rows is 2 steps of 4 and 2 rows left" in whole.log
    drawn = [Counter(step.samples) for step in whole.iterations]
    assert set((drawn[0] + drawn[1]).values()) == {1}
    two_epochs = drawn[0] + drawn[1] + drawn[2] + drawn[3] + drawn[4]
    assert len(two_epochs) == 10
    assert set(two_epochs.values()) == {2}
    in_order = runner.train(FLAGS, data=ten_rows)
    for steps in (whole.iterations, in_order.iterations):
        assert [step.consumed_samples for step in steps] == [4, 8, 12, 16, 20, 24]
    assert drawn[0] != Counter(in_order.iterations[0].samples)
    padded = runner.train(PADDED, shuffle, data=ten_rows)
    assert_same_but_for_rounding(padded.iterations, whole.iterations)
    first, folder = stop(f"{shuffle} --num-workers 2", ten_rows)
    layout = "--context-parallel-size 2 --num-workers 1"
    second = runner.train(FLAGS, shuffle, layout, f"--load {folder}", data=ten_rows, ranks=4)
    assert first.iterations == whole.iterations[:3]
    assert_same_but_for_rounding(second.iterations, whole.iterations[3:])


def test_resume_from_an_asynchronous_save(runner: Runner, rows: Path, stop: Stop) -> None:
    """Written by a process of its own while training goes on. Megatron's own writer; the other one is a package."""
    first, folder = stop("--async-save --use-persistent-ckpt-worker --async-strategy mcore", rows)
    assert first.arguments["async_save"] == "True"
    second = runner.train(FLAGS, f"--load {folder}", data=rows)
    assert_continued(first, second, runner.train(FLAGS, data=rows))


def _what_is_saved_stays() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron_packing.mcore import cpu_runtime

    cpu_runtime.patch_megatron()
    weight = torch.ones(3)
    ((_, _, (_, ((_, staged),))),) = FileSystemWriterAsync.preload_tensors([("file", "key", ([], [("item", weight)]))])
    weight.zero_()
    assert staged.tolist() == [1.0, 1.0, 1.0]


def test_what_an_asynchronous_save_writes_is_what_was_there_when_it_began(runner: Runner) -> None:
    """Training goes on meanwhile, and on the CPU in the very tensors that are saved."""
    runner.call(_what_is_saved_stays)


@pytest.mark.parametrize(("flags", "ranks"), [("", 1), (OVERLAP, 2)])
def test_steps_without_targets_around_the_stop(
    flags: str, ranks: int, runner: Runner, rows_with_empty_steps: Path, stop: Stop
) -> None:
    data = rows_with_empty_steps
    whole = runner.train(FLAGS, flags, data=data, ranks=ranks)
    first, folder = stop(flags, data, ranks)
    second = runner.train(FLAGS, flags, f"--load {folder}", data=data, ranks=ranks)
    assert_continued(first, second, whole)
    assert [step.skipped for step in whole.iterations] == [False, False, True, True, False, False]
    states = [step.state for step in whole.iterations]
    assert states[2] == states[3] != states[4]
    assert states[1] == states[2] or OVERLAP in flags, "with overlap, weights arrive in the next step's forward"
    assert_same_but_for_rounding(whole.iterations, runner.train(FLAGS, data=data).iterations)
    for half in (first, second):
        assert "steps without targets, skipped: 1" in half.log


# --- a step that Megatron runs again --------------------------------------------------------------

REPLAYING = f"--own-script {Path(__file__).with_name('replaying_script.py')}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_that_runs_again_gets_the_same_packs(ranks: int, runner: Runner, rows: Path) -> None:
    """A check rejects steps 3 and 4 on rank 0; Megatron runs both again, and goes on."""
    plain = runner.train(FLAGS, data=rows, ranks=ranks)
    replayed = runner.train(FLAGS, REPLAYING, data=rows, ranks=ranks)
    assert replayed.logs[0].count("is reproducible within the tolerance") == 2
    for mine, theirs in zip(replayed.iterations, plain.iterations, strict=True):
        times = 2 if mine.iteration in (3, 4) else 1
        assert mine.packs == tuple(times * packs for packs in theirs.packs)
        assert (mine.loss, mine.state, mine.consumed_samples) == (theirs.loss, theirs.state, theirs.consumed_samples)


def test_step_that_runs_again_is_logged_once(runner: Runner, rows_with_empty_steps: Path) -> None:
    replayed = runner.train(FLAGS, REPLAYING, data=rows_with_empty_steps)
    assert replayed.log.count("packing iteration") == 6
    assert "rows dropped: 8 | steps without targets, skipped: 2 |" in replayed.log
    assert "skipped: 3" not in replayed.log


def test_step_that_runs_again_counts_its_work_once(runner: Runner, rows: Path) -> None:
    plain = runner.train(FLAGS, data=rows)
    replayed = runner.train(FLAGS, REPLAYING, data=rows)
    for mine, theirs in zip(replayed.iterations, plain.iterations, strict=True):
        assert (mine.real_tokens, mine.squared_lengths) == (theirs.real_tokens, theirs.squared_lengths)


def test_skipped_step_that_runs_again_skips_only_itself(runner: Runner, rows_with_empty_steps: Path) -> None:
    plain = runner.train(FLAGS, data=rows_with_empty_steps)
    replayed = runner.train(FLAGS, REPLAYING, data=rows_with_empty_steps)
    assert replayed.logs[0].count("is reproducible within the tolerance") == 2
    assert [step.skipped for step in replayed.iterations] == [step.skipped for step in plain.iterations]
    assert [step.state for step in replayed.iterations] == [step.state for step in plain.iterations]


def test_run_that_a_fault_ends_resumes_with_the_same_packs(runner: Runner, rows: Path, tmp_path: Path) -> None:
    """Megatron's own injector: a reproducible fault in step 2 ends the run with a checkpoint; step 2 comes again."""
    step_2 = runner.train(FLAGS, data=rows).iterations[1]
    fault = "--error-injection-rate 1 --error-injection-type correct_result"
    ended = runner.attempt(FLAGS, fault, SAVING, f"--save {tmp_path}", data=rows)
    assert ended.exit_codes == (16,), "Megatron's code for: resume me elsewhere"
    assert ended.unfinished == (2 * step_2.packs[0],)
    resumed = runner.attempt(FLAGS, f"--load {tmp_path}", data=rows)
    assert resumed.exit_codes == (16,), "the same device again, which proves nothing"
    assert resumed.unfinished == step_2.packs
