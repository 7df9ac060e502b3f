"""What has each rank to say? Texts of any length, gathered. Cost: two all-gathers, for their sizes and themselves."""

import numpy as np
import torch
import torch.distributed as dist

from megatron_packing.comm.failures import all_gather_rows


def all_gather_texts(text: str, *, group: dist.ProcessGroup | None, device: torch.device | str) -> list[str]:
    """The texts of all ranks of `group` by rank, on every rank; called by all of them.

    Args:
        text: what this rank says.
        group: the ranks that talk; None for a single rank.
        device: where the group's backend wants its tensors.
    """
    if group is None or group.size() == 1:
        return [text]
    # A file's name may hold bytes that are no text, which Python keeps as lone surrogates.
    mine = torch.from_numpy(np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8).copy())
    sizes = all_gather_rows(torch.tensor([mine.numel()]), group=group, device=device)[:, 0].tolist()
    filled = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    filled[: mine.numel()] = mine
    rows = all_gather_rows(filled, group=group, device=device)
    return [row[:size].numpy().tobytes().decode(errors="surrogatepass") for row, size in zip(rows, sizes, strict=True)]
