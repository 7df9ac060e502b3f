"""A GPT of two layers, and samples for it, for tests that look into a model rather than at a run."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_packing.thd import SampleTensors

VOCAB = 64


def toy_gpt(*, positions: str = "rope", core_attention: type[torch.nn.Module] | None = None, **settings: Any) -> Any:
    """The same weights each time.

    Args:
        positions: its position embedding.
        core_attention: in the place of Megatron's own; None: ours.
        settings: of the `TransformerConfig`, on top of the usual ones.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_packing.mcore.attention_spec import PackedDotProductAttention

    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    usual = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.3,  # far from 0, or every sample would get the same logits
        "gradient_accumulation_fusion": False,
    }
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = core_attention or PackedDotProductAttention
    return GPTModel(
        config=TransformerConfig(**{**usual, **settings}),
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=32,
        position_embedding_type=positions,
    )


def hooked(model: torch.nn.Module) -> torch.nn.Module:
    """The model as a packed run prepares it; `model.current.share` is the pack."""
    from megatron_packing.mcore.step import CurrentMicrobatch, prepare_chunk

    model.current = CurrentMicrobatch()
    prepare_chunk(model, model.current)
    return model


def random_samples(lengths: Sequence[int], seed: int = 1) -> list[SampleTensors]:
    """Tokens and labels drawn anew, all of them targets."""
    rng = torch.Generator().manual_seed(seed)
    return [
        SampleTensors(
            tokens_L=torch.randint(VOCAB, (n,), generator=rng),
            labels_L=torch.randint(VOCAB, (n,), generator=rng),
            loss_mask_L=torch.ones(n),
        )
        for n in lengths
    ]
