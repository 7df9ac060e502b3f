"""A run that plans and exchanges ahead is the run that does not, bit for bit: samples, packs, losses, weights, log."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_packing.comm.failures import all_gather_rows
from megatron_packing.mcore import feed
from tests.runs.harness import Run, Runner
from tests.runs.test_resume import FLAGS, LENGTHS, REPLAYING, SAVING

pytestmark = pytest.mark.run

AHEAD = "--packing-prefetch"
EVALUATION = "--split 75,25,0 --eval-iters 1 --eval-interval 2"
"""Between steps 2 and 3, 4 and 5, while a step of training waits in the thread; 18 rows of training, 6 of it."""

# name -> (flags, ranks)
LAYOUTS = {
    "DP 2, balanced, evaluation, loader workers": (
        f"{EVALUATION} --sequence-packing-scheduler balanced --num-workers 1",
        2,
    ),
    "CP 2": ("--context-parallel-size 2", 2),
    "PP 2": ("--pipeline-model-parallel-size 2", 2),
    "DP 2, steps that run again": (REPLAYING, 2),
}


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row 9, in the middle of a step, has no target and is dropped."""
    path = tmp_path_factory.mktemp("prefetch") / "rows.jsonl"
    samples = [
        {"ids": [(10 * i + k) % 250 for k in range(length + 1)], "learn": i != 9} for i, length in enumerate(LENGTHS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    return path


def told(run: Run) -> list[str]:
    """What the log says of rows lost, and of losses of evaluation."""
    words = ("a row was", "rows lost", "lm loss value", "rows dropped")
    lines = [line.split(" | lm loss PPL")[0] for line in run.log.splitlines() if any(word in line for word in words)]
    return [line if "packing iteration" not in line else line.rpartition("|")[0].rpartition("|")[2] for line in lines]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_plans_ahead_is_the_run_that_does_not(name: str, runner: Runner, rows: Path) -> None:
    flags, ranks = LAYOUTS[name]
    plain = runner.train(FLAGS, flags, data=rows, ranks=ranks)
    ahead = runner.train(FLAGS, flags, AHEAD, data=rows, ranks=ranks)
    assert ahead.iterations == plain.iterations
    assert told(ahead) == told(plain)


def test_a_run_that_stops_and_resumes_while_it_plans_ahead(runner: Runner, rows: Path, tmp_path: Path) -> None:
    """At the stop the fourth step is planned and exchanged; the checkpoint knows nothing of it."""
    whole = runner.train(FLAGS, data=rows, ranks=2)
    first = runner.train(FLAGS, AHEAD, f"{SAVING} --save {tmp_path}", data=rows, ranks=2)
    second = runner.train(FLAGS, AHEAD, f"--load {tmp_path}", data=rows, ranks=2)
    assert first.iterations == whole.iterations[:3]
    assert second.iterations == whole.iterations[3:]


def _collectives_that_cross() -> None:
    """Rank 0 begins with Megatron's collective and ends with it, rank 1 has the thread's first."""
    from megatron.core import parallel_state
    from megatron.training import global_vars

    global_vars.set_args(SimpleNamespace(distributed_timeout_minutes=1))
    own, megatrons = feed._who_draws(of_their_own=True).group, parallel_state.get_data_parallel_group()
    assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(megatrons) == [0, 1]
    assert dist.get_backend(own) == "gloo"
    one = torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(one, group=megatrons, async_op=True)
    gathered = all_gather_rows(torch.tensor([7, dist.get_rank()]), group=own, device="cpu")
    if dist.get_rank() == 1:
        work = dist.all_reduce(one, group=megatrons, async_op=True)
    work.wait()
    assert (gathered.tolist(), one.tolist()) == ([[7, 0], [7, 1]], [2.0])


def test_the_threads_collectives_and_megatrons_may_cross(runner: Runner) -> None:
    runner.call(_collectives_that_cross, ranks=2)
