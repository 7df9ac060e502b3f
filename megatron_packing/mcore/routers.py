"""How do rows that belong to no sample stay out of what a router of experts counts? By a padding mask on every chunk.

Megatron's router takes a mask and leaves its rows out of the auxiliary losses, the z-loss, and the tokens per expert
that move the experts' bias. What Megatron-Core 0.19 lacks for packs is mended here:

- The mask is cut for sequence parallelism by the first stage alone; later ones get theirs from us.
- The experts' bias is counted with the mask along the wrong dimension, which fails.
- A pack of nothing but padding divides 0 by 0.
- An auxiliary loss is weighted by the pack's rows. With a mask they are taken times the ranks that share the pack,
  because the rank's own count is summed up in place with the others'.
- Ranks count rows of their own where they have no mask, and take them for everyone's. Here all have one.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_packing.mcore.params import padding_mask
from megatron_packing.thd import PackShare


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMask:
    """What a chunk is given as its padding mask."""

    has_routers: bool
    """Then it has a mask even where nothing is padded."""
    is_cut: bool
    """Whether the chunk wants only the rows of its tensor-parallel rank."""

    def of(self, share: PackShare) -> Tensor | None:
        """bool [1, rows]: True where a row belongs to no sample; None where no part of the chunk asks."""
        mask = padding_mask(share)
        if mask is None and self.has_routers:
            mask = torch.zeros_like(share.position_ids_R, dtype=torch.bool)[None]
        if mask is None or not self.is_cut:
            return mask
        from megatron.core import parallel_state

        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return mask.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]


def prepare_routers(chunk: nn.Module) -> RouterMask:
    """Make a model chunk's routers count real rows only. Call once for each chunk, before it runs."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    has_routers = any(isinstance(module, TopKRouter) for module in chunk.modules())
    if not has_routers:
        return RouterMask(has_routers=False, is_cut=False)
    _mend_routers()
    is_cut = get_model_config(chunk).sequence_parallel and not get_attr_wrapped_model(chunk, "pre_process")
    return RouterMask(has_routers=True, is_cut=is_cut)


def average_over_packs(*, samples_per_rank: int, packs_per_rank: float) -> None:
    """Let Megatron log its routers' losses as means over the step's packs. Call after each training step.

    It has summed them up over this rank's packs, and will divide by the samples of a rank, then by the ranks.

    Args:
        samples_per_rank: what it takes for the number of microbatches.
        packs_per_rank: that ran, in the mean over the ranks.
    """
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    for entry in get_moe_metrics_tracker().metrics.values():
        entry.values.mul_(samples_per_rank / packs_per_rank)


def forget_losses() -> None:
    """Leave what a step that Megatron runs again has summed up out of the log. Call before each training step."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().clear()


@functools.cache  # once a process
def _mend_routers() -> None:
    from megatron.core.transformer.moe import router

    add_to_bias = router.TopKRouter._apply_expert_bias
    balancing_loss = router.switch_load_balancing_loss_func
    count = router.get_tokens_per_expert_and_token_count

    @functools.wraps(add_to_bias)
    def add_real_rows(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """The map is [rows, experts], the mask [rows]."""
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        add_to_bias(self, routing_map)

    @functools.wraps(balancing_loss)
    def finite_loss(*args: Any, total_num_tokens: int | Tensor, **keywords: Any) -> Tensor:
        if isinstance(total_num_tokens, Tensor):  # a float, where Transformer Engine's fused loss wants an integer
            total_num_tokens = total_num_tokens.round().long().clamp(min=1)
        return balancing_loss(*args, total_num_tokens=total_num_tokens, **keywords)

    @functools.wraps(count)
    def count_evenly(
        routing_map: Tensor, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
    ) -> tuple[Tensor, Any, Any]:
        """The rank's part of the pack's rows for its own, wherever padding lies: it is multiplied by the ranks."""
        per_expert, own, total = count(routing_map, reduce_group, topk, with_padding_mask)
        return per_expert, total / reduce_group.size() if with_padding_mask else own, total

    router.TopKRouter._apply_expert_bias = add_real_rows
    router.switch_load_balancing_loss_func = finite_loss
    router.get_tokens_per_expert_and_token_count = count_evenly
