"""Is packing right on this machine, and what does it gain? For machines with GPUs; on a CPU in a reduced form.

Three parts, each by what users start:

- probe: `megatron-packing doctor --probe`, a model of two layers packed against each sample alone.
- numerics: live runs of Megatron's training loop through the real launcher, packed against Megatron's own unpacked run
  on the same samples, with our attention and, where it is installed, with Transformer Engine's; from two GPUs on also
  under context parallelism.
- speed: padded, sorted and packed runs of a larger model, one after the other, on all GPUs.

Writes report.md and report.json. Exit code 1 if something does not hold or could not be run. Cost: some ten minutes on
a GPU machine, most of it imports; on two CPU cores some three.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_check_report import PADDED, Comparison, Findings, compare_bf16, compare_fp32, speed_rows, write_report
from paired_runs import (
    ROOT,
    DifferentSamples,
    Figures,
    Layout,
    Model,
    Training,
    alpaca_lengths,
    check_same_samples,
    cores,
    data_flags,
    launch_command,
    take_turns,
    thread_variables,
    write_samples,
)
from turns import Run, RunFailed, leave_on_signals

PARTS = ("probe", "numerics", "speed")
PROBE_SECONDS = 600
BF16 = ("--bf16",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How large a part is."""

    model: Model
    seq_length: int
    capacity: int
    """Tokens of a pack."""
    samples_a_rank: int
    """Of a step."""

    def training(self, options: argparse.Namespace, ranks: int) -> Training:
        """What all runs of the part share."""
        return Training(
            seq_length=self.seq_length,
            iterations=options.iters,
            data_flags=data_flags(options.out / "samples.jsonl"),
            global_batch_size=self.samples_a_rank * ranks,
            model=self.model,
            device=options.device,
        )

    def describe(self) -> str:
        """For the report."""
        model = self.model
        return (
            f"{model.layers} layers of {model.hidden}, {model.heads} heads ({model.query_groups} groups); rows of at "
            f"most {self.seq_length:,} tokens, packs of {self.capacity:,}, {self.samples_a_rank} samples a rank"
        )


SMALL = Form(model=Model(), seq_length=512, capacity=2048, samples_a_rank=16)
LARGE = Form(
    model=Model(layers=16, hidden=2048, heads=16, query_groups=8), seq_length=1024, capacity=8192, samples_a_rank=128
)
"""0.75 billion weights: 14 GB of weights, gradients and optimizer states, and some 10 GB of activations."""


# --- numerics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that take turns, and how their losses are judged."""

    name: str
    layouts: Sequence[Layout]
    judge: Callable[[Mapping[str, Figures]], list[Comparison]]


def groups(options: argparse.Namespace, ranks: int) -> list[Group]:
    """Our attention, and Transformer Engine's where it can run."""
    found = [ours(options, ranks)]
    return [*found, transformer_engines(ranks)] if uses_transformer_engine(options.device) else found


def ours(options: argparse.Namespace, ranks: int) -> Group:
    """Packed with our attention; unpacked with Megatron's own."""
    local = local_flags(options.device)
    unpacked = Layout(name="unpacked", attention="stock", micro_batch_size=1, extra=local)
    packed = Layout(name="packed", capacity=SMALL.capacity, extra=local)
    exact = [unpacked, replace(unpacked, name="unpacked, 4 rows", micro_batch_size=4)]
    low = replace(unpacked, name="unpacked, bf16", extra=(*local, *BF16))
    fp32 = [packed, *with_context_parallelism(packed, ranks)]
    bf16 = [replace(one, name=f"{one.name}, bf16", extra=(*one.extra, *BF16)) for one in fp32[:1]]

    def judge(runs: Mapping[str, Figures]) -> list[Comparison]:
        reference, other = (runs[one.name] for one in exact)
        found = [compare_fp32(one.name, runs[one.name], reference, other) for one in fp32]
        return found + [compare_bf16(one.name, runs[one.name], runs[low.name], reference) for one in bf16]

    return Group(name="our attention", layouts=[*exact, *fp32, low, *bf16], judge=judge)


def transformer_engines(ranks: int) -> Group:
    """Packed and unpacked with Transformer Engine; the truth is unpacked, in fp32, by its plain kernel."""
    flags = ("--transformer-impl", "transformer_engine", "--no-gradient-accumulation-fusion")
    exact = Layout(
        name="TE unpacked", attention="te", micro_batch_size=1, extra=(*flags, "--attention-backend", "unfused")
    )
    low = replace(exact, name="TE unpacked, bf16", extra=(*flags, *BF16))
    packed = Layout(name="TE packed, bf16", attention="te", capacity=SMALL.capacity, extra=(*flags, *BF16))
    tried = [packed, *with_context_parallelism(packed, ranks)]

    def judge(runs: Mapping[str, Figures]) -> list[Comparison]:
        return [compare_bf16(one.name, runs[one.name], runs[low.name], runs[exact.name]) for one in tried]

    return Group(name="Transformer Engine", layouts=[exact, low, *tried], judge=judge)


def with_context_parallelism(packed: Layout, ranks: int) -> list[Layout]:
    """The same packs over two ranks each, where there are two."""
    if ranks < 2:
        return []
    extra = (*packed.extra, "--context-parallel-size", "2")
    return [replace(packed, name=f"{packed.name}, CP 2", capacity=SMALL.capacity // 2, extra=extra)]


def local_flags(device: str) -> tuple[str, ...]:
    """Megatron's local implementation without the kernels of Apex and Transformer Engine.

    On the CPU the launcher adds them.
    """
    if device == "cpu":
        return ()
    from megatron_packing.mcore.cpu_runtime import missing_flags

    return tuple(missing_flags(["--distributed-backend", "--use-cpu-initialization"]))


def uses_transformer_engine(device: str) -> bool:
    """Whether it is installed, for a GPU."""
    return device == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def check_numerics(options: argparse.Namespace, found: Findings) -> None:
    """Run each group and judge it; at most two ranks a run."""
    ranks = min(2, options.nproc)
    training = SMALL.training(options, ranks)
    found.settings = {**found.settings, "numerics": f"{SMALL.describe()}; {ranks} rank(s), {options.iters} iterations."}
    at_once = 8 if options.device == "cuda" else max(1, cores() // ranks)  # starting takes longer than running
    for group in groups(options, ranks):
        say(f"numerics, {group.name}: {len(group.layouts)} runs, {at_once} at once")
        try:
            found.comparisons += group.judge(take(group.layouts, training, options, ranks, at_once))
        except (RunFailed, DifferentSamples) as error:
            found.failures.append(f"numerics, {group.name}: {error}")


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_layouts(options: argparse.Namespace, form: Form) -> list[Layout]:
    """Padded, sorted by length before padding, and packed; and what makes a difference only between ranks."""
    engine = uses_transformer_engine(options.device)
    flags: tuple[str, ...] = local_flags(options.device)
    if engine:
        flags = ("--transformer-impl", "transformer_engine", "--no-gradient-accumulation-fusion")
    if options.device == "cuda":
        flags += (*BF16, "--use-distributed-optimizer") if engine else BF16
    attention = "te" if engine else "sdpa"
    rows = form.capacity // form.seq_length
    padded = Layout(name=PADDED, attention=attention, micro_batch_size=rows, extra=flags)
    packed = Layout(name="packed", attention=attention, capacity=form.capacity, extra=flags)
    layouts = [padded, replace(padded, name="padded, sorted by length", sort=True), packed]
    if options.nproc > 1:
        layouts.append(replace(packed, name="packed, balanced", scheduler="balanced"))
    return layouts


def measure_speed(options: argparse.Namespace, found: Findings) -> None:
    """Run each layout by itself, so that it has the device and its memory alone."""
    form = LARGE if options.device == "cuda" else SMALL
    # Other programs of a machine disturb its CPU's clock on the wall.
    clock, name = ("wall_s", "wall clock") if options.device == "cuda" else ("cpu_s", "CPU time of all ranks")
    training = form.training(options, options.nproc)
    found.settings = {
        **found.settings,
        "speed": f"{form.describe()}; padded: {form.capacity // form.seq_length} rows a microbatch; "
        f"{options.nproc} rank(s), {options.iters} iterations, medians by {name}, the first left out.",
    }
    runs: dict[str, Figures] = {}
    try:
        runs = take(speed_layouts(options, form), training, options, options.nproc, at_once=1)
    except (RunFailed, DifferentSamples) as error:
        found.failures.append(f"speed: {error}")
    found.speed = speed_rows(runs, clock)


# --- what both use ----------------------------------------------------------------------------------------------------


def take(
    layouts: Sequence[Layout], training: Training, options: argparse.Namespace, ranks: int, at_once: int
) -> dict[str, Figures]:
    """The figures of runs, of which `at_once` live together and take turns; all saw the same samples."""
    runs = [to_run(training, layout, options, ranks) for layout in layouts]
    figures: dict[str, Figures] = {}
    for batch in itertools.batched(runs, at_once):
        figures |= take_turns(batch, environment(options, ranks), tell)
    for iteration in range(options.iters):
        check_same_samples(iteration + 1, {name: run.turns[iteration] for name, run in figures.items()})
    return figures


def to_run(training: Training, layout: Layout, options: argparse.Namespace, ranks: int) -> Run:
    """The process of one layout."""
    log = options.out / f"{layout.name.replace(', ', '-').replace(' ', '-')}.log"
    command = launch_command(training, layout, options.iters, ranks)
    return Run(name=layout.name, command=command, iterations=options.iters, log=log)


def environment(options: argparse.Namespace, ranks: int) -> dict[str, str]:
    """Variables of all runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if options.device == "cpu":
        return {"PYTHONPATH": path, **thread_variables(max(1, cores() // ranks))}
    # Megatron asks for the first under context parallelism; with the second fp32 is fp32.
    return {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVIDIA_TF32_OVERRIDE": "0"}


def tell(iteration: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Say how an iteration went."""
    say(f"  iteration {iteration}: " + ", ".join(f"{name} {row['loss']:.6f}" for name, row in rows.items()))


def say(text: str) -> None:
    """Progress goes where it is in no pipe's way."""
    print(text, file=sys.stderr, flush=True)


def probe(options: argparse.Namespace, found: Findings) -> None:
    """What `megatron-packing doctor --probe` finds, in a process of its own."""
    say("probe: a small model packed against each sample alone")
    command = [sys.executable, "-c", "from megatron_packing.cli.main import app; app()", "doctor", "--probe", "--json"]
    variables = {**os.environ, **environment(options, 1)}
    if options.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    try:
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PROBE_SECONDS)
        found.probe = json.loads(ended.stdout)["probe"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        said = ended.stderr[-2000:] if isinstance(error, ValueError | KeyError) else ""
        found.failures.append(f"probe: {error!r}\n{said}")


def machine(device: str) -> dict[str, str]:
    """Devices and versions."""
    import torch

    if device == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    else:
        devices = f"CPU, {cores()} cores"
    versions = {"devices": devices, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("megatron-core", "transformer-engine", "flash-attn"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def check(options: argparse.Namespace) -> Findings:
    """Run the parts that were asked for."""
    started = time.perf_counter()
    found = Findings(
        device=options.device,
        ranks=options.nproc,
        machine=machine(options.device),
        settings={},
        comparisons=[],
        speed=[],
        failures=[],
    )
    write_samples(options.out / "samples.jsonl", alpaca_lengths())
    for part, run in zip(PARTS, (probe, check_numerics, measure_speed), strict=True):
        if part in options.parts:
            run(options, found)
    found.seconds = time.perf_counter() - started
    return found


def main() -> int:
    """Run the command line; the exit code."""
    options = _parse()
    leave_on_signals()
    try:
        found = check(options)
        paths = write_report(found, options.out)
    except KeyboardInterrupt:
        print("gpu_check: interrupted; the runs are ended.", file=sys.stderr)
        return 130
    print(paths[0].read_text(encoding="utf-8"))
    print("\n".join(map(str, paths)))
    return 0 if found.passed else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description="Check packing on this machine: numerics and speed, with a report."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the reduced form")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks; default: all GPUs, or 1 on the CPU")
    parser.add_argument("--iters", type=int, metavar="N", help="iterations of each run; default: 10, on the CPU 4")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "gpu_check", metavar="DIR", help="for report and logs"
    )
    options = parser.parse_args()
    import torch

    devices = torch.cuda.device_count()
    if options.device == "cuda" and not devices:
        parser.error("torch finds no CUDA device. --device cpu checks what can be checked without.")
    options.nproc = options.nproc or (devices if options.device == "cuda" else 1)
    options.iters = options.iters or (10 if options.device == "cuda" else 4)
    if options.device == "cuda" and options.nproc > devices:
        parser.error(f"--nproc {options.nproc}: torch finds {devices} CUDA device(s).")
    if options.iters < 2:
        parser.error(f"--iters {options.iters}: speeds leave out iteration 1, so that at least 2 are needed.")
    return options


if __name__ == "__main__":
    sys.exit(main())
