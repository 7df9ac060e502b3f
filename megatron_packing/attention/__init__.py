"""Attention within each sample's boundaries, for machines without Transformer Engine."""

from megatron_packing.attention.core import packed_attention
from megatron_packing.attention.reference import reference_attention

__all__ = ["packed_attention", "reference_attention"]
