"""Do the log, TensorBoard and W&B get the figures of a step, every so many steps?"""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars, utils

from megatron_packing.config import PackingConfig
from megatron_packing.mcore.iterator import StepFigures
from megatron_packing.mcore.report import StepReporter
from megatron_packing.topology import Topology

CONFIG = PackingConfig(
    topology=Topology(dp=2), seq_length=100, scheduler="first_fit", max_tokens_per_rank=100, log_interval=2
)

PLAN_FIGURES = {
    "alignment waste": 0.01,
    "tail waste": 0.14,
    "dummy waste": 0.1,
    "least packs": 7,
    "step imbalance": 1.25,
    "lockstep imbalance": 1.5,
    "least lockstep imbalance": 1.125,
    "plan ms": 2.5,
    "exchange ms": 1.5,
    "waited ms": 0.25,
}


def figures(samples: int) -> StepFigures:
    return StepFigures(
        samples=samples,
        packs=8,
        dummies=1,
        microbatches=4,
        real_tokens=600,
        padding_tokens=9,
        fill=0.75,
        alignment_waste=0.01,
        tail_waste=0.14,
        dummy_waste=0.1,
        packs_lower_bound=7,
        step_imbalance=1.25,
        lockstep_imbalance=1.5,
        lockstep_lower_bound=1.125,
        targets=500,
        dropped=0,
        truncated=0,
        plan_ms=2.5,
        exchange_ms=1.5,
        waited_ms=0.25,
    )


class Writers:
    """What TensorBoard and W&B were given."""

    def __init__(self) -> None:
        self.scalars: dict[int, dict[str, Any]] = {}
        self.logged: dict[int, dict[str, Any]] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars.setdefault(iteration, {})[name] = value

    def log(self, values: dict[str, Any], iteration: int) -> None:
        self.logged[iteration] = values


def test_log_tensorboard_and_wandb_get_each_intervals_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    writers, lines, arguments = Writers(), list[str](), SimpleNamespace(curr_iteration=0)
    monkeypatch.setattr(global_vars, "get_args", lambda: arguments)
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: writers)
    monkeypatch.setattr(global_vars, "get_wandb_writer", lambda: writers)
    monkeypatch.setattr(utils, "print_rank_last", lines.append)
    reporter = StepReporter(CONFIG)
    for iteration in range(4):
        arguments.curr_iteration = iteration
        reporter.step_begins(training=True)
        reporter.step_ended(figures(samples=10 + iteration), None, training=True)
    assert list(writers.scalars) == list(writers.logged) == [2, 4]
    for iteration, samples in ((2, 11), (4, 13)):
        got = writers.logged[iteration]
        assert got == writers.scalars[iteration]
        assert {name: got[f"packing/{name}"] for name in PLAN_FIGURES} == PLAN_FIGURES
        assert (got["packing/samples"], got["packing/targets"], got["packing/fill"]) == (samples, 500, 0.75)
    assert [" ".join(line.split("|")[0].split()) for line in lines] == [
        "packing iteration 2",
        "packing plan 2",
        "packing iteration 4",
        "packing plan 4",
    ]
    assert lines[1].split("|", 1)[1] == (
        " alignment waste: 1.0% | tail waste: 14.0% | dummy waste: 10.0% | least packs: 7 | step imbalance: 1.250 | "
        "lockstep imbalance: 1.500 | least lockstep imbalance: 1.125 | plan ms: 2.50 | exchange ms: 1.50 | "
        "waited ms: 0.25 |"
    )
