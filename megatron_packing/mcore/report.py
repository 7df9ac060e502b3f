"""What does packing do to a run, step by step? Two lines beside Megatron's own, and TensorBoard and W&B.

The first line says what the step held and how fast it went, the second what its plan is worth.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_packing.config import PackingConfig
from megatron_packing.data.survey import describe_losses
from megatron_packing.mcore.iterator import StepFigures
from megatron_packing.mcore.lost import TRUNCATED, LostInStep


@dataclass(slots=True)
class _Interval:
    """Sums over the steps since the last line."""

    steps: int = 0
    seconds: float = 0.0
    targets: int = 0
    real_tokens: int = 0


class StepReporter:
    """Logs each step's figures every `--packing-log-interval` steps.

    A step's time runs from the end of the step before (so that it holds the optimizer's update) to the
    end of this one; evaluation in between is left out. A step that Megatron runs again (`--rerun-mode`)
    counts once, and the second run's time goes to the step after it.
    """

    def __init__(self, config: PackingConfig) -> None:
        self._every = config.log_interval
        self._interval = _Interval()
        self._step_began: float | None = None
        self._last_iteration = -1
        self._losses = LossReporter()
        self._steps_without_targets = 0
        self._dropped = 0
        self._truncated = 0

    def step_begins(self, *, training: bool) -> None:
        """Call before the step's samples are drawn."""
        if training and self._step_began is None:
            self._step_began = time.perf_counter()

    def step_ended(self, figures: StepFigures, lost: LostInStep | None, *, training: bool) -> None:
        """Call once the schedule has run, on every rank; with what was lost, on those that draw samples."""
        now = time.perf_counter()
        if not training:
            self._step_began = None  # the next training step begins when it begins
            self._losses.add(lost, training=False)
            return
        assert self._step_began is not None
        if self._counted_already():
            return
        self._losses.add(lost, training=True)
        interval = self._interval
        interval.steps += 1
        interval.seconds += now - self._step_began
        interval.targets += figures.targets
        interval.real_tokens += figures.real_tokens
        self._step_began = now
        self._dropped += figures.dropped
        self._truncated += figures.truncated
        self._steps_without_targets += figures.targets == 0
        if interval.steps >= self._every:
            self._write(figures, interval)
            self._losses.write_totals()
            self._interval = _Interval()

    def run_ends(self) -> None:
        """Say what the run lost, by reason, with examples."""
        self._losses.write_summary()

    def _counted_already(self) -> bool:
        from megatron.training.global_vars import get_args

        last, self._last_iteration = self._last_iteration, get_args().curr_iteration
        return last == self._last_iteration

    def _write(self, figures: StepFigures, interval: _Interval) -> None:
        from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer
        from megatron.training.utils import print_rank_last

        iteration = get_args().curr_iteration + 1
        held: dict[str, int | float] = {
            "samples": figures.samples,
            "packs": figures.packs,
            "microbatches": figures.microbatches,
            "fill": figures.fill,
            "padding": figures.padding_tokens,
            "targets": figures.targets,
            "targets/s": interval.targets / interval.seconds,
            "real tokens/s": interval.real_tokens / interval.seconds,
        }
        planned = _plan_scalars(figures)
        print_rank_last(_line("iteration", iteration, held, self._lost()))
        print_rank_last(_line("plan", iteration, planned, {}))
        scalars = held | planned
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if writer:
            for name, value in scalars.items():
                writer.add_scalar(f"packing/{name}", value, iteration)
        if wandb:
            wandb.log({f"packing/{name}": value for name, value in scalars.items()}, iteration)

    def _lost(self) -> dict[str, int]:
        """Totals since the start, over all ranks; only those that are not 0 are worth a word."""
        totals = {
            "rows dropped": self._dropped,
            "rows truncated": self._truncated,
            "steps without targets, skipped": self._steps_without_targets,
        }
        return {name: total for name, total in totals.items() if total}


def _plan_scalars(figures: StepFigures) -> dict[str, int | float]:
    """What the step's plan is worth. The three wastes and `fill` make 1; the bounds are what no plan goes below."""
    return {
        "alignment waste": figures.alignment_waste,
        "tail waste": figures.tail_waste,
        "dummy waste": figures.dummy_waste,
        "least packs": figures.packs_lower_bound,
        "step imbalance": figures.step_imbalance,
        "lockstep imbalance": figures.lockstep_imbalance,
        "least lockstep imbalance": figures.lockstep_lower_bound,
        "plan ms": figures.plan_ms,
        "exchange ms": figures.exchange_ms,
        "waited ms": figures.waited_ms,
    }


_FORMATS = {
    "fill": ".1%",
    "targets/s": ",.0f",
    "real tokens/s": ",.0f",
    "alignment waste": ".1%",
    "tail waste": ".1%",
    "dummy waste": ".1%",
    "step imbalance": ".3f",
    "lockstep imbalance": ".3f",
    "least lockstep imbalance": ".3f",
    "plan ms": ".2f",
    "exchange ms": ".2f",
    "waited ms": ".2f",
}
"""How the log writes a figure; counts, which are not named here, with commas."""


def _line(kind: str, iteration: int, scalars: Mapping[str, int | float], lost: Mapping[str, int]) -> str:
    words = [f"{name}: {value:{_FORMATS.get(name, ',')}}" for name, value in scalars.items()]
    words += [f"{name}: {total:,}" for name, total in lost.items()]
    return f" packing {kind:9} {iteration:8d} | " + " | ".join(words) + " |"


class LossReporter:
    """Says which rows are lost and why: each reason's first rows at once, totals as they grow, all of it at the end.

    Rank 0 speaks; it draws samples, and counts cover all ranks.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in ("training", "evaluation")}
        self._examples: dict[str, dict[str, list[str]]] = {name: {} for name in self._counts}
        self._written = 0

    def add(self, lost: LostInStep | None, *, training: bool) -> None:
        """Take in what a step lost; None on ranks that do not draw."""
        if lost is None or _rank() != 0:
            return
        name = "training" if training else "evaluation"
        self._counts[name].update(lost.counts)
        for reason, why in lost.news:
            self._examples[name].setdefault(reason, []).append(why)
            befell = "truncated" if reason == TRUNCATED else f"dropped ({reason})"
            print(f"megatron_packing: a row was {befell} in {name}: {why}", flush=True)

    def write_totals(self) -> None:
        """One line by reason, where rows were dropped since the last one; cut ones are in the packing line as well."""
        counts = self._counts["training"]
        dropped = counts.total() - counts[TRUNCATED]
        if dropped > self._written:
            self._written = dropped
            told = " | ".join(f"{reason}: {count:,}" for reason, count in sorted(counts.items()))
            print(f" packing, rows lost or cut since the start | {told} |", flush=True)

    def write_summary(self) -> None:
        """A table by reason, with the first rows of each."""
        for name, counts in self._counts.items():
            if counts:
                print(f"megatron_packing: rows lost or cut in {name}, over all ranks: {counts.total():,}", flush=True)
                for line in describe_losses(counts, self._examples[name]):
                    print(f"megatron_packing: {line}", flush=True)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
