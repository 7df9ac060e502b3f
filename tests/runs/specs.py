"""Layer specs that a test names with --spec."""

from typing import Any

from megatron.training.models.gpt import default_layer_spec

from megatron_packing.mcore.attention_spec import local_layer_spec


def stock(model_config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's own layers, whose attention knows no boundaries."""
    return default_layer_spec(model_config, vp_stage)


def honouring(model_config: Any, vp_stage: int | None = None) -> Any:
    """A user's spec that took our attention in."""
    return local_layer_spec(model_config, vp_stage)
