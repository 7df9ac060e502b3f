"""How does one rank do long work that all profit from? The others wait without a limit, and its failure is theirs.

A barrier would not do: collectives give up after minutes, and indexing a terabyte takes longer. So the ranks wait at
the store through which they found each other, which has no limit; a collective follows once all are there. A rank that
dies meanwhile takes the store or its connections with it, which ends the others (`mcore/peers`).

Cost: one look at the store a second from each waiting rank, less at the beginning.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_packing.comm.failures import raise_if_any_failed

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0

_turns_taken = 0


def take_turn(work: Callable[[], None], *, is_mine: bool, device: torch.device | str) -> None:
    """Run `work` where `is_mine`; returns everywhere once it is done. Called by all ranks of the default group.

    Args:
        work: may take any time.
        is_mine: whether this rank does it.
        device: where the group's backend wants its tensors.

    Raises:
        Exception: what `work` raised, on that rank; `PackingError` with its text on the others.
    """
    failure: Exception | None = None
    if is_mine:
        try:
            work()
        except Exception as error:
            failure = error
    if dist.get_world_size() > 1:
        _wait_for_all()
    raise_if_any_failed(failure, group=dist.group.WORLD, device=device)


def _wait_for_all() -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    global _turns_taken  # every rank counts alike, so that each turn has a counter of its own
    _turns_taken += 1
    store, key = _get_default_store(), f"megatron_packing/turns/{_turns_taken}"
    ranks, pause = dist.get_world_size(), _FIRST_PAUSE_SECONDS
    arrived = store.add(key, 1)
    while arrived < ranks:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        arrived = store.add(key, 0)
