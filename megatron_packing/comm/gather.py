"""How does attention see the rows of other context-parallel ranks? By gathering them, differentiably.

Forward all-gathers, backward reduce-scatters: each rank's rows get the sum of the gradients that all ranks
computed for them. Cost: one collective each way, of the keys and values of the whole pack.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_rows_of_cp(rows_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[CP * R, ...], rank by rank, from each rank's [R, ...]. Every rank must hold as many rows."""
    return _AllGather.apply(rows_R, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_R: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = rows_R.new_empty(group.size() * rows_R.shape[0], *rows_R.shape[1:])
        dist.all_gather_into_tensor(out, rows_R.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
