"""How does each sample reach the ranks that run it? Flat int32 tensors, one all-to-all, nothing pickled.

A sample of L tokens travels as 3*L integers: tokens, labels, and the bits of the loss mask. Every rank
knows all lengths and the plan, so that no sizes are exchanged. A rank that sends or receives nothing
takes part with empty splits. Each token crosses the wire at most once to each rank that runs it.
"""

from collections.abc import Container, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packing.comm.lengths import GatheredLengths
from megatron_packing.thd.pack import SampleTensors

_FIELDS = 3  # tokens, labels, loss mask


def exchange_samples(
    mine: Mapping[int, SampleTensors],
    *,
    destinations: Sequence[Container[int]],
    gathered: GatheredLengths,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> dict[int, SampleTensors]:
    """Send every sample, whole, to its destinations.

    Args:
        mine: the samples that this rank drew, by id.
        destinations: the ranks of `group` that run each sample, by id: one, or all that share its pack.
        gathered: all lengths and who drew what.
        group: the data-parallel group; None for a single rank.
        device: where the group's backend wants its tensors.

    Returns:
        The samples that this rank runs, by id.
    """
    if group is None or group.size() == 1:
        return dict(mine)
    rank, ranks = group.rank(), group.size()
    owners = gathered.owners()
    # Ascending ids on both sides: the wire carries no names.
    ascending = sorted(mine)
    outgoing = [[i for i in ascending if to in destinations[i]] for to in range(ranks)]
    incoming: list[list[int]] = [[] for _ in range(ranks)]
    for i, owner in enumerate(owners):
        if rank in destinations[i]:
            incoming[owner].append(i)
    sizes_out = [sum(_FIELDS * gathered.lengths[i] for i in ids) for ids in outgoing]
    sizes_in = [sum(_FIELDS * gathered.lengths[i] for i in ids) for ids in incoming]
    flat = [_flatten(mine[i]) for ids in outgoing for i in ids]
    sent = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=torch.int32, device=device)
    received = torch.empty(sum(sizes_in), dtype=torch.int32, device=device)
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    order = [i for ids in incoming for i in ids]
    pieces = received.cpu().split([_FIELDS * gathered.lengths[i] for i in order])
    return {i: _unflatten(piece) for i, piece in zip(order, pieces, strict=True)}


def _flatten(sample: SampleTensors) -> Tensor:
    return torch.cat(
        [
            sample.tokens_L.to(torch.int32),
            sample.labels_L.to(torch.int32),
            sample.loss_mask_L.to(torch.float32).view(torch.int32),  # the bits, not the values
        ]
    )


def _unflatten(flat: Tensor) -> SampleTensors:
    tokens, labels, mask = flat.view(_FIELDS, -1)
    return SampleTensors(
        tokens_L=tokens.to(torch.int64), labels_L=labels.to(torch.int64), loss_mask_L=mask.view(torch.float32)
    )
