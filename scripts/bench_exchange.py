#!/usr/bin/env python3
"""What does moving a step's samples cost, beside all-gathering every sample to every rank?

Both run in the same processes, taking turns: ours sends a sample to the rank that runs it (megatron_packing.comm), the
other gives every rank every sample, padded to the longest, as packers do that reroute from a full copy. Prints bytes
that a rank receives from others and milliseconds, medians over rounds. No assertion: timing is for looking at.

    python scripts/bench_exchange.py [--ranks 4] [--global-batch-size 256] [--rounds 30]
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_packing.comm.exchange import exchange_samples
from megatron_packing.comm.lengths import GatheredLengths, gather_lengths
from megatron_packing.schedule import make_plan
from megatron_packing.thd import SampleTensors
from megatron_packing.topology import Topology

LENGTHS = Path(__file__).parent / "data" / "alpaca_lengths.json"
CAPACITY = 4096
BYTES_A_TOKEN = 12  # token and label as int32, loss mask as float32: the same in both ways


def main() -> None:
    """Start the ranks and print the table of rank 0."""
    options = parse()
    with tempfile.TemporaryDirectory() as store:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=run_rank, args=(rank, store, vars(options), results))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")
        print_table(results.get(), options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes and milliseconds of moving a step's samples over gloo.")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks (default: 4)")
    parser.add_argument("--global-batch-size", type=int, default=256, help="samples of a step (default: 256)")
    parser.add_argument("--rounds", type=int, default=30, help="steps measured (default: 30)")
    return parser.parse_args()


def run_rank(rank: int, folder: str, options: dict[str, Any], results: Any) -> None:
    """Measure both ways in turns; rank 0 reports."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), options["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options["ranks"])
    lengths = json.loads(LENGTHS.read_text())["lengths"]
    figures: dict[str, list[tuple[float, float]]] = {"ours": [], "all-gather": []}
    for number in range(options["rounds"]):
        step = Step(lengths, number, rank, options)
        for name, move in (("ours", step.exchange), ("all-gather", step.all_gather)):
            figures[name].append(measured(move))
    if rank == 0:
        results.put(figures)
    dist.barrier()
    dist.destroy_process_group()


class Step:
    """The samples that one rank drew for one step, and where all of them go."""

    def __init__(self, lengths: list[int], number: int, rank: int, options: dict[str, Any]) -> None:
        ranks, batch = options["ranks"], options["global_batch_size"]
        mine = [lengths[(number * batch + i * ranks + rank) % len(lengths)] for i in range(batch // ranks)]
        self.samples = [sample_of(length) for length in mine]
        self.group = dist.group.WORLD
        self.gathered: GatheredLengths = gather_lengths(
            mine, mine, limit=len(mine), group=self.group, device="cpu", counters=()
        )
        plan = make_plan(self.gathered.lengths, "first_fit", Topology(dp=ranks), CAPACITY)
        self.destinations = [{0}] * len(self.gathered.lengths)
        for microbatch in plan.microbatches:
            for to, pack in enumerate(microbatch.packs):
                for sample_id in pack.sample_ids:
                    self.destinations[sample_id] = {to}
        self.first = self.gathered.first_id(rank)
        self.rank = rank

    def exchange(self) -> float:
        """Ours; returns the bytes that came from other ranks."""
        mine = {self.first + i: sample for i, sample in enumerate(self.samples)}
        received = exchange_samples(
            mine, destinations=self.destinations, gathered=self.gathered, group=self.group, device="cpu"
        )
        return float(sum(s.length for i, s in received.items() if i not in mine) * BYTES_A_TOKEN)

    def all_gather(self) -> float:
        """Every sample to every rank, padded to the longest of the step."""
        longest = max(self.gathered.lengths)
        flat = torch.zeros(len(self.samples), 3, longest, dtype=torch.int32)
        for row, sample in zip(flat, self.samples, strict=True):
            row[0, : sample.length] = sample.tokens_L
            row[1, : sample.length] = sample.labels_L
            row[2, : sample.length] = sample.loss_mask_L.view(torch.int32)
        out = torch.empty(self.group.size() * flat.numel(), dtype=torch.int32)
        dist.all_gather_into_tensor(out, flat.view(-1), group=self.group)
        return float((self.group.size() - 1) * flat.numel() * 4)


def sample_of(length: int) -> SampleTensors:
    ids = torch.arange(length)
    return SampleTensors(tokens_L=ids, labels_L=ids, loss_mask_L=torch.ones(length))


def measured(move: Callable[[], float]) -> tuple[float, float]:
    """Bytes from others, and milliseconds, all ranks starting together."""
    dist.barrier()
    started = time.perf_counter()
    received = move()
    return received, (time.perf_counter() - started) * 1e3


def print_table(figures: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{options.global_batch_size} samples a step, {options.ranks} ranks, alpaca lengths")
    for name in ("way", "received from others", "milliseconds"):
        table.add_column(name, justify="left" if name == "way" else "right")
    medians = {}
    for name, rounds in figures.items():
        received, ms = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        medians[name] = (received, ms)
        table.add_row(name, f"{received / 1024:,.0f} KiB", f"{ms:.2f}")
    (our_bytes, our_ms), (all_bytes, all_ms) = medians["ours"], medians["all-gather"]
    table.add_row("all-gather / ours", f"{all_bytes / our_bytes:.1f}x", f"{all_ms / our_ms:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
