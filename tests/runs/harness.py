"""Runs of the real Megatron loop for tests: forked from one process that has imported it, cached by their flags."""

import contextlib
import functools
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.runs.zygote import Request

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
    packs: tuple[tuple[tuple[str, ...], ...], ...]
    """Of each rank, of each pass through its model: the fingerprints, in order; a dummy's is empty."""
    targets: int
    real_tokens: float | None
    """Sum of the samples' lengths that Megatron counts FLOPs from; None where it takes the sequence length."""
    squared_lengths: float | None
    """Sum of their squares, likewise."""
    state: str
    """Hash of rank 0's weights and optimizer state after the step."""
    skipped: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    exit_codes: tuple[int | None, ...]
    logs: tuple[str, ...]
    iterations: tuple[Iteration, ...] = ()
    unfinished: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """`Iteration.packs` of a step that ended the run before it was logged."""
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
    """Starts runs and remembers them: a reference run serves every test that compares with it.

    Args:
        folder: where runs leave their logs and records.
        preload: the module whose import brings all that a run needs into memory.
    """

    def __init__(self, folder: Path, preload: str = "tests.runs.preload") -> None:
        self._folder = folder
        self._preload = preload
        self._count = 0
        self._zygote: subprocess.Popen[str] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="runs_")
        """Temporary files of ranks and their workers: forked ranks leave them behind. Short, for sockets' sake."""
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

    def dry_run(self, *words: str, **environment: str) -> Run:
        """Start the launcher with `words` in `environment`, and nothing else that says where it would run."""
        return self._run(_dry_run, (words, environment), 1)

    def call(self, function: Callable[[], None], ranks: int = 1) -> None:
        """Run a module-level function in forked ranks with Megatron in memory; its exception fails the test."""
        run = self._run(_call, (function,), ranks)
        assert run.ok, f"exit codes {run.exit_codes}\n{_tails(run)}"

    def _train(self, flags: tuple[str, ...], data: Path | None, ranks: int, hooks: bool) -> Run:
        given = {flag for flag in flags if flag.startswith("--")}
        source = "" if data is None else f"--data-path {data} --split 100,0,0"
        usual = f"{MODEL} {TRAINING} {TOKENIZER} {source}".split()
        return self._run(_launch, ([*_without(usual, given), *flags], hooks), ranks)

    def _run(self, function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> Run:
        self._count += 1
        folder = self._folder / f"run{self._count}"
        folder.mkdir()
        request = Request(
            function=function, arguments=arguments, ranks=ranks, port=free_port(), folder=folder, seconds=RUN_SECONDS
        )
        codes = self._ask(request)
        logs = tuple((folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks))
        return Run(exit_codes=tuple(codes), logs=logs, **_collect(folder))

    def _ask(self, request: Request) -> list[int]:
        if self._zygote is None:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.runs.zygote", self._preload],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": self._scratch.name},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(pickle.dumps(request).hex() + "\n")
        self._zygote.stdin.flush()
        answer = self._zygote.stdout.readline()
        assert answer, f"the process that forks runs has ended with {self._zygote.wait()}; see its output above"
        return json.loads(answer)

    def close(self) -> None:
        """End the process that forks."""
        if self._zygote is not None:
            self._zygote.communicate()
        self._scratch.cleanup()


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


def _dry_run(words: Sequence[str], environment: dict[str, str]) -> None:
    from megatron_packing import launch

    for name in ("RANK", "WORLD_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    launch.main(words)


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
                packs=tuple(_frozen(step["packs"]) for step in steps),
                targets=sum(step["targets"] for step in steps),
                real_tokens=steps[0]["real_tokens"],
                squared_lengths=steps[0]["squared_lengths"],
                state=steps[0]["state"],
                skipped=bool(steps[0]["skipped"]),
            )
        )
    return {
        "iterations": tuple(iterations),
        "unfinished": tuple(_frozen(rank["unfinished"]) for rank in ranks),
        "weights": {name: weight for rank in ranks for name, weight in rank["weights"].items()},
        "arguments": ranks[0]["arguments"],
    }


def _frozen(packs: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(tuple, packs))


def _tails(run: Run) -> str:
    return "\n".join(f"--- rank {rank}\n{log[-4000:]}" for rank, log in enumerate(run.logs))


def free_port() -> int:
    """Below those that systems give to connections: gloo opens many, and one might take the port before rank 0 does."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports is free")
