"""Is the work of a sample read off Megatron's own configuration, as Megatron itself counts it?"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.training import num_floating_point_operations

from megatron_packing.mcore.costs import FLOPS_A_BYTE, cost_of_model, with_communication

VOCABULARY = 512
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 96}
SWIGLU: dict[str, Any] = {"gated_linear_unit": True, "add_bias_linear": False}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "alltoall",
}


def megatrons_count(config: TransformerConfig, tokens: int) -> float:
    """Megatron's own FLOPs of one sample."""
    names = dict.fromkeys(
        (
            "hybrid_layer_pattern",
            "mtp_num_layers",
            "experimental_attention_variant",
            "linear_attention_freq",
            "is_hybrid_model",
            "moe_latent_size",
            "attention_output_gate",
            "window_size",
        )
    )
    arguments = SimpleNamespace(
        **{
            **names,
            **vars(config),
            "group_query_attention": not config.multi_latent_attention,
            "swiglu": config.gated_linear_unit,
            "num_experts": config.num_moe_experts,
            "padded_vocab_size": VOCABULARY,
            "seq_length": tokens,
        }
    )
    return num_floating_point_operations(arguments, 1)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (TransformerConfig(**SIZES), 0),
        (TransformerConfig(**SIZES, **SWIGLU, num_query_groups=2), 0),
        (TransformerConfig(**SIZES, kv_channels=32), 0),
        (TransformerConfig(**SIZES, **SWIGLU, **EXPERTS, moe_shared_expert_intermediate_size=80), 4 * 64 * 8),
        (TransformerConfig(**SIZES, **SWIGLU, **EXPERTS, moe_layer_freq=[0, 1, 1, 0]), 2 * 64 * 8),
        (TransformerConfig(**SIZES, **EXPERTS, moe_layer_freq=3), 2 * 64 * 8),
        (MLATransformerConfig(**SIZES, q_lora_rank=40, kv_lora_rank=24, v_head_dim=16), -4 * (40 + 24)),
        (MLATransformerConfig(**SIZES, q_lora_rank=None, kv_lora_rank=24), -4 * 24),
    ],
    ids=["dense", "gqa-swiglu", "wide-heads", "shared-experts", "mixed", "every-third", "mla", "mla-plain-queries"],
)
def test_flops_are_megatrons_own(config: TransformerConfig, more: int) -> None:
    """`more` weights a token than Megatron counts: it leaves out routers, and counts norms of compressed features."""
    cost = cost_of_model(config, VOCABULARY)
    for tokens in (100, 1000):
        # Megatron takes half of s * s pairs for a causal mask; ours are the s * (s + 1) / 2 that there are.
        diagonal = cost.quadratic * tokens
        expected = megatrons_count(config, tokens) + 6 * more * tokens + diagonal
        assert float(cost.of([tokens])[0]) == pytest.approx(expected, rel=1e-9)


def test_sharing_a_pack_costs_what_its_keys_and_values_weigh() -> None:
    """4 layers, 2 groups of 8 features, keys and values, there and back, 2 bytes each."""
    config = TransformerConfig(**SIZES, num_query_groups=2, params_dtype=torch.bfloat16)
    alone = cost_of_model(config, VOCABULARY)
    shared = with_communication(alone, config)
    assert shared.communication == FLOPS_A_BYTE * 4 * 2 * 8 * 2 * 2 * 2
    assert (shared.linear, shared.quadratic) == (alone.linear, alone.quadratic)
