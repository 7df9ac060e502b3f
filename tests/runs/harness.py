"""Runs of the real Megatron loop for tests: forked from one process that has imported it, cached by their flags."""

import functools
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RECORDED_SCRIPT = ROOT / "tests" / "runs" / "recorded_pretrain.py"
RUN_SECONDS = 150  # a run takes some 5 seconds; more means that a rank hangs

# A toy GPT that learns in 30 steps, fp32, no dropout.
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --normalization RMSNorm --swiglu --disable-bias-linear"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 30 --lr 1e-2 --min-lr 1e-3 --lr-decay-iters 30 "
    "--lr-warmup-iters 2 --seed 7 --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0"
)
TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 256 --null-tokenizer-eod-id 255"


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one training step was, over all ranks."""

    iteration: int
    loss: float | None
    consumed_samples: int
    samples: tuple[str, ...]
    """Sorted fingerprints of the samples that went through the model."""
    targets: int
    state: str
    """Hash of rank 0's weights and optimizer state after the step."""
    skipped: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    exit_codes: tuple[int | None, ...]
    logs: tuple[str, ...]
    iterations: tuple[Iteration, ...] = ()
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every rank ended with 0."""
        return all(code == 0 for code in self.exit_codes)

    @property
    def log(self) -> str:
        """All ranks' output."""
        return "\n".join(self.logs)

    @property
    def losses(self) -> list[float]:
        """Loss of each step that had one."""
        return [step.loss for step in self.iterations if step.loss is not None]


class Runner:
    """Starts runs and remembers them: a reference run serves every test that compares with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.runs.preload"])
        self._cached = functools.cache(self._train)

    def train(self, *flags: str, data: Path | None, ranks: int = 1, hooks: bool = True) -> Run:
        """Train the toy GPT with `flags` on top of the usual ones; fails the test if a rank does not end with 0.

        The same call gives the same finished run back.
        """
        run = self._cached(tuple(" ".join(flags).split()), data, ranks, hooks)
        assert run.ok, f"exit codes {run.exit_codes}\n{_tails(run)}"
        return run

    def attempt(self, *flags: str, data: Path | None, ranks: int = 1) -> Run:
        """Like `train`, for runs that should fail."""
        return self._cached(tuple(" ".join(flags).split()), data, ranks, True)

    def call(self, function: Callable[[], None], ranks: int = 1) -> None:
        """Run a module-level function in forked ranks with Megatron in memory; its exception fails the test."""
        run = self._run(_call, (function,), ranks)
        assert run.ok, f"exit codes {run.exit_codes}\n{_tails(run)}"

    def _train(self, flags: tuple[str, ...], data: Path | None, ranks: int, hooks: bool) -> Run:
        given = {flag for flag in flags if flag.startswith("--")}
        source = "" if data is None else f"--data-path {data} --split 100,0,0"
        usual = f"{MODEL} {TRAINING} {TOKENIZER} {source}".split()
        return self._run(_launch, ([*_without(usual, given), *flags], hooks), ranks)

    def _run(self, target: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> Run:
        self._count += 1
        folder = self._folder / f"run{self._count}"
        folder.mkdir()
        port = _free_port()
        processes = [
            self._context.Process(target=_rank_main, args=(rank, ranks, port, folder, target, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(RUN_SECONDS)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        logs = tuple((folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks))
        return Run(exit_codes=tuple(p.exitcode for p in processes), logs=logs, **_collect(folder))


def _rank_main(
    rank: int, ranks: int, port: int, folder: Path, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RECORD_TO=str(folder),
    )
    multiprocessing.set_start_method("fork", force=True)  # what a training script's own process would use
    with open(folder / f"rank{rank}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    code = 0
    try:
        target(*arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _launch(flags: list[str], hooks: bool) -> None:
    """The launcher's own way in; or, to see what a script does without us, the CPU runtime alone."""
    if hooks:
        from megatron_packing import launch

        launch.main(["--device", "cpu", str(RECORDED_SCRIPT), *flags])
        return
    import runpy

    from megatron_packing.mcore import cpu_runtime
    from megatron_packing.mcore import hooks as our_hooks

    our_hooks._skip_missing_makefile()  # else the wheel's missing Makefile ends the run
    sys.argv = [str(RECORDED_SCRIPT), *flags, *cpu_runtime.missing_flags(flags)]
    runpy.run_path(str(RECORDED_SCRIPT), run_name="__main__")


def _call(function: Callable[[], None]) -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    function()


def _without(flags: Sequence[str], given: set[str]) -> list[str]:
    """`flags` less those that `given` sets anew."""
    kept: list[str] = []
    keep = True
    for word in flags:
        if word.startswith("--"):
            keep = word not in given
        if keep:
            kept.append(word)
    return kept


def _collect(folder: Path) -> dict[str, Any]:
    records = sorted(folder.glob("record*.pt"))
    if not records:
        return {}
    ranks = [torch.load(path, weights_only=False) for path in records]
    iterations = []
    for steps in zip(*(rank["iterations"] for rank in ranks), strict=True):
        iterations.append(
            Iteration(
                iteration=steps[0]["iteration"],
                loss=steps[-1]["loss"],
                consumed_samples=steps[0]["consumed_samples"],
                samples=tuple(sorted(sample for step in steps for sample in step["samples"])),
                targets=sum(step["targets"] for step in steps),
                state=steps[0]["state"],
                skipped=bool(steps[0]["skipped"]),
            )
        )
    return {"iterations": tuple(iterations), "weights": ranks[0]["weights"], "arguments": ranks[0]["arguments"]}


def _tails(run: Run) -> str:
    return "\n".join(f"--- rank {rank}\n{log[-4000:]}" for rank, log in enumerate(run.logs))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
