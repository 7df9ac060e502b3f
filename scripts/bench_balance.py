#!/usr/bin/env python3
"""How much sooner is a step done when ranks are alike in work: measured, beside what the plans predict?

Live runs of one small GPT on CPU, in Megatron's own loop, one thread a rank, take turns iteration by iteration on the
same samples: packed by first_fit, by dp_balanced and by balanced. Lengths are long-tailed (log-normal, a mean of 300
tokens, up to 4,096), packs hold 4,096, token ids are made up. Three figures of each iteration:

wall       seconds, with a core for each rank; the step ends with its busiest rank
step       the busiest rank's CPU time: what wall is on a machine that does nothing else
lockstep   sum over microbatches of the busiest rank's CPU time in each: what a step takes where ranks meet in every
           microbatch; forward and backward, without planning, exchange and update

Beside the last two stands what the plans say of the same steps by the model's FLOPs. All of them are shown as medians,
and as ratios to balanced: the median over iterations of a scheduler's figure over that of balanced in the same
iteration, the first iteration left out.

    python scripts/bench_balance.py             2 ranks, which meet once a step: balanced levels the step
    python scripts/bench_balance.py --nproc 4   also where cores are fewer: balanced levels each microbatch; no wall

Each takes some minutes; see --iters. Status 1 if balanced is not the fastest by what is measured there.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paired_runs import (
    ROOT,
    DifferentSamples,
    Figures,
    Layout,
    Training,
    cores,
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
from workloads import W1

CAPACITY = 4096
BALANCED = "balanced"
SCHEDULERS = ("first_fit", "dp_balanced", BALANCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many ranks, and what is measured on them."""

    balance: str
    """What `balanced` keeps small."""
    samples_a_step: int
    iterations: int


CLUSTERS = {
    2: Cluster(balance="step", samples_a_step=32, iterations=24),
    4: Cluster(balance="lockstep", samples_a_step=64, iterations=10),
}
"""By ranks. As many samples for each rank, in one to four microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one scheduler gave. Ratios are to `balanced`, medians over iterations, the first left out."""

    scheduler: str
    microbatches: float
    wall_s: float | None
    """None where ranks have no core of their own."""
    step_cpu_s: float
    lockstep_cpu_s: float
    wall_ratio: float | None
    step_ratio: float
    step_ratio_planned: float
    lockstep_ratio: float
    lockstep_ratio_planned: float
    share: float
    """Planning and exchange, of the wall time of an iteration."""
    max_relative_loss_difference: float
    """To the run with `balanced`: the same samples, summed in another order."""


def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Figures]:
    """Run every scheduler, in turns."""
    samples = options.out / "long_tailed.jsonl"
    write_samples(samples, sample_lengths(options.iters * cluster.samples_a_step))
    training = Training(
        seq_length=CAPACITY,
        iterations=options.iters,
        data_flags=data_flags(samples),
        global_batch_size=cluster.samples_a_step,
    )
    runs = []
    for name in SCHEDULERS:
        layout = Layout(name=name, capacity=CAPACITY, scheduler=name, balance=cluster.balance)
        command = launch_command(training, layout, options.iters, options.nproc)
        log = options.out / f"balance-{options.nproc}-{name}.log"
        runs.append(Run(name=name, command=command, iterations=options.iters, log=log))

    def tell(iteration: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
        said = ", ".join(f"{name} {row['wall_s']:.2f}/{max(row['ranks_cpu_s']):.2f}" for name, row in rows.items())
        print(f"iteration {iteration}/{options.iters}, wall/step s: {said}", file=sys.stderr, flush=True)

    figures = take_turns(runs, thread_variables(threads=1), tell)
    for run in figures.values():
        run.turns[:] = [{**row, **busiest(row)} for row in run.turns]
    return figures


def sample_lengths(count: int) -> list[int]:
    """Tokens of each sample: those of W1 halved, with a seed that no planner was tuned on."""
    return [max(8, length // 2) for length in W1.lengths(W1.seeds[1], count).tolist()]


def busiest(row: Mapping[str, Any]) -> dict[str, float]:
    """An iteration's CPU seconds of its busiest rank, and of the busiest rank of each microbatch together."""
    microbatches = zip(*row["microbatches_cpu_s"], strict=True)
    return {
        "step_cpu_s": max(row["ranks_cpu_s"]),
        "lockstep_cpu_s": sum(map(max, microbatches)),
        "microbatches": len(row["microbatches_cpu_s"][0]),
    }


def outcome(name: str, figures: Mapping[str, Figures], *, own_cores: bool) -> Outcome:
    """Put the run of one scheduler in relation to that of `balanced`."""
    run, balanced = figures[name], figures[BALANCED]
    ratio = functools.partial(median_ratio, run, balanced)
    return Outcome(
        scheduler=name,
        microbatches=statistics.mean(run.after_first("microbatches")),
        wall_s=statistics.median(run.after_first("wall_s")) if own_cores else None,
        step_cpu_s=statistics.median(run.after_first("step_cpu_s")),
        lockstep_cpu_s=statistics.median(run.after_first("lockstep_cpu_s")),
        wall_ratio=ratio("wall_s") if own_cores else None,
        step_ratio=ratio("step_cpu_s"),
        step_ratio_planned=ratio("step_imbalance"),
        lockstep_ratio=ratio("lockstep_cpu_s"),
        lockstep_ratio_planned=ratio("lockstep_imbalance"),
        share=share_of_waiting(run),
        max_relative_loss_difference=max_relative_difference(run.all("loss"), balanced.all("loss")),
    )


def is_fastest(outcomes: Sequence[Outcome], cluster: Cluster) -> bool:
    """Whether every other scheduler took longer, by the figure that `balanced` kept small, and by wall where it is
    measured.
    """
    others = [row for row in outcomes if row.scheduler != BALANCED]
    ratios = [row.step_ratio if cluster.balance == "step" else row.lockstep_ratio for row in others]
    ratios += [row.wall_ratio for row in others if row.wall_ratio is not None]
    return min(ratios) > 1


def table_of(outcomes: Sequence[Outcome], cluster: Cluster, options: argparse.Namespace) -> Table:
    """One row a scheduler."""
    table = Table(
        title=f"{options.nproc} ranks on CPU, one thread each, {cluster.samples_a_step} samples a step, "
        f"{options.iters} iterations; balanced levels the {cluster.balance}"
    )
    table.add_column("")
    for column in ("microbatches", "wall s", "step s", "lockstep s"):
        table.add_column(column, justify="right")
    for column in ("wall", "step", "planned", "lockstep", "planned", "plan+exchange", "loss diff"):
        table.add_column(column, justify="right")
    for row in outcomes:
        table.add_row(
            row.scheduler,
            f"{row.microbatches:.2f}",
            "-" if row.wall_s is None else f"{row.wall_s:.3f}",
            f"{row.step_cpu_s:.3f}",
            f"{row.lockstep_cpu_s:.3f}",
            "-" if row.wall_ratio is None else f"{row.wall_ratio:.3f}x",
            f"{row.step_ratio:.3f}x",
            f"{row.step_ratio_planned:.3f}x",
            f"{row.lockstep_ratio:.3f}x",
            f"{row.lockstep_ratio_planned:.3f}x",
            f"{row.share:.1%}",
            f"{row.max_relative_loss_difference:.1e}",
        )
    table.caption = "Medians, iteration 1 left out. step, lockstep: CPU time of busiest ranks. x: over balanced."
    return table


def main() -> int:
    """Run the command line; the exit code."""
    options = _parse()
    cluster = CLUSTERS[options.nproc]
    leave_on_signals()
    try:
        figures = measure(cluster, options)
    except (RunFailed, DifferentSamples, OSError) as error:
        print(f"bench_balance: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_balance: interrupted; the runs are ended.", file=sys.stderr)
        return 130
    outcomes = [outcome(name, figures, own_cores=options.nproc <= cores()) for name in SCHEDULERS]
    if options.json:
        print(json.dumps([asdict(row) for row in outcomes], indent=2))
    else:
        Console(width=150 if not sys.stdout.isatty() else None).print(table_of(outcomes, cluster, options))
    return 0 if is_fastest(outcomes, cluster) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare schedulers in training on CPU: measured, and as planned.")
    parser.add_argument("--nproc", type=int, default=2, choices=CLUSTERS, help="data-parallel ranks of each run")
    parser.add_argument(
        "--iters",
        type=int,
        metavar="N",
        help="iterations of every run, the first not counted (default: "
        + ", ".join(f"{cluster.iterations} with {ranks} ranks" for ranks, cluster in CLUSTERS.items())
        + ")",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "bench", metavar="DIR", help="folder for samples and the runs' logs"
    )
    options = parser.parse_args()
    if options.iters is None:
        options.iters = CLUSTERS[options.nproc].iterations
    if options.iters < 2:
        parser.error(f"--iters {options.iters}: the first is not counted. Give 2 or more.")
    return options


if __name__ == "__main__":
    sys.exit(main())
