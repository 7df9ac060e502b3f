"""Which packs does a whole data set make? 0.1 s for a million samples; with few samples to a pack, seconds.

A training step's planner sees one global batch. Whoever packs ahead of time sees every sample at once and can fill
packs to the last token or two (`megatron-packing pack` writes the result to a file). Best fit does that wherever it
reaches a lower bound; where `max_seqs` keeps it from that, a linear program does.

As a planner it gives the packs of one step in the order of their longest samples: the fewest packs, no balance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule.first_fit import fullest_in_halves
from megatron_packing.schedule.plan import Problem, even_counts

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSet:
    """The packs of a whole set."""

    sample_ids: npt.NDArray[np.int32]
    """Samples pack by pack, ascending within each, shape [N]."""
    ends: Int64Array
    """Where each pack ends in `sample_ids`, shape [P]."""

    def __len__(self) -> int:
        """Packs."""
        return len(self.ends)

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """The samples of each pack."""
        return iter(np.split(self.sample_ids, self.ends[:-1]) if len(self) else [])

    def in_order_of_data(self) -> "PackedSet":
        """The same packs by their first samples: a packer goes by length, which is no order to train in."""
        sizes_P = np.diff(self.ends, prepend=0)
        starts_P = self.ends - sizes_P
        order_P = np.argsort(self.sample_ids[starts_P], kind="stable")
        ends_P = np.cumsum(sizes_P[order_P])
        moved_P = starts_P[order_P] - (ends_P - sizes_P[order_P])
        place_N = np.arange(len(self.sample_ids)) + np.repeat(moved_P, sizes_P[order_P])
        return PackedSet(sample_ids=self.sample_ids[place_N], ends=ends_P)


def pack_set(padded: Int64Array, capacity: int, max_seqs: int | None = None) -> PackedSet:
    """As few packs as we can find.

    Args:
        padded: padded tokens of each sample, int64 [N], each from 1 to `capacity`.
        capacity: padded tokens that a pack may hold.
        max_seqs: samples that a pack may hold; None means any number. Above `depth_capped.DEEPEST` best fit is all.

    Raises:
        MissingDependency: `max_seqs` binds, and SciPy is not installed.
    """
    # Both are compiled by numba, which takes half a second to import: whoever plans with another planner is spared.
    from megatron_packing.schedule import best_fit, depth_capped

    pack_of_N, num_packs = best_fit.best_fit_decreasing(padded, capacity, max_seqs)
    if max_seqs is not None and max_seqs <= depth_capped.DEEPEST and num_packs > _at_least(padded, capacity, max_seqs):
        by_program = depth_capped.depth_capped(padded, capacity, max_seqs)
        if by_program[1] < num_packs:
            pack_of_N, num_packs = by_program
    sample_ids, ends = best_fit.by_pack(pack_of_N, num_packs)
    return PackedSet(sample_ids=sample_ids, ends=ends)


def warm_up() -> None:
    """Compile what best fit needs, or load it: seconds the first time on a machine, then about 0.5 s a process."""
    pack_set(np.array([2, 1, 1], dtype=np.int64), 3)


def _at_least(padded: Int64Array, capacity: int, max_seqs: int) -> int:
    """Packs for so many tokens and so many samples; `bounds` has a better bound, which sorts."""
    return max(-(-int(padded.sum()) // capacity), -(-len(padded) // max_seqs))


def offline(problem: Problem) -> list[list[int]]:
    """The fewest packs that we can find; then the fullest are halved until every rank runs equally many."""
    packed = pack_set(problem.padded, problem.capacity, problem.max_seqs)
    return even_counts([pack.tolist() for pack in packed], problem, fullest_in_halves)
