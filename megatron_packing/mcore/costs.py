"""What does a sample cost the model of this run, and would a planner that looks at costs help?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_packing.schedule import BalanceAdvice, CostModel, LatentAttention, Plan, TransformerShape


def cost_of_model(config: Any, vocabulary: int) -> CostModel:
    """FLOPs of a sample, forward and backward, see `CostModel.from_transformer`.

    Args:
        config: the model's `TransformerConfig` (or `MLATransformerConfig`), as Megatron completed it.
        vocabulary: entries of the output layer, padding included.
    """
    expert_layers = _expert_layers(config)
    latent = None
    if config.multi_latent_attention:
        latent = LatentAttention(
            query_rank=config.q_lora_rank,
            key_value_rank=config.kv_lora_rank,
            key_dim=config.qk_head_dim,
            rotary_dim=config.qk_pos_emb_head_dim,
            value_dim=config.v_head_dim,
        )
    shape = TransformerShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_dim=config.kv_channels,
        groups=config.num_query_groups,
        ffn=config.ffn_hidden_size,
        gated=bool(config.gated_linear_unit),
        vocabulary=vocabulary,
        expert_layers=expert_layers,
        experts=config.num_moe_experts if expert_layers else 0,
        experts_a_token=config.moe_router_topk if expert_layers else 0,
        expert_ffn=config.moe_ffn_hidden_size if expert_layers else 0,
        shared_ffn=(config.moe_shared_expert_intermediate_size or 0) if expert_layers else 0,
        latent=latent,
    )
    return CostModel.from_transformer(shape)


FLOPS_A_BYTE = 1000
"""FLOPs that a rank does while one byte comes from another: 400 TFLOP/s and 400 GB/s, about what a current GPU reaches
within a node. An estimate and no measurement; between nodes it is several times as many."""


def with_communication(cost: CostModel, config: Any) -> CostModel:
    """`cost`, with what sharing a pack costs each of its ranks, for a planner that chooses how many share one.

    In every layer a rank gathers the keys and values of the whole pack, and gives as many gradients back. Tensor and
    pipeline parallelism leave each rank a part of the FLOPs and the same part of the bytes, so that neither is in here.

    Args:
        cost: FLOPs of a sample.
        config: the model's `TransformerConfig`, as Megatron completed it.
    """
    numbers = 2 * 2 * config.num_layers * config.num_query_groups * config.kv_channels
    return replace(cost, communication=float(FLOPS_A_BYTE * numbers * config.params_dtype.itemsize))


def _expert_layers(config: Any) -> int:
    """Layers with experts: every n-th from the first on, or those with a 1 in a list."""
    if config.num_moe_experts is None:
        return 0
    frequency = config.moe_layer_freq
    return sum(frequency) if isinstance(frequency, list) else len(range(0, config.num_layers, frequency))


def advise(advice: BalanceAdvice, plan: Plan, lengths: Sequence[int]) -> None:
    """Print, once in a run and on its first rank, what `balanced` would gain over the scheduler that was chosen."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    said = advice.look_at(plan, lengths)
    if said is not None:
        print(f"megatron_packing: {said}", flush=True)
