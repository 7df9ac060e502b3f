"""Tensors of a pack: how samples lie one after the other, and who owns which row."""

from megatron_packing.thd.batch import PackedBatch
from megatron_packing.thd.pack import SampleTensors, build_pack, dummy_pack

__all__ = ["PackedBatch", "SampleTensors", "build_pack", "dummy_pack"]
