"""Tensors of a pack: how samples lie one after the other, and who owns which row."""

from megatron_packing.thd.batch import PackedBatch
from megatron_packing.thd.pack import SampleTensors, build_pack, dummy_pack, fill_up
from megatron_packing.thd.share import PackShare, make_share, share_of_rank, sum_by_sample

__all__ = [
    "PackShare",
    "PackedBatch",
    "SampleTensors",
    "build_pack",
    "dummy_pack",
    "fill_up",
    "make_share",
    "share_of_rank",
    "sum_by_sample",
]
