"""examples/pretrain_gpt.py with one fault: `--fault KIND:RANK:STEP:SEED`, taken out of the command line; none without.

The fault strikes on one rank, in one training step (counted from 1). The moment is written to $RECORD_TO/injected, so
that whoever started the run can tell how long its end took. Steps are told by sample index, so that a fault in the data
also works in a loader's worker: samples of a step follow one another, --global-batch-size to each.
"""

import ctypes
import functools
import itertools
import os
import random
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.training import checkpointing, get_args, training

from megatron_packing.data import Record
from megatron_packing.mcore import dataset, iterator

SAVE_SECONDS = 0.6
"""A checkpoint of the toy model takes about this long; kills in a save fall anywhere in it."""

FILE_BYTES = 2**17
"""Most bytes of a file on the "full" disk: more than a rank prints, less than its part of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens, where and when."""

    kind: str
    rank: int
    step: int
    seed: int

    @property
    def is_here(self) -> bool:
        """Whether this process, or the rank that it reads for, is the one."""
        return int(os.environ["RANK"]) == self.rank

    def strikes(self) -> None:
        """Note the moment; the first one counts."""
        note = Path(os.environ["RECORD_TO"], "injected")
        if not note.exists():
            note.write_text(str(time.time()))
            print(f"fault {self.kind} struck at {time.time()}", flush=True)


def take_fault() -> Fault | None:
    """The fault of the command line."""
    if "--fault" not in sys.argv:
        return None
    at = sys.argv.index("--fault")
    kind, rank, step, seed = sys.argv[at + 1].split(":")
    del sys.argv[at : at + 2]
    return Fault(kind=kind, rank=int(rank), step=int(step), seed=int(seed))


# --- in the data: on the rank that reads, or in its worker ------------------------------------------------------------


def in_data(act: Callable[[Fault, Any, int], Any]) -> Callable[[Fault], None]:
    """Do `act` in place of reading one sample of the step. A row that is read again, as at start-up, is left alone."""

    def install(fault: Fault) -> None:
        read = dataset.VarlenDataset.__getitem__

        def faulty(self: Any, idx: int) -> Any:
            in_step = idx // get_args().global_batch_size == fault.step - 1
            if in_step and fault.is_here:
                fault.strikes()
                return act(fault, self, idx)
            return read(self, idx)

        dataset.VarlenDataset.__getitem__ = faulty

    return install


def raise_in_dataset(fault: Fault, data: Any, idx: int) -> Any:
    raise KeyError(f"sample {idx} of a dataset with a bug")


def read_bad_row(fault: Fault, data: Any, idx: int) -> Any:
    row = data.row_of(idx)
    return data.encode(Record(path=str(data.dataset_path), line=row + 1, fields={"messages": "ping"}), row)


def stall(fault: Fault, data: Any, idx: int) -> Any:
    time.sleep(10_000)


def stall_and_swallow(fault: Fault, data: Any, idx: int) -> Any:
    """A reader that tries for ever and takes every exception for one of its own."""
    while True:
        try:
            time.sleep(10_000)
        except Exception as error:
            print(f"trying again after {type(error).__name__}", flush=True)


def stall_with_the_lock(fault: Fault, data: Any, idx: int) -> Any:
    """A reader in a C library that does not give up the interpreter's lock: no other thread of Python runs."""
    sys.stdout.flush()
    ctypes.PyDLL(None).sleep(10_000)


def kill_this_process(fault: Fault, data: Any, idx: int) -> Any:
    """The rank itself, or only its worker."""
    os.kill(os.getpid(), signal.SIGKILL)


# --- in planning ------------------------------------------------------------------------------------------------------


def in_planner(act: Callable[[Callable[..., Any], dict[str, Any], Any], Any]) -> Callable[[Fault], None]:
    """Let `act` plan the step on the rank: the run's plan of that number, which may be made ahead."""

    def install(fault: Fault) -> None:
        plan = iterator.make_plan
        plans = itertools.count(1)

        def faulty(lengths: Any, **settings: Any) -> Any:
            if fault.is_here and next(plans) == fault.step:
                fault.strikes()
                return act(plan, settings, lengths)
            return plan(lengths, **settings)

        iterator.make_plan = faulty

    return install


def raise_in_planner(plan: Callable[..., Any], settings: dict[str, Any], lengths: Any) -> Any:
    raise ZeroDivisionError("a planner with a bug")


def plan_otherwise(plan: Callable[..., Any], settings: dict[str, Any], lengths: Any) -> Any:
    return plan(lengths, **{**settings, "max_seqs": 1})


def kill_planner(plan: Callable[..., Any], settings: dict[str, Any], lengths: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


# --- in the model and around it ---------------------------------------------------------------------------------------


def in_forward(act: Callable[[Fault], None]) -> Callable[[Fault], None]:
    """Do `act` before the model runs the step's first pack."""

    def install(fault: Fault) -> None:
        forward = GPTModel.forward

        @functools.wraps(forward)
        def faulty(self: Any, *args: Any, **keywords: Any) -> Any:
            if fault.is_here and get_args().curr_iteration + 1 == fault.step:
                fault.strikes()
                act(fault)
            return forward(self, *args, **keywords)

        GPTModel.forward = faulty

    return install


def raise_in_forward(fault: Fault) -> None:
    raise ValueError("a model with a bug")


def kill_rank(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_job(fault: Fault) -> None:
    """As a cluster's scheduler does it: every rank gets the signal. Their process ids are those that they noted."""
    for note in Path(os.environ["RECORD_TO"]).glob("pid*"):
        os.kill(int(note.read_text()), signal.SIGTERM)


# --- at a checkpoint --------------------------------------------------------------------------------------------------


def in_save(act: Callable[[Fault], threading.Thread | None]) -> Callable[[Fault], None]:
    """Do `act` as the first checkpoint at or after the step begins; what goes on after it is waited for."""

    def install(fault: Fault) -> None:
        save = checkpointing.save_checkpoint

        @functools.wraps(save)
        def faulty(iteration: int, *args: Any, **keywords: Any) -> Any:
            at_work = None
            if fault.is_here and iteration >= fault.step:
                fault.strikes()
                at_work = act(fault)
            saved = save(iteration, *args, **keywords)
            if at_work is not None:
                at_work.join()
            return saved

        checkpointing.save_checkpoint = training.save_checkpoint = faulty

    return install


def kill_within_save(fault: Fault) -> threading.Thread:
    """Anywhere in the save, or right after it where that was faster."""
    delay = random.Random(fault.seed).uniform(0, SAVE_SECONDS)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    timer.start()
    return timer


def fill_disk(fault: Fault) -> None:
    """Python ignores the signal, so that writing fails with an error, as it does on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


FAULTS: dict[str, Callable[[Fault], None]] = {
    "dataset-raises": in_data(raise_in_dataset),
    "bad-row": in_data(read_bad_row),
    "reader-stalls": in_data(stall),
    "reader-stalls-swallows": in_data(stall_and_swallow),
    "reader-stalls-in-c": in_data(stall_with_the_lock),  # in a run without workers
    "killed-reading": in_data(kill_this_process),  # in a run without workers
    "worker-killed": in_data(kill_this_process),  # in a run with some
    "planner-raises": in_planner(raise_in_planner),
    "plan-differs": in_planner(plan_otherwise),
    "killed-planning": in_planner(kill_planner),
    "model-raises": in_forward(raise_in_forward),
    "killed-in-forward": in_forward(kill_rank),
    "killed-saving": in_save(kill_within_save),
    "disk-full": in_save(fill_disk),
    "all-terminated": in_forward(terminate_job),
}
"""Every kind by name."""


if __name__ == "__main__":
    Path(os.environ["RECORD_TO"], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    fault = take_fault()
    if fault is not None:
        FAULTS[fault.kind](fault)
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"), run_name="__main__")
