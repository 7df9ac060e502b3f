"""Does every fault end a run soon, with its cause told, and does a restart go on as if nothing had happened?

    python scripts/fault_drill.py --faults 10 [--seed S] [--only KIND] [--keep FOLDER]

Each fault strikes at random: its kind, rank, step, the layout of the ranks and their loader workers. Four gloo ranks
train a toy GPT on the CPU, saving every 2 of 8 steps, until the fault ends them; a run without fault then goes on from
what was saved. Held to: no rank lives 30 s after the fault or ends with 0; each that can still speak names the first
cause in its last line; the restart's samples, losses, weights and optimizer state are those of an uninterrupted run,
bit for bit, step by step, so that no sample is lost or repeated and nothing half-written was loaded.

Exit code 1 when any fault breaks this. A fault takes some 10 seconds on two quiet cores. Linux or macOS, from a
checkout: ranks are forked from this process, and samples are told apart by tests/runs/recorded_pretrain.py.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "runs" / "recorded_pretrain.py"
FAULTY_SCRIPT = ROOT / "scripts" / "faulty_pretrain.py"

STEPS, SAVE_EVERY, BATCH = 8, 2, 8
HANG_SECONDS = 30.0
"""From the fault to the end of the last rank."""
RUN_SECONDS = 180.0
"""For a run whose fault has not struck, or that has none."""
DATA_TIMEOUT = 4
"""Seconds that a reader may take in these runs."""
POLL_SECONDS = 0.005

FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --attention-dropout 0
    --hidden-dropout 0 --normalization RMSNorm --swiglu --disable-bias-linear --micro-batch-size 1
    --global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-2 --min-lr 1e-3 --lr-decay-iters {STEPS} --seed 7
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --tokenizer-type NullTokenizer --vocab-size 256
    --null-tokenizer-eod-id 255 --split 100,0,0 --use-varlen-dataset --max-seqlen-per-dp-cp-rank 128
    --ckpt-format torch_dist --packing-data-timeout {DATA_TIMEOUT}
""".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks are laid out."""

    flags: str
    readers: tuple[int, ...]
    """Ranks that read samples and plan."""


LAYOUTS = {
    "DP 4": Layout(flags="", readers=(0, 1, 2, 3)),
    "DP 2 x PP 2": Layout(flags="--pipeline-model-parallel-size 2", readers=(0, 1)),
    "DP 2 x TP 2": Layout(flags="--tensor-model-parallel-size 2", readers=(0, 2)),
}
RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is known of a kind of fault beforehand."""

    cause: str
    """Words that each last line must hold; `{rank}` is the rank that the fault strikes."""
    on: Literal["readers", "any", "first"] = "readers"
    """Ranks that can have it: those that read samples, any, or only the first."""
    last_step: int = STEPS
    """Latest step in which it strikes."""
    workers: tuple[int, ...] = (0, 2)
    tells: bool = True
    """Whether the rank that it strikes can tell the cause itself."""


KINDS = {
    "dataset-raises": Kind(cause="of a dataset with a bug"),
    "bad-row": Kind(cause="rows.jsonl:"),
    "reader-stalls": Kind(cause="the reader of rank {rank} gave nothing"),
    "reader-stalls-swallows": Kind(cause="the reader of rank {rank} gave nothing", workers=(0,)),
    "reader-stalls-in-c": Kind(cause="rank {rank} ended without a word", workers=(0,), tells=False),
    "killed-reading": Kind(cause="rank {rank} ended without a word", workers=(0,)),
    "worker-killed": Kind(cause="DataLoader worker", workers=(2,)),
    "planner-raises": Kind(cause="a planner with a bug"),
    "plan-differs": Kind(cause="plan of this step differs"),
    "killed-planning": Kind(cause="rank {rank} ended without a word"),
    "model-raises": Kind(cause="a model with a bug", on="any"),
    "killed-in-forward": Kind(cause="rank {rank} ended without a word", on="any"),
    "killed-saving": Kind(cause="rank {rank} ended without a word", on="any", last_step=STEPS - SAVE_EVERY),
    "disk-full": Kind(
        cause="checkpoint write failed on rank {rank}", on="any", last_step=STEPS - SAVE_EVERY, workers=(0,)
    ),
    "all-terminated": Kind(cause="", on="any"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One fault, chosen."""

    kind: str
    layout: str
    rank: int
    step: int
    workers: int
    prefetch: bool
    seed: int


def choose(rng: random.Random, kind: str | None) -> Drill:
    kind = kind or rng.choice(list(KINDS))
    layout = rng.choice(list(LAYOUTS))
    return Drill(
        kind=kind,
        layout=layout,
        rank=rng.choice({"readers": LAYOUTS[layout].readers, "any": range(RANKS), "first": (0,)}[KINDS[kind].on]),
        step=rng.randint(1, KINDS[kind].last_step),
        workers=rng.choice(KINDS[kind].workers),
        prefetch=rng.random() < 0.5,
        seed=rng.randrange(10**6),
    )


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    codes: tuple[int, ...]
    last_lines: tuple[str, ...]
    """The last that each rank said."""
    seconds: float | None
    """From the fault to the end of the last rank; None where no fault struck."""
    hung: int
    """Ranks that had to be killed."""
    steps: dict[int, tuple[Any, ...]]
    """For each iteration that was recorded, what must not change: see `_steps`."""


def run(flags: Sequence[str], folder: Path) -> Ended:
    """Train with forked ranks until all have ended; none outlives its time."""
    from tests.runs.harness import free_port

    folder.mkdir()
    port = free_port()
    started = time.time()
    pids = [_fork_rank(flags, rank, port, folder) for rank in range(RANKS)]
    try:
        codes, struck, ended, hung = _wait(pids, folder / "injected", started)
    finally:
        for pid in pids:  # loader workers and savers that a killed rank left behind
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
    return Ended(
        codes=tuple(codes),
        last_lines=tuple(_last_line(folder / f"rank{rank}.log") for rank in range(RANKS)),
        seconds=None if struck is None else ended - struck,
        hung=hung,
        steps=_steps(folder),
    )


def _fork_rank(flags: Sequence[str], rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here too, so that it holds before anything is killed
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        code = _train(flags, rank, port, folder)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(flags: Sequence[str], rank: int, port: int, folder: Path) -> int:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ.update(address | place | {"RECORD_TO": str(folder)})
    with open(folder / f"rank{rank}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    from megatron_packing import launch

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    try:
        launch.main(["--device", "cpu", str(SCRIPT), "--own-script", str(FAULTY_SCRIPT), *flags])
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _wait(pids: Sequence[int], note: Path, started: float) -> tuple[list[int], float | None, float, int]:
    """Exit codes, when the fault struck, when the last rank ended, and how many had to be killed."""
    codes: dict[int, int] = {}
    struck: float | None = None
    hung: set[int] = set()
    while len(codes) < len(pids):
        time.sleep(POLL_SECONDS)
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if struck is None and note.exists() and (text := note.read_text()):
            struck = float(text)
        deadline = started + RUN_SECONDS if struck is None else struck + HANG_SECONDS
        if time.time() > deadline:
            for pid in set(pids) - set(codes):
                hung.add(pid)
                os.kill(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids], struck, time.time(), len(hung)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # Python's own helpers may complain after the launcher's last word.
    return next((line for line in reversed(lines) if "megatron_packing: error:" in line), lines[-1] if lines else "")


def _steps(folder: Path) -> dict[int, tuple[Any, ...]]:
    """iteration -> (samples of all ranks, consumed samples, loss, each rank's hash of weights and optimizer state)."""
    import torch

    ranks = [torch.load(path, weights_only=False)["iterations"] for path in sorted(folder.glob("record*.pt"))]
    if len(ranks) < RANKS:
        return {}
    steps = {}
    for rows in zip(*ranks, strict=True):
        samples = tuple(sorted(sample for row in rows for sample in row["samples"]))
        states = tuple(row["state"] for row in rows)
        steps[rows[0]["iteration"]] = (samples, rows[0]["consumed_samples"], rows[-1]["loss"], states)
    return steps


# --- the drill --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one fault."""

    drill: Drill
    ended: Ended
    told: int
    """Ranks whose last line names the cause."""
    could_tell: int
    """Ranks that no signal ended."""
    found: str
    """What the restart found."""
    wrong: tuple[str, ...]
    """What must not be; empty if all is well."""


class Session:
    """Runs drills in `folder`, comparing with one uninterrupted run a layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "rows.jsonl"
        self._references: dict[str, dict[int, tuple[Any, ...]]] = {}
        write_rows(self._data)

    def drill(self, number: int, drill: Drill) -> Outcome:
        """Let the fault strike, then restart without it."""
        reference = self._reference(drill.layout)
        folder = self._folder / f"fault{number}"
        folder.mkdir()
        saving = ["--save", str(folder / "saved"), "--save-interval", str(SAVE_EVERY)]
        fault = ["--fault", f"{drill.kind}:{drill.rank}:{drill.step}:{drill.seed}"]
        flags = [*self._flags(drill.layout, drill.workers, prefetch=drill.prefetch), *saving]
        ended = run([*flags, *fault], folder / "faulty")
        restarted = run([*flags, "--load", str(folder / "saved")], folder / "restarted")
        outcome = judge(drill, ended, restarted, reference)
        if not outcome.wrong:
            shutil.rmtree(folder)
        return outcome

    def _reference(self, layout: str) -> dict[int, tuple[Any, ...]]:
        if layout not in self._references:
            ended = run(self._flags(layout, workers=0), self._folder / f"reference{len(self._references)}")
            if any(ended.codes) or len(ended.steps) != STEPS:
                raise SystemExit(f"the run without a fault failed: {ended.codes}\n" + "\n".join(ended.last_lines))
            samples = [sample for step in ended.steps.values() for sample in step[0]]
            assert len(set(samples)) == len(samples) == STEPS * BATCH, "rows differ, so that each is seen once"
            self._references[layout] = ended.steps
        return self._references[layout]

    def _flags(self, layout: str, workers: int, *, prefetch: bool = False) -> list[str]:
        return [
            *FLAGS,
            *(["--packing-prefetch"] if prefetch else []),
            *LAYOUTS[layout].flags.split(),
            "--num-workers",
            str(workers),
            "--data-path",
            str(self._data),
        ]


def write_rows(path: Path) -> None:
    """200 chats in the toy vocabulary, no two alike."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as rows:
        for number in range(200):
            prompt = f"{number} {number // 7} " + " ".join(
                str(rng.randrange(1, 250)) for _ in range(rng.randint(1, 15))
            )
            answer = " ".join(str(rng.randrange(1, 250)) for _ in range(rng.randint(1, 40)))
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": turns}) + "\n")


def judge(drill: Drill, ended: Ended, restarted: Ended, reference: dict[int, tuple[Any, ...]]) -> Outcome:
    """Hold a fault's end and the restart after it to what must be."""
    cause = KINDS[drill.kind].cause.format(rank=drill.rank)
    speaking = [
        line
        for rank, (code, line) in enumerate(zip(ended.codes, ended.last_lines, strict=True))
        if code >= 0 and (KINDS[drill.kind].tells or rank != drill.rank)
    ]
    told = sum(cause in line for line in speaking)
    wrong = []
    if ended.seconds is None:
        wrong.append("the fault did not strike")
    if ended.hung:
        wrong.append(f"{ended.hung} ranks hung")
    if 0 in ended.codes:
        wrong.append(f"exit codes {ended.codes}")
    if told < len(speaking):
        wrong.append(f"{len(speaking) - told} ranks did not tell the cause")
    if any(restarted.codes):
        wrong.append(f"the restart ended with {restarted.codes}")
    first = min(restarted.steps, default=STEPS + 1)
    if sorted(restarted.steps) != list(range(first, STEPS + 1)):
        wrong.append(f"the restart ran steps {sorted(restarted.steps)}")
    unlike = [step for step, seen in restarted.steps.items() if seen != reference[step]]
    if unlike:
        wrong.append(f"steps {unlike} differ from the uninterrupted run's")
    found = f"steps {first}-{STEPS}" + (": equal" if not unlike else "")
    return Outcome(drill=drill, ended=ended, told=told, could_tell=len(speaking), found=found, wrong=tuple(wrong))


def cause_shown(outcome: Outcome) -> str:
    """One line for all: that of a rank which told the cause, else of the rank that had the fault."""
    cause = KINDS[outcome.drill.kind].cause.format(rank=outcome.drill.rank)
    lines = outcome.ended.last_lines
    return next((line for line in lines if cause and cause in line), lines[outcome.drill.rank])


def show(console: Console, outcomes: Sequence[Outcome], seconds: float) -> None:
    table = Table("#", "fault", "ranks", "workers", "rank", "step", "s", "codes", "told", "message", "restart")
    for number, outcome in enumerate(outcomes, 1):
        drill, ended = outcome.drill, outcome.ended
        table.add_row(
            str(number),
            drill.kind,
            drill.layout,
            str(drill.workers),
            str(drill.rank),
            str(drill.step),
            "-" if ended.seconds is None else f"{ended.seconds:.1f}",
            " ".join(map(str, ended.codes)),
            f"{outcome.told}/{outcome.could_tell}",
            escape(cause_shown(outcome)),
            "; ".join([outcome.found, *outcome.wrong]),
            style="red" if outcome.wrong else None,
        )
    console.print(table)
    times = sorted(outcome.ended.seconds for outcome in outcomes if outcome.ended.seconds is not None)
    bad = sum(bool(outcome.wrong) for outcome in outcomes)
    console.print(
        f"{len(outcomes)} faults in {seconds:.0f} s: {bad} went wrong, {sum(o.ended.hung > 0 for o in outcomes)} hung. "
        f"Seconds from fault to end: median {times[len(times) // 2]:.1f}, longest {times[-1]:.1f}."
        if times
        else "no fault struck."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")
    parser.add_argument("--only", choices=list(KINDS), help="one kind of fault; else any")
    parser.add_argument("--keep", type=Path, help="folder for the logs of faults that went wrong")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with warnings.catch_warnings(action="ignore"):  # what Megatron says of missing extras
        import tests.runs.preload  # noqa: F401  Megatron, once; ranks are forked with it in memory

    console = Console(width=None if sys.stdout.isatty() else 200)
    rng = random.Random(options.seed)
    outcomes = []
    started = time.monotonic()
    with contextlib.ExitStack() as leaving:
        if options.keep is None:
            folder = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="fault_drill")))
        else:
            folder = options.keep.resolve()
            folder.mkdir(parents=True)
        session = Session(folder)
        for number in range(1, options.faults + 1):
            outcome = session.drill(number, choose(rng, options.only))
            outcomes.append(outcome)
            verdict = "; ".join(outcome.wrong) or f"well, after {outcome.ended.seconds:.1f} s"
            console.print(f"{number}/{options.faults} {outcome.drill.kind}: {verdict}", highlight=False)
    show(console, outcomes, time.monotonic() - started)
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
