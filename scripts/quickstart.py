"""What does packing change? Trains a small GPT on CPU, padded and packed, on the same samples, and compares.

Both are live runs through the real launcher, taking turns iteration by iteration (turns.py), with the same attention,
so that packing is all that differs. A third run, padded on Megatron's stock attention, is shown beside for its first
iterations. Writes report.json and report.png, a log for each run, and the packed run's weights. Cost: about four
minutes on two cores.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paired_runs import (
    GLOBAL_BATCH_SIZE,
    MICRO_BATCH_SIZE,
    ROOT,
    DifferentSamples,
    Figures,
    Layout,
    Training,
    by_iteration,
    cores,
    launch_command,
    max_relative_difference,
    thread_variables,
)
from turns import Run, RunFailed, Turns, leave_on_signals

if TYPE_CHECKING:
    from docstring_corpus import CorpusPaths
    from rich.console import Console

VOCAB_SIZE = 4096
STOCK_ITERATIONS = 3
"""The stock run only shows its speed, and one of its iterations costs two of the padded run's."""

PADDED, PACKED, STOCK = "padded", "packed", "stock"


def build_training(corpus: "CorpusPaths", options: argparse.Namespace) -> Training:
    """What all three runs share."""
    data = ["--data-path", str(corpus.jsonl), "--tokenizer-type", "HuggingFaceTokenizer"]
    return Training(
        seq_length=options.seq_length,
        iterations=options.iters,
        data_flags=[*data, "--tokenizer-model", str(corpus.tokenizer_dir)],
    )


def build_runs(training: Training, options: argparse.Namespace) -> list[Run]:
    """The three runs; the packed one saves its weights at the end."""
    checkpoint = options.out / "checkpoint"
    save = ["--save", str(checkpoint), "--save-interval", str(options.iters), "--ckpt-format", "torch_dist"]
    stock = min(STOCK_ITERATIONS, options.iters)
    layouts = [
        (Layout(name=PADDED), options.iters),
        (Layout(name=PACKED, capacity=options.capacity, extra=save), options.iters),
        (Layout(name=STOCK, attention="stock"), stock),
    ]
    return [
        Run(
            name=layout.name,
            command=launch_command(training, layout, iterations, options.nproc),
            iterations=iterations,
            log=options.out / f"{layout.name}.log",
        )
        for layout, iterations in layouts
    ]


# --- training ---------------------------------------------------------------------------------------------------------


def train(runs: Sequence[Run], threads: int, console: "Console") -> dict[str, Figures]:
    """Let the runs take turns to the end, and show how far they are.

    Raises:
        RunFailed: a run died.
        DifferentSamples: the comparison would mean nothing.
    """
    figures = {run.name: Figures() for run in runs}
    with Turns(runs, thread_variables(threads)) as turns:
        with console.status(f"Starting {len(runs)} runs: {', '.join(figures)}"):
            turns.wait_until_ready()
        for iteration, rows in by_iteration(turns, runs):
            for name, row in rows.items():
                figures[name].turns.append(row)
            console.print(_progress_line(iteration, runs[0].iterations, rows), soft_wrap=True, highlight=False)
            if iteration == runs[0].iterations:
                console.print("Saving the packed run's weights", highlight=False)
    return figures


def _progress_line(iteration: int, iterations: int, rows: Mapping[str, Mapping[str, Any]]) -> str:
    words = [
        f"{name} loss {row['loss']:.6f}, {row['real_tokens'] / row['wall_s']:5,.0f} tokens/s"
        for name, row in rows.items()
    ]
    truncated = rows[PACKED]["truncated"]
    note = f" | {truncated} truncated" if truncated else ""
    return f"[bold]iteration {iteration:3d}/{iterations}[/] | {' | '.join(words)}{note}"


# --- result -----------------------------------------------------------------------------------------------------------


def build_result(figures: Mapping[str, Figures]) -> dict[str, Any]:
    """What quickstart_report draws and prints, and more for those who read the JSON."""
    padded, packed = figures[PADDED], figures[PACKED]
    speeds = {name: run.tokens_per_second("wall_s") for name, run in figures.items()}
    cpu_speeds = {name: run.tokens_per_second("cpu_s") for name, run in figures.items()}
    return {
        **{name: _summary(run, speeds[name], cpu_speeds[name]) for name, run in figures.items()},
        "slot_ratio": padded.total("slots") / packed.total("slots"),
        "flop_ratio": padded.total("flops") / packed.total("flops"),
        "speed_ratio": speeds[PACKED] / speeds[PADDED],
        "cpu_speed_ratio": cpu_speeds[PACKED] / cpu_speeds[PADDED],
        "max_relative_loss_difference": max_relative_difference(packed.all("loss"), padded.all("loss")),
        "truncated": packed.total("truncated"),
        "samples": packed.total("samples"),
    }


def _summary(run: Figures, speed: float, cpu_speed: float) -> dict[str, Any]:
    return {
        "losses": run.all("loss"),
        "real_tokens_per_s": speed,
        "real_tokens_per_cpu_s": cpu_speed,
        **{name: run.total(name) for name in ("slots", "real_tokens", "targets")},
    }


def corpus_lengths(corpus: "CorpusPaths") -> list[int]:
    """Tokens of every sample before truncation: those of the conversation, less one for the shift."""
    from docstring_corpus import count_tokens, render
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_dir / "tokenizer.json"))
    lines = corpus.jsonl.read_text(encoding="utf-8").splitlines()
    texts = [render(json.loads(line)["messages"]) for line in lines]
    return [count - 1 for count in count_tokens(tokenizer, texts, lambda count: None)]


def print_notes(result: Mapping[str, Any], options: argparse.Namespace, console: "Console") -> None:
    """Say what the table leaves open: the baseline, the stock run, truncation."""
    padded, stock = result[PADDED], result[STOCK]
    iterations = len(stock["losses"])
    difference = max_relative_difference(stock["losses"], padded["losses"][:iterations])
    lines = [
        f"padded: micro-batch {MICRO_BATCH_SIZE}, rows filled up to {options.seq_length:,}; our attention, as packed",
        f"packed: micro-batch of one pack, at most {options.capacity:,} tokens",
        "speeds: median over iterations by the wall clock, iteration 1 left out; by CPU time packed is "
        f"{result['cpu_speed_ratio']:.2f}x",
        f"truncated to {options.seq_length:,} tokens: {result['truncated']} of {result['samples']:,} samples",
    ]
    if iterations > 1:
        speed = stock["real_tokens_per_s"]
        ratio = result[PACKED]["real_tokens_per_s"] / speed
        lines.append(
            f"padded on Megatron's stock attention, iterations 2 to {iterations} only: {speed:,.0f} real tokens/s "
            f"(packed {ratio:.2f}x), loss difference to padded {difference:.1e}"
        )
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


# --- command line -----------------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace, console: "Console") -> None:
    """Corpus, training, report."""
    from docstring_corpus import build_corpus
    from quickstart_report import print_table, write_report
    from rich.progress import Progress

    started = time.perf_counter()
    with Progress(console=console) as progress:
        corpus = build_corpus(options.out, VOCAB_SIZE, progress=progress)
    shutil.rmtree(options.out / "checkpoint", ignore_errors=True)
    runs = build_runs(build_training(corpus, options), options)
    threads = options.threads or max(1, cores() // options.nproc)
    console.print(f"Each run: {options.nproc} rank(s) of {threads} thread(s)", highlight=False)
    figures = train(runs, threads, console)
    result = build_result(figures)
    first_packs = figures[PACKED].turns[0]["packs"]
    paths = write_report(result, corpus_lengths(corpus), first_packs, options.out, options.capacity, options.seq_length)
    print_table(result, console)
    print_notes(result, options, console)
    for path in (*paths, options.out / "checkpoint"):
        console.print(str(path), soft_wrap=True, highlight=False)
    console.print(f"{time.perf_counter() - started:.0f} s", highlight=False)


def main() -> int:
    """Run the command line; the exit code."""
    options = _parse()
    leave_on_signals()
    from rich.console import Console

    console = Console()
    try:
        run_all(options, console)
    except (RunFailed, DifferentSamples, OSError) as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted; the runs are ended.", file=sys.stderr)
        return 130
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on CPU, padded and packed, on the same samples, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--iters", type=int, default=30, metavar="N", help="iterations of the padded and packed run")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="data-parallel ranks of each run")
    parser.add_argument("--seq-length", type=int, default=512, metavar="N", help="longer samples are truncated")
    parser.add_argument("--capacity", type=int, default=1024, metavar="N", help="tokens of a pack")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a rank; default: cores / ranks")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "quickstart", metavar="DIR", help="folder to write to"
    )
    options = parser.parse_args()
    if options.iters < 2:
        parser.error(f"--iters {options.iters}: speeds leave out iteration 1, so that at least 2 are needed.")
    if options.nproc < 1 or GLOBAL_BATCH_SIZE % (MICRO_BATCH_SIZE * options.nproc):
        parser.error(
            f"--nproc {options.nproc}: the step's {GLOBAL_BATCH_SIZE} samples must make whole micro-batches of "
            f"{MICRO_BATCH_SIZE} on every rank. Use 1, 2, 4 or 8."
        )
    if options.capacity < options.seq_length:
        parser.error(
            f"--capacity {options.capacity}: below --seq-length {options.seq_length}, so that the longest sample fits "
            "in no pack. Raise it."
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
