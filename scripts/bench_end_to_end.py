"""How much faster is a packed run on CPU, against padding and against sorting by length, and what eats the rest?

For each sequence length, live runs of one small GPT take turns iteration by iteration on the same samples: padded with
micro-batch 4, sorted by length and padded within the micro-batch, and packed at each capacity by each scheduler; all
with our attention.
Sample lengths are those of the alpaca instructions (data/alpaca_lengths.json), token ids are made up. Time is the CPU
time of the processes, so that other programs on the machine disturb little. The FLOP ratio is what packing could give
if every floating point operation took the same time. Cost: some minutes; see --iters.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paired_runs import (
    GLOBAL_BATCH_SIZE,
    MICRO_BATCH_SIZE,
    ROOT,
    DifferentSamples,
    Figures,
    Layout,
    Training,
    alpaca_lengths,
    data_flags,
    launch_command,
    max_relative_difference,
    median_ratio,
    share_of_waiting,
    take_turns,
    thread_variables,
    write_samples,
)
from rich.console import Console
from rich.table import Table
from turns import Run, RunFailed, leave_on_signals

SAMPLES = "samples.jsonl"
PADDED, SORTED = "padded", "sorted"

SORTED_TARGET_SEQ_LENGTH, SORTED_TARGET = 1024, 1.10
"""At this sequence length packing must beat sorting by this factor."""

SHARE_TARGETS = {1: 0.02, 2: 0.05}
"""Planning and exchange may take this much of an iteration, by data-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A sequence length and a capacity, in tokens, and how near to the FLOP ratio packing must come there."""

    seq_length: int
    capacity: int
    target: float

    @property
    def name(self) -> str:
        """As on the command line: 1024/4096."""
        return f"{self.seq_length}/{self.capacity}"


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(seq_length=1024, capacity=4096, target=0.90),
        Setting(seq_length=1024, capacity=1024, target=0.85),
        Setting(seq_length=512, capacity=2048, target=0.88),
        Setting(seq_length=512, capacity=512, target=0.80),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scheduler gave in one setting. Ratios of times are medians over iterations, the first left out."""

    setting: str
    scheduler: str
    slot_ratio: float
    flop_ratio: float
    padded_over_packed: float
    """CPU time of the padded run over that of the packed one."""
    of_flop_ratio: float
    of_flop_ratio_target: float
    sorted_over_packed: float
    sorted_over_packed_target: float | None
    max_relative_loss_difference: float
    plan_ms: float
    exchange_ms: float
    share: float
    """Planning and exchange, of the wall time of an iteration."""
    share_target: float | None


def measure(seq_length: int, settings: Sequence[Setting], options: argparse.Namespace) -> dict[str, Figures]:
    """Run every layout of one sequence length, in turns."""
    layouts = [Layout(name=PADDED), Layout(name=SORTED, sort=True)]
    layouts += [
        Layout(name=packed_name(setting, scheduler), capacity=setting.capacity, scheduler=scheduler)
        for setting in settings
        for scheduler in options.schedulers
    ]
    samples = options.out / SAMPLES
    training = Training(seq_length=seq_length, iterations=options.iters, data_flags=data_flags(samples))
    runs = [
        Run(
            name=layout.name,
            command=launch_command(training, layout, options.iters, options.nproc),
            iterations=options.iters,
            log=options.out / f"{seq_length}-{layout.name.replace('/', '-').replace(' ', '-')}.log",
        )
        for layout in layouts
    ]

    def tell(iteration: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
        seconds = ", ".join(f"{name} {row['cpu_s']:.2f}" for name, row in rows.items())
        said = f"seq {seq_length}, iteration {iteration}/{options.iters}, CPU s: {seconds}"
        print(said, file=sys.stderr, flush=True)

    return take_turns(runs, thread_variables(options.threads), tell)


def packed_name(setting: Setting, scheduler: str) -> str:
    """What the packed run of a setting is called."""
    return f"{setting.name} {scheduler}"


def outcome(setting: Setting, scheduler: str, figures: Mapping[str, Figures], ranks: int) -> Outcome:
    """Put the packed run of `setting` in relation to its baselines."""
    padded, sorted_run, packed = figures[PADDED], figures[SORTED], figures[packed_name(setting, scheduler)]
    flop_ratio = padded.total("flops") / packed.total("flops")
    speedup = median_ratio(padded, packed, "cpu_s")
    return Outcome(
        setting=setting.name,
        scheduler=scheduler,
        slot_ratio=padded.total("slots") / packed.total("slots"),
        flop_ratio=flop_ratio,
        padded_over_packed=speedup,
        of_flop_ratio=speedup / flop_ratio,
        of_flop_ratio_target=setting.target,
        sorted_over_packed=median_ratio(sorted_run, packed, "cpu_s"),
        sorted_over_packed_target=SORTED_TARGET if setting.seq_length == SORTED_TARGET_SEQ_LENGTH else None,
        max_relative_loss_difference=max_relative_difference(packed.all("loss"), padded.all("loss")),
        plan_ms=statistics.median(packed.after_first("plan_ms")),
        exchange_ms=statistics.median(packed.after_first("exchange_ms")),
        share=share_of_waiting(packed),
        share_target=SHARE_TARGETS.get(ranks),
    )


def table_of(outcomes: Sequence[Outcome], options: argparse.Namespace) -> Table:
    """One row a setting; a target that is missed is red."""
    table = Table(
        title=f"Packed on CPU: {options.nproc} rank(s) of {options.threads} thread(s), {options.iters} iterations"
    )
    table.add_column("seq / capacity")
    table.add_column("scheduler")
    for column in ("slots", "FLOPs", "packed / padded", "of FLOPs", "packed / sorted", "loss diff"):
        table.add_column(column, justify="right")
    for column in ("plan ms", "exchange ms", "share"):
        table.add_column(column, justify="right")
    for row in outcomes:
        table.add_row(
            row.setting,
            row.scheduler,
            f"{row.slot_ratio:.2f}x",
            f"{row.flop_ratio:.2f}x",
            f"{row.padded_over_packed:.2f}x",
            _at_least(row.of_flop_ratio, row.of_flop_ratio_target),
            _at_least(row.sorted_over_packed, row.sorted_over_packed_target),
            f"{row.max_relative_loss_difference:.1e}",
            f"{row.plan_ms:.2f}",
            f"{row.exchange_ms:.2f}",
            _at_most_percent(row.share, row.share_target),
        )
    table.caption = f"padded: micro-batch {MICRO_BATCH_SIZE}. CPU time, medians, iteration 1 left out. (Targets.)"
    return table


def _at_least(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"[{'green' if value >= target else 'red'}]{value:.2f}[/] ({target:.2f})"


def _at_most_percent(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.1%}"
    return f"[{'green' if value <= target else 'red'}]{value:.1%}[/] ({target:.0%})"


def run_all(options: argparse.Namespace) -> list[Outcome]:
    """Measure the chosen settings; those of one sequence length share their baselines."""
    write_samples(options.out / SAMPLES, alpaca_lengths())
    chosen = [SETTINGS[name] for name in options.settings]
    outcomes: dict[str, list[Outcome]] = {}
    for seq_length in dict.fromkeys(setting.seq_length for setting in chosen):
        settings = [setting for setting in chosen if setting.seq_length == seq_length]
        figures = measure(seq_length, settings, options)
        for setting in settings:
            outcomes[setting.name] = [outcome(setting, name, figures, options.nproc) for name in options.schedulers]
    return [row for name in options.settings for row in outcomes[name]]


def main() -> int:
    """Run the command line; the exit code."""
    options = _parse()
    leave_on_signals()
    try:
        outcomes = run_all(options)
    except (RunFailed, DifferentSamples, OSError) as error:
        print(f"bench_end_to_end: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_end_to_end: interrupted; the runs are ended.", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps([asdict(row) for row in outcomes], indent=2))
    else:
        Console(width=150 if not sys.stdout.isatty() else None).print(table_of(outcomes, options))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare packed, padded and sorted runs on CPU, end to end.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--iters", type=int, default=8, metavar="N", help="iterations of every run, the first not counted"
    )
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="sequence length/capacity"
    )
    parser.add_argument(
        "--schedulers",
        nargs="+",
        choices=("first_fit", "dp_balanced", "balanced"),
        default=["first_fit"],
        help="what makes the packs; a run for each",
    )
    parser.add_argument("--nproc", type=int, default=1, choices=(1, 2), help="data-parallel ranks of each run")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a rank")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "bench", metavar="DIR", help="folder for the runs' logs"
    )
    options = parser.parse_args()
    most = len(alpaca_lengths()) // GLOBAL_BATCH_SIZE
    if not 2 <= options.iters <= most:
        parser.error(
            f"--iters {options.iters}: the first is not counted, and there are samples for {most} steps of "
            f"{GLOBAL_BATCH_SIZE}. Give 2 to {most}."
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
