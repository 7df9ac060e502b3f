"""What do planners place? Samples, or *units*: samples that must share a pack, such as both answers of a pair.

To a planner a unit is one sample, with the tokens, the padded tokens and the work of its samples together. No sample
of a pack looks at another, so that a unit of a and b tokens has a**2 + b**2 query-key pairs and not (a + b)**2. The
plan that comes of it names the samples again.

Legend: S samples, N items: the units, or the samples themselves. All sums are of integers and exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import PackingError
from megatron_packing.schedule.cost import CostModel

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Units:
    """Samples that must share a pack: the first so many, the next so many, and so on."""

    sizes: tuple[int, ...]
    """Samples of each unit, shape [N], each at least 1; at least one unit."""

    @classmethod
    def of(cls, sizes: Sequence[int] | npt.NDArray[np.integer], num_samples: int) -> "Units | None":
        """The units of these sizes; None where each sample stands alone.

        Raises:
            PackingError: sizes that are no integers of at least 1, or hold more or fewer samples than there are.
        """
        counts = tuple(int(size) for size in sizes)
        wrong = next((i for i, size in enumerate(sizes) if size != counts[i] or counts[i] < 1), None)
        if wrong is not None:
            raise PackingError(f"units[{wrong}] is {sizes[wrong]}; it counts samples and must be an integer >= 1.")
        if sum(counts) != num_samples:
            raise PackingError(f"units hold {sum(counts):,} samples in all; there are {num_samples:,} lengths.")
        return None if len(counts) == num_samples else cls(counts)

    @property
    def ends(self) -> tuple[int, ...]:
        """The sample after each unit's last, shape [N]."""
        return tuple(accumulate(self.sizes))

    def sums(self, values: npt.NDArray[np.int64]) -> Int64Array:
        """Of each unit, the sum over its samples: [S] -> [N], or [S, K] -> [N, K]."""
        starts = np.array(self.ends) - np.array(self.sizes)
        totals: Int64Array = np.add.reduceat(values, starts, axis=0)
        return totals

    def samples_of(self, packs: Iterable[Sequence[int]]) -> list[list[int]]:
        """Packs of samples from packs of units; both are named by their places."""
        ends = self.ends
        return [[i for unit in ids for i in range(ends[unit] - self.sizes[unit], ends[unit])] for ids in packs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """Samples as planners see them."""

    lengths: Int64Array
    """Tokens of each sample, shape [S]."""
    units: Units | None
    """Which of them must share a pack; None: none must."""

    @property
    def most_samples(self) -> int:
        """Samples of the largest item."""
        return 1 if self.units is None else max(self.units.sizes)

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest item."""
        return 1 if self.units is None else min(self.units.sizes)

    def tokens(self) -> Int64Array:
        """Tokens of each item, shape [N]."""
        return self.lengths if self.units is None else self.units.sums(self.lengths)

    def samples(self) -> Int64Array:
        """Samples of each item, shape [N]."""
        return np.ones(len(self.lengths), dtype=np.int64) if self.units is None else np.array(self.units.sizes)

    def padded(self, alignment: int | Int64Array) -> Int64Array:
        """Tokens of each item with each sample padded: one alignment -> [N], alignments of shape [K] -> [N, K]."""
        lengths = self.lengths[:, None] if isinstance(alignment, np.ndarray) else self.lengths
        padded: Int64Array = -(-lengths // alignment) * alignment
        return padded if self.units is None else self.units.sums(padded)

    def work(self, cost: CostModel) -> npt.NDArray[np.float64]:
        """The cost of each item, shape [N]: the sum over its samples."""
        if self.units is None:
            return cost.of(self.lengths)
        return cost.of(self.tokens(), self.units.sums(self.lengths * self.lengths))
