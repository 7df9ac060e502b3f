"""What do steps cost without packing: padded to one length, or sorted by length and padded within the batch?

Both pay for padding as for tokens: a row of L tokens costs what a sample of L tokens does. Cost: one sort a step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule import CostModel
from megatron_packing.topology import Topology

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Figures of a way to batch without packing, of the same meaning as those of `Metrics`; means over steps."""

    microbatches_per_rank: float
    packs: float
    """Batches of padded rows, of all ranks."""
    fill: float
    """Real tokens / places for tokens in all batches, as they run."""
    padding_tokens: float
    """Tokens that run and are not real."""
    step_imbalance: float
    """The busiest rank's cost over the step, padding included / what the mean rank would have with real tokens only."""
    lockstep_imbalance: float
    """The same, summed over microbatches of the rank that is busiest in each."""

    def as_dict(self) -> dict[str, float]:
        """All figures by name."""
        return asdict(self)


def padded_baseline(steps: Sequence[Int64Array], row: int, topology: Topology, cost: CostModel) -> Baseline:
    """Every sample a microbatch of its own, padded to `row` tokens, dealt out to the ranks in turn."""
    return _mean([_figures(step, np.full(len(step), row), np.ones(len(step)), topology, cost) for step in steps])


def sorted_baseline(steps: Sequence[Int64Array], capacity: int, topology: Topology, cost: CostModel) -> Baseline:
    """Each step's samples sorted by length, as many to a batch as fit when padded to the longest of it.

    Args:
        steps: the lengths of each step's samples, in tokens, each of at most `capacity` when padded to the alignment.
        capacity: tokens that a rank with its CP ranks holds in a microbatch.
        topology: its DP ranks get the batches in turn, the longest rows first.
        cost: what counts as work.
    """
    return _mean([_figures(step, *_sorted_batches(step, capacity, topology), topology, cost) for step in steps])


def _sorted_batches(lengths: Int64Array, capacity: int, topology: Topology) -> tuple[Int64Array, Int64Array]:
    """Of each batch, the tokens of a row and the rows."""
    descending = np.sort(-(-lengths // topology.alignment) * topology.alignment)[::-1]
    row_tokens, rows, at = [], [], 0
    while at < len(descending):
        longest = int(descending[at])
        row_tokens.append(longest)
        rows.append(min(max(1, capacity // longest), len(descending) - at))
        at += rows[-1]
    return np.array(row_tokens), np.array(rows)


def _figures(
    lengths: Int64Array, row_tokens_P: Int64Array, rows_P: Int64Array, topology: Topology, cost: CostModel
) -> Baseline:
    microbatches = -(-len(rows_P) // topology.dp)
    costs_MD = np.zeros(microbatches * topology.dp)
    costs_MD[: len(rows_P)] = cost.of(row_tokens_P) * rows_P
    costs_MD = costs_MD.reshape(microbatches, topology.dp)
    mean = float(cost.of(lengths).sum()) / topology.dp
    real, slots = int(lengths.sum()), int((row_tokens_P * rows_P).sum())
    return Baseline(
        microbatches_per_rank=microbatches,
        packs=len(rows_P),
        fill=real / slots,
        padding_tokens=slots - real,
        step_imbalance=float(costs_MD.sum(axis=0).max() / mean) if mean else 1.0,
        lockstep_imbalance=float(costs_MD.max(axis=1).sum() / mean) if mean else 1.0,
    )


def _mean(of_steps: Sequence[Baseline]) -> Baseline:
    names = [field.name for field in fields(Baseline)]
    return Baseline(**{name: sum(getattr(one, name) for one in of_steps) / len(of_steps) for name in names})
