#!/usr/bin/env python3
"""How full are the packs of a whole set, and how even are groups of changing size? Quality and time, seeded.

Sections: `sets` (best fit on three workloads), `million`, `growth` (is time in proportion?), `krell` (few samples to a
pack, beside published rows) and `dynamic` (groups of ranks chosen in every microbatch). Quality is the same on
every machine; times are medians, in wall time and in the CPU time of the one thread that works, after a first call
that compiles or loads what is compiled.

    python scripts/bench_packing.py [SECTION ...] [--steps 20] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from workloads import W1, W2, W3, Int64Array, Workload

from megatron_packing.schedule import CostModel, make_plan, pack_set
from megatron_packing.schedule.bounds import packs_lower_bound
from megatron_packing.schedule.depth_capped import solve
from megatron_packing.topology import Topology

COUNTS = Path(__file__).parent / "data" / "wikipedia_512_counts.json"

# Published for the Wikipedia-512 counts: packing efficiency and factor. Krell et al., Efficient Sequence Packing
# without Cross-contamination (2021). Their 1.913 is a speed-up estimated from kernel cycles: no figure of a packing.
KRELL = (("no packing", 1, 50.0, 1.00), ("SPFHP", 3, 89.4, 1.79), ("NNLSHP", 3, 99.7, 2.00))

# (workload, ranks, tokens per rank, linear cost) -> lockstep at 0, 500 and 2000 of communication a token. Recorded on
# the first seed, 20 steps of 512 samples: of our first try, and of default_dynamic_cp in Megatron-LM (dev branch).
DYNAMIC: dict[tuple[Workload, int, int, int], tuple[tuple[float, ...], tuple[float, ...]]] = {
    (W2, 64, 16384, 24576): ((1.017, 1.086, 1.272), (1.651, 1.693, 1.819)),
    (W2, 64, 16384, 0): ((1.011, 1.155, 1.466), (1.992, 2.059, 2.260)),
    (W2, 8, 16384, 24576): ((1.002, 1.031, 1.110), (1.019, 1.045, 1.125)),
    (W1, 8, 2048, 24576): ((1.001, 1.021, 1.077), (1.006, 1.028, 1.095)),
    (W1, 8, 2048, 0): ((1.010, 1.330, 2.051), (1.060, 1.387, 2.366)),
}
COMMUNICATION = (0, 500, 2000)
BATCH = 512
TIMES = ("ms", "CPU ms", "least CPU ms")


def main() -> None:
    """Run the sections and print a table of each."""
    options = parse()
    console = Console(width=170)
    results: dict[str, list[dict[str, Any]]] = {}
    for name in options.sections or SECTIONS:
        results[name] = list(SECTIONS[name](options))
        console.print(table_of(name, results[name]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quality and time of whole-set packing and of dynamic groups.")
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--steps", type=int, default=20, help="steps of 512 samples planned with groups (default: 20)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each time (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def table_of(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=name, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    return table


def timed(work: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """What `work` gives, and the medians of its times; a call before them compiles."""
    work()
    wall, cpu = [], []
    for _ in range(repeats):
        started = time.perf_counter(), time.process_time()
        result = work()
        wall.append((time.perf_counter() - started[0]) * 1e3)
        cpu.append((time.process_time() - started[1]) * 1e3)
    figures = (statistics.median(wall), statistics.median(cpu), min(cpu))
    return result, {name: round(value, 2) for name, value in zip(TIMES, figures, strict=True)}


def set_row(what: str, lengths: Int64Array, capacity: int, repeats: int, max_seqs: int | None = None) -> dict[str, Any]:
    """Pack a set, check the packs and say how good they are."""
    packed, times = timed(lambda: pack_set(lengths, capacity, max_seqs), repeats)
    loads = np.add.reduceat(lengths[packed.sample_ids], np.concatenate([[0], packed.ends[:-1]]))
    assert (np.bincount(packed.sample_ids, minlength=len(lengths)) == 1).all()
    assert loads.max() <= capacity
    assert max_seqs is None or np.diff(packed.ends, prepend=0).max() <= max_seqs
    return {
        "set": what,
        "samples": len(lengths),
        "packs": len(packed),
        "at least": packs_lower_bound(lengths, capacity, max_seqs),
        "fill %": round(100 * int(lengths.sum()) / (len(packed) * capacity), 4),
        **times,
    }


def sets(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Best fit on every workload and seed."""
    for workload in (W1, W2, W3):
        for seed in workload.seeds:
            yield set_row(f"{workload.name} seed {seed}", workload.lengths(seed), workload.capacity, options.repeats)


def million(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One million of W1."""
    for seed in W1.seeds:
        yield set_row(f"W1 seed {seed}", W1.lengths(seed, 1_000_000), W1.capacity, options.repeats)


def growth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lengths above half a pack, none of which can share one: the worst for a search through open packs."""
    previous = None
    for samples in (200_000, 400_000, 800_000):
        lengths = np.random.default_rng(1).integers(4097, 8193, samples)
        row = set_row("above C / 2", lengths, 8192, 3 * options.repeats)
        yield row | {"times that before": round(row["least CPU ms"] / previous, 2) if previous else ""}
        previous = row["least CPU ms"]


def krell(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """At most a few samples to a pack, on the counts of 16 million sequences."""
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))["counts"]
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(1, 513), counts))
    counts_U = np.array([0, *counts])
    for name, depth, efficiency, factor in KRELL:
        published = {"packs": "", "at least": "", "fill %": efficiency, "factor": factor}
        yield {
            "set": f"published: {name}",
            "samples": depth,
            **published,
            **dict.fromkeys([*TIMES, "program, CPU ms"], ""),
        }
    for depth in (2, 3, 4, 8):
        row = set_row("ours", lengths, 512, 1, depth)
        times = {name: row.pop(name) for name in TIMES}
        _, program = timed(lambda: solve(counts_U, depth), options.repeats)  # noqa: B023  (called at once)
        factor = round(len(lengths) / row["packs"], 3)
        yield row | {"samples": depth, "factor": factor} | times | {"program, CPU ms": program["CPU ms"]}


def dynamic(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lockstep of groups chosen in every microbatch: the mean of some steps."""
    for (workload, ranks, per_rank, linear), (first_try, megatron) in DYNAMIC.items():
        for seed in workload.seeds:
            for i, communication in enumerate(COMMUNICATION):
                cost = CostModel(linear=linear, quadratic=1, communication=communication)
                row = groups_row(workload.lengths(seed), ranks, per_rank, cost, options.steps)
                recorded = {
                    "first try": first_try[i],
                    "at most": round(first_try[i] * 1.02, 4),
                    "Megatron": megatron[i],
                }
                if seed != workload.seeds[0] or options.steps != 20:
                    recorded = dict.fromkeys(recorded, "")
                what = f"{workload.name} G={ranks} C={per_rank} K={linear}"
                yield {"setting": what, "seed": str(seed), "communication": communication, **row, **recorded}


def groups_row(lengths: Int64Array, ranks: int, per_rank: int, cost: CostModel, steps: int) -> dict[str, Any]:
    topology, metrics, cpu = Topology(dp=ranks), [], []
    make_plan(lengths[:BATCH], "dynamic_cp", topology, per_rank, cost=cost)  # compiles
    for step in range(steps):
        batch = lengths[step * BATCH : (step + 1) * BATCH]
        started = time.process_time()
        plan = make_plan(batch, "dynamic_cp", topology, per_rank, cost=cost)  # checked: once each, groups, capacity
        cpu.append((time.process_time() - started) * 1e3)
        metrics.append(plan.metrics(batch))
    return {
        "microbatches": round(statistics.mean(m.microbatches_per_rank for m in metrics), 2),
        "max_pack_load": round(max(m.max_pack_load for m in metrics), 4),
        "bound": round(statistics.mean(m.lockstep_lower_bound for m in metrics), 4),
        "lockstep": round(statistics.mean(m.lockstep_imbalance for m in metrics), 4),
        "ms": round(statistics.median(m.plan_ms for m in metrics), 2),
        "CPU ms": round(statistics.median(cpu), 2),
    }


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "sets": sets,
    "million": million,
    "growth": growth,
    "krell": krell,
    "dynamic": dynamic,
}

if __name__ == "__main__":
    main()
