"""Which runs are compared, how are they started, and what do their figures say?

`Layout`s are ways of laying the same samples out; `launch_command` gives the command line of one. `Figures` collects
what turns reported, and the functions below it put two runs in relation. Needs the standard library only.
"""

import json
import os
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turns import Run, Turns

ROOT = Path(__file__).resolve().parents[1]
TRAIN_SCRIPT = ROOT / "scripts" / "paired_pretrain.py"

GLOBAL_BATCH_SIZE = 32
"""Samples of a step."""

MICRO_BATCH_SIZE = 4
"""Of runs that pad: more than one row at a time, so that padding is not also charged for small matrix products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small GPT in the manner of Llama: GQA, SwiGLU, RMSNorm, rotary positions."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    query_groups: int = 2

    def flags(self) -> list[str]:
        """Megatron's flags for it."""
        text = f"""
            --num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}
            --group-query-attention --num-query-groups {self.query_groups} --swiglu --normalization RMSNorm
            --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
            --attention-dropout 0 --hidden-dropout 0
        """
        return shlex.split(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way of laying a step's samples out."""

    name: str
    capacity: int | None = None
    """Tokens of a pack; None: not packed."""
    scheduler: str = "first_fit"
    """What makes the packs."""
    balance: str = "auto"
    """What the scheduler `balanced` keeps small."""
    attention: str = "sdpa"
    """Of --packing-attention: ours, Megatron's own (`stock`) where nothing is packed, or Transformer Engine's."""
    sort: bool = False
    """Pad each microbatch to its own longest, after sorting the step's samples by length."""
    micro_batch_size: int = MICRO_BATCH_SIZE
    """Rows of a microbatch, of a run that pads."""
    extra: Sequence[str] = ()
    """Further flags."""

    def flags(self) -> list[str]:
        """Flags of ours and of the training script."""
        flags = ["--use-varlen-dataset", "--packing-overlong", "truncate", "--packing-attention", self.attention]
        if self.capacity is not None:
            flags += ["--sequence-packing-scheduler", self.scheduler, "--packing-balance", self.balance]
            flags += ["--micro-batch-size", "1", "--max-seqlen-per-dp-cp-rank", str(self.capacity)]
        else:
            flags += ["--varlen-sbhd-validation", "--micro-batch-size", str(self.micro_batch_size)]
        return [*flags, *(["--sort-microbatches"] if self.sort else []), *self.extra]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all runs of a comparison share."""

    seq_length: int
    iterations: int
    """Of the whole schedule; a run may be given fewer turns."""
    data_flags: Sequence[str]
    """Where samples come from, and the tokenizer."""
    global_batch_size: int = GLOBAL_BATCH_SIZE
    learning_rate: float = 1e-3
    seed: int = 1234
    model: Model = field(default_factory=Model)
    device: str = "cpu"

    def flags(self, iterations: int) -> list[str]:
        """Megatron's flags; the learning rate follows the whole schedule however many iterations are run."""
        text = f"""
            --seq-length {self.seq_length} --max-position-embeddings {self.seq_length}
            --global-batch-size {self.global_batch_size} --train-iters {iterations}
            --lr {self.learning_rate} --min-lr {self.learning_rate / 10} --lr-decay-style cosine
            --lr-decay-iters {self.iterations} --lr-warmup-iters {min(3, self.iterations - 1)}
            --weight-decay 0.1 --clip-grad 1.0 --seed {self.seed} --split 100,0,0 --num-workers 0
            --eval-iters 0 --eval-interval 1000000 --log-interval 1
        """
        return [*self.model.flags(), *shlex.split(text), *self.data_flags]


def launch_command(training: Training, layout: Layout, iterations: int, ranks: int) -> list[str]:
    """The command line that trains `layout` through the launcher, with torchrun for more than one rank."""
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    launcher = ["megatron_packing.launch", "--device", training.device, str(TRAIN_SCRIPT)]
    return [*start, *launcher, *training.flags(iterations), *layout.flags()]


def thread_variables(threads: int) -> dict[str, str]:
    """The same number of threads for every rank of every run."""
    # Waiting threads sleep: spinning ones would be counted as work and slow the run whose turn it is.
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- made-up samples --------------------------------------------------------------------------------------------------

ALPACA_LENGTHS = ROOT / "scripts" / "data" / "alpaca_lengths.json"
VOCAB_SIZE = 4096
EOS = VOCAB_SIZE - 1


def alpaca_lengths() -> list[int]:
    """Tokens of each of the alpaca instructions, after the shift."""
    lengths: list[int] = json.loads(ALPACA_LENGTHS.read_text(encoding="utf-8"))["lengths"]
    return lengths


def write_samples(path: Path, lengths: Sequence[int]) -> None:
    """Write documents of these lengths: ids that rise by a step and wrap around, which a model can learn."""
    rows = []
    for number, length in enumerate(lengths):
        draw = random.Random(number)
        start, step = draw.randrange(EOS), draw.randint(1, 4)
        ids = ((start + step * place) % EOS for place in range(length))  # the end-of-document id is added in training
        rows.append(json.dumps({"text": " ".join(map(str, ids))}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(rows), encoding="utf-8")


def data_flags(path: Path) -> list[str]:
    """Ids written as numbers, and the tokenizer that reads them so."""
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
    return ["--data-path", str(path), *tokenizer, "--null-tokenizer-eod-id", str(EOS)]


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """What one run reported, an entry an iteration."""

    turns: list[Mapping[str, Any]] = field(default_factory=list)

    def all(self, name: str) -> list[Any]:
        """A figure at every iteration."""
        return [turn[name] for turn in self.turns]

    def total(self, name: str) -> Any:
        """A figure over all iterations."""
        return sum(self.all(name))

    def after_first(self, name: str) -> list[Any]:
        """A figure at every iteration but the first, which also pays for what happens once."""
        return self.all(name)[1:]

    def tokens_per_second(self, clock: str) -> float:
        """Real tokens per second of `clock` (wall_s or cpu_s): the median iteration, the first left out.

        The median, because one iteration that another program disturbs may take several times as long.
        """
        pairs = zip(self.after_first("real_tokens"), self.after_first(clock), strict=True)
        return statistics.median(tokens / seconds for tokens, seconds in pairs)


def median_ratio(over: Figures, under: Figures, name: str) -> float:
    """Median over iterations of a figure's ratio, the first left out; a disturbed iteration moves it little."""
    pairs = zip(over.after_first(name), under.after_first(name), strict=True)
    return statistics.median(a / b for a, b in pairs)


def share_of_waiting(run: Figures) -> float:
    """Planning and exchange, of the wall time of an iteration; the median, the first iteration left out."""
    waits = zip(*(run.after_first(name) for name in ("plan_ms", "exchange_ms", "wall_s")), strict=True)
    return statistics.median((plan + exchange) / (1000 * wall) for plan, exchange, wall in waits)


def max_relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest |a - b| / max(1, |b|) over the iterations: relative, but absolute where the loss is below 1."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, reference, strict=True))


def by_iteration(turns: Turns, runs: Sequence[Run]) -> Iterator[tuple[int, dict[str, Mapping[str, Any]]]]:
    """The turns of each iteration, by run, in the order of `runs`.

    Raises:
        DifferentSamples: the comparison would mean nothing.
        RunFailed: a run died.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    for iteration, name, row in turns.take():
        rows[name] = row
        if len(rows) == sum(iteration <= run.iterations for run in runs):
            check_same_samples(iteration, rows)
            yield iteration, {run.name: rows[run.name] for run in runs if run.name in rows}
            rows = {}


def take_turns(
    runs: Sequence[Run],
    environment: Mapping[str, str],
    told: Callable[[int, Mapping[str, Mapping[str, Any]]], None] = lambda iteration, rows: None,
) -> dict[str, Figures]:
    """Let the runs take turns to the end.

    Args:
        runs: what to start.
        environment: variables for all runs.
        told: called after each iteration with its number and what each run reported.

    Raises:
        DifferentSamples: the comparison would mean nothing.
        RunFailed: a run died.
    """
    figures = {run.name: Figures() for run in runs}
    with Turns(runs, environment) as turns:
        for iteration, rows in by_iteration(turns, runs):
            for name, row in rows.items():
                figures[name].turns.append(row)
            told(iteration, rows)
    return figures


class DifferentSamples(Exception):
    """Two runs trained on different samples in an iteration, so that comparing them means nothing."""


def check_same_samples(iteration: int, turns: Mapping[str, Mapping[str, Any]]) -> None:
    """Hold the runs of one iteration to the same samples: their number, tokens, targets and contents.

    Raises:
        DifferentSamples: naming the runs and the figure.
    """
    first, *others = turns
    for other in others:
        for name in ("samples", "real_tokens", "targets", "samples_digest"):
            if turns[first][name] != turns[other][name]:
                raise DifferentSamples(
                    f"iteration {iteration}: {name} is {turns[first][name]} in the {first} run and "
                    f"{turns[other][name]} in the {other} run. Runs of one comparison must get the same data flags, "
                    "seed and global batch size."
                )
