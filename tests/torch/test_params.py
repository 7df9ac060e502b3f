import pytest
import torch

from megatron_packing import to_packed_seq_params
from megatron_packing.comm.groups import ContextGroups
from megatron_packing.mcore.params import padding_mask
from megatron_packing.thd import PackedBatch, build_pack, dummy_pack, share_of_rank
from tests.torch.toys import numbered

BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")

PACKS = [
    pytest.param(build_pack(numbered([8, 4]), alignment=4), id="aligned-already"),
    pytest.param(build_pack(numbered([7, 2]), alignment=4), id="padded"),
    pytest.param(build_pack(numbered([5]), alignment=1), id="one-sample"),
    pytest.param(dummy_pack(alignment=4), id="dummy"),
]


@pytest.mark.parametrize("pack", PACKS)
def test_what_holds_for_every_pack(pack: PackedBatch) -> None:
    params = to_packed_seq_params(pack)
    assert params.qkv_format == "thd"
    assert params.pad_between_seqs is False  # None would be a guess of Transformer Engine's, and silently wrong
    for name in BOUNDARIES:
        boundaries = getattr(params, name)
        assert boundaries is pack.cu_seqlens_padded, name  # by identity: equal copies lose the fastest kernels
        assert boundaries.dtype == torch.int32
        assert boundaries.dim() == 1
        assert int(boundaries[-1]) == pack.num_rows
    assert type(params.max_seqlen_q) is int
    assert type(params.max_seqlen_kv) is int
    assert params.max_seqlen_q == params.max_seqlen_kv == int(pack.cu_seqlens_padded.diff().max())


def test_without_padding_real_and_padded_are_one_tensor() -> None:
    pack = build_pack(numbered([8, 4]), alignment=4)
    params = to_packed_seq_params(pack)
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded is pack.cu_seqlens
    assert params.cu_seqlens_q.tolist() == [0, 8, 12]
    assert padding_mask(pack) is None


def test_without_padding_they_are_one_tensor_after_a_move_too() -> None:
    pack = build_pack(numbered([8, 4]), alignment=4).to("cpu")
    params = to_packed_seq_params(pack)
    assert all(getattr(params, name) is pack.cu_seqlens for name in BOUNDARIES)


class Groups(ContextGroups):
    """Groups that are told apart by name."""

    def __init__(self) -> None:
        self._groups = {2: "pair", 4: "all"}  # type: ignore[dict-item]


@pytest.mark.parametrize(("cp_size", "group"), [(1, None), (2, "pair"), (4, "all")])
def test_a_share_names_the_group_that_shares_its_pack(cp_size: int, group: str | None) -> None:
    """None for a rank alone: that is how Transformer Engine is told to leave context parallelism out."""
    pack = build_pack(numbered([7, 2]), alignment=8)
    params = to_packed_seq_params(share_of_rank(pack, cp_size=cp_size, cp_rank=cp_size - 1), Groups())
    assert (params.local_cp_size, params.cp_group) == (cp_size, group)
    assert params.cu_seqlens_q.tolist() == [0, 8, 16], "the whole pack's, whatever the group"
    static = to_packed_seq_params(share_of_rank(pack, cp_size=cp_size, cp_rank=0))
    assert (static.local_cp_size, static.cp_group) == (None, None)


def test_with_padding_the_padded_boundaries_stand_for_both() -> None:
    pack = build_pack(numbered([7, 2]), alignment=4)
    params = to_packed_seq_params(pack)
    assert params.cu_seqlens_q is pack.cu_seqlens_padded
    assert params.cu_seqlens_q.tolist() == [0, 8, 12]
    assert params.max_seqlen_q == 8
    mask = padding_mask(pack)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[False] * 7 + [True] + [False] * 2 + [True] * 2]


def test_no_row_of_a_dummy_belongs_to_a_sample() -> None:
    mask = padding_mask(dummy_pack(alignment=4))
    assert mask is not None
    assert mask.tolist() == [[True] * 4]
