"""Would `balanced` make these steps shorter? Answered from what has been planned and from what no plan can beat.

A bound costs half a millisecond a step and compiles nothing, so any run can ask. `balanced` comes within 2 % of it on
long-tailed lengths, and within 0.2 % over whole steps; see scripts/bench_schedule.py.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_packing.schedule.balanced import objective
from megatron_packing.schedule.bounds import step_lower_bound
from megatron_packing.schedule.items import Items
from megatron_packing.schedule.metrics import Metrics
from megatron_packing.schedule.plan import Lengths, Plan

WORTH_SAYING = 1.03
"""Imbalance of the plans over the least possible one from which a word is worth it."""


def imbalance(metrics: Metrics, kept_small: str) -> float:
    """The figure that `balanced` keeps small, `step` or `lockstep`: what a step takes over the mean rank's work."""
    return metrics.step_imbalance if kept_small == "step" else metrics.lockstep_imbalance


@dataclass(slots=True, kw_only=True)
class BalanceAdvice:
    """Looks at a run's first plans and then says once what `balanced` could gain, if it is worth saying."""

    balance: str = "auto"
    """As in `make_plan`."""
    steps: int = 10
    """Plans to look at: one alone may be a lucky or unlucky draw."""
    _seen: list[tuple[float, float]] = field(default_factory=list)
    """Imbalance and the least possible one."""

    def look_at(self, plan: Plan, lengths: Lengths) -> str | None:
        """What to say now, or None.

        Args:
            plan: a step's plan.
            lengths: the lengths that were planned, in tokens.
        """
        if len(self._seen) >= self.steps or plan.scheduler == "balanced" or plan.topology.dp == 1 or not len(lengths):
            return None
        kept_small = objective(self.balance, plan.topology)
        metrics = plan.metrics(lengths)
        least = metrics.lockstep_lower_bound if kept_small == "lockstep" else _step_bound(plan, lengths)
        self._seen.append((imbalance(metrics, kept_small), least))
        if len(self._seen) < self.steps:
            return None
        mean, best = (sum(column) / len(column) for column in zip(*self._seen, strict=True))
        if mean < WORTH_SAYING * best:
            return None
        return (
            f"in the first {self.steps} steps, {plan.scheduler} gave the busiest rank {mean:.3f} times the mean rank's "
            f"work ({_WHEN[kept_small]}); no plan has less than {best:.3f}, and --sequence-packing-scheduler balanced "
            "comes near that"
        )


_WHEN = {"step": "over the step", "lockstep": "summed over microbatches"}


def _step_bound(plan: Plan, lengths: Lengths) -> float:
    items = Items(lengths=np.asarray(lengths, dtype=np.int64), units=plan.units)
    return step_lower_bound(
        items.padded(plan.topology.alignment),
        items.work(plan.cost),
        dp=plan.topology.dp,
        capacity=plan.capacity,
        num_microbatches=plan.num_microbatches,
    )
