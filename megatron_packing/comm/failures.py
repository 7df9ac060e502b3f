"""Did every rank get through? Asked before a collective, so that no rank waits for one that is gone.

Cost: one all-gather of one byte a rank; the texts travel only after a failure.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packing.errors import PackingError

_TEXT_BYTES = 2048  # of a failure's message; enough for a path and a sentence


def device_of(group: dist.ProcessGroup | None = None) -> str:
    """Where the backend of `group` wants its tensors; None: of the default group."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def raise_if_any_failed(
    failure: Exception | None, *, group: dist.ProcessGroup | None, device: torch.device | str
) -> None:
    """Raise on every rank of `group` when any of them passes a `failure`.

    Args:
        failure: what went wrong on this rank; None if nothing did.
        group: the ranks that ask each other; None for a single rank.
        device: where the group's backend wants its tensors.

    Raises:
        Exception: `failure` itself on a rank that had one; `PackingError` with its text on the others.
    """
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return
    mine = torch.tensor([failure is not None], dtype=torch.uint8)
    if bool(all_gather_rows(mine, group=group, device=device).any()):
        raise_first_failure(failure, group=group, device=device)


def raise_first_failure(failure: Exception | None, *, group: dist.ProcessGroup, device: torch.device | str) -> None:
    """Share the failures' texts, then raise. Called by all ranks once they know that one has failed."""
    mine = as_text_row(failure)
    texts = all_gather_rows(mine, group=group, device=device)
    if failure is not None:
        raise failure
    for rank, row in enumerate(texts):
        words = text_of_row(row)
        if words:
            raise PackingError(f"rank {dist.get_global_rank(group, rank)} failed: {words}")
    raise PackingError("another rank failed without a message; see its output.")


def as_text_row(failure: Exception | None) -> Tensor:
    """uint8 of a fixed size: what `failure` says, cut where it is too long; zeros for None.

    Any text can be sent: an undecodable file name must not raise here, where other ranks wait.
    """
    text = b"" if failure is None else str(failure).encode(errors="backslashreplace")[:_TEXT_BYTES]
    row = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    row[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return row


def text_of_row(row: Tensor) -> str:
    """The inverse of `as_text_row`."""
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


def all_gather_rows(row: Tensor, *, group: dist.ProcessGroup, device: torch.device | str) -> Tensor:
    """[ranks, n] on the CPU, from one [n] tensor of each rank."""
    mine = row.to(device)
    rows = mine.new_empty(group.size() * row.numel())
    dist.all_gather_into_tensor(rows, mine, group=group)
    return rows.view(group.size(), -1).cpu()
