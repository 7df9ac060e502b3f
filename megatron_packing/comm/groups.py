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

    Call on every rank of the job at the same point.

    Args:
        ranks: global ranks of the data-parallel group, in order.
        sizes: how many neighbours a group may have; a group begins at a multiple of its size.
        timeout: of the groups' collectives; None: torch's own.
    """

    def __init__(self, ranks: Sequence[int], sizes: Sequence[int], timeout: timedelta | None = None) -> None:
        self._groups: dict[int, dist.ProcessGroup] = {}
        for size in sizes:
            for start in range(0, len(ranks) - size + 1, size):
                members = list(ranks[start : start + size])
                group = dist.new_group(members, timeout=timeout) if size > 1 else None
                if group is not None and dist.get_rank() in members:
                    self._groups[size] = group

    def of(self, size: int) -> dist.ProcessGroup | None:
        """This rank's group of `size` ranks; None for a rank alone."""
        return None if size == 1 else self._groups[size]
