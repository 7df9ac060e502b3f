"""Which process group shares a pack, when every microbatch groups the ranks anew?

Megatron makes such groups itself only for a forward-backward schedule of its own, and not of every size that a planner
may choose. Ours are made once, all of them, by all ranks in the same order: making one in the middle of training would
be a collective that most ranks do not know of.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class ContextGroups:
    """The groups that this rank may share a pack with: one of each size in which a block of ranks holds it.

    Call on every rank of the job at the same point. Cost: about as many process groups as the job has ranks, of which
    each rank is in one of each size; NCCL connects a group only once it is used.

    Args:
        rows: global ranks of each group of DP x CP ranks that the job has (one for each TP rank of each stage), in
            order; the same on every rank.
        sizes: how many neighbours in a row a group may have; a group begins at a multiple of its size.
        timeout: of the groups' collectives; None: torch's own.
    """

    def __init__(self, rows: Sequence[Sequence[int]], sizes: Sequence[int], timeout: timedelta | None = None) -> None:
        self._groups: dict[int, dist.ProcessGroup] = {}
        for size in sizes:
            blocks = [row[at : at + size] for row in rows for at in range(0, len(row) - size + 1, size)]
            for members in map(list, blocks):
                group = dist.new_group(members, timeout=timeout) if size > 1 else None
                if group is not None and dist.get_rank() in members:
                    self._groups[size] = group

    def of(self, size: int) -> dist.ProcessGroup | None:
        """This rank's group of `size` ranks; None for a rank alone."""
        return None if size == 1 else self._groups[size]
