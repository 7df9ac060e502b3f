"""A rank's share of a pack: the rows it runs, and everything that follows from the boundaries alone."""

import itertools
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_packing.thd import PackedBatch, PackShare, build_pack, dummy_pack, share_of_rank
from megatron_packing.thd.layout import rows_of_cp_rank
from megatron_packing.thd.share import make_share
from tests.torch.toys import numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    lengths: list[int]
    alignment: int
    cp: int

    @property
    def batch(self) -> PackedBatch:
        return build_pack(numbered(self.lengths), alignment=self.alignment)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Packs under CP 1 to 4, padded or not, as the alignment of a topology or of a number format makes them."""
    cp = draw(st.integers(1, 4))
    alignment = (2 * cp if cp > 1 else 1) * draw(st.sampled_from([1, 2, 3]))
    one = st.one_of(st.integers(1, 4 * alignment), st.integers(1, 4).map(lambda n: n * alignment))
    return Case(lengths=draw(st.lists(one, min_size=1, max_size=5)), alignment=alignment, cp=cp)


def shares(batch: PackedBatch, cp: int) -> list[PackShare]:
    return [share_of_rank(batch, cp_size=cp, cp_rank=rank) for rank in range(cp)]


def assert_same(one: PackShare, other: PackShare) -> None:
    """Every field equal, types of tensors and the sharing of the boundaries included."""
    for field in fields(PackShare):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert torch.equal(mine, theirs), field.name
        else:
            assert (type(mine), mine) == (type(theirs), theirs), field.name
    assert (one.cu_seqlens is one.cu_seqlens_padded) == (other.cu_seqlens is other.cu_seqlens_padded)


def test_two_padded_samples_under_cp_2() -> None:
    batch = build_pack(numbered([7, 2]), alignment=4)
    rows = ([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])
    for share, mine in zip(shares(batch, 2), rows, strict=True):
        assert share.cu_seqlens.tolist() == [0, 7, 9]
        assert share.cu_seqlens_padded.tolist() == [0, 8, 12]
        assert share.max_seqlen == 8
        assert share.pack_position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 0, 0]
        for cut, whole in ((share.tokens_R, batch.tokens_T), (share.labels_R, batch.labels_T)):
            assert cut is not None
            assert cut.tolist() == whole[mine].tolist()
    one, other = shares(batch, 2)
    assert one.tokens_R is not None
    assert one.tokens_R.tolist() == [1, 2, 7, 0, 8, 0]
    assert one.position_ids_R.tolist() == [0, 1, 6, 0, 0, 0]
    assert other.position_ids_R.tolist() == [2, 3, 4, 5, 1, 0]
    assert one.padding_mask_R is not None
    assert one.padding_mask_R.tolist() == [False, False, False, True, False, True]
    assert other.padding_mask_R is not None
    assert other.padding_mask_R.tolist() == [False, False, False, False, False, True]


def test_one_token_under_cp_8_leaves_two_rows_a_rank() -> None:
    batch = build_pack(numbered([1]), alignment=16)
    for rank, share in enumerate(shares(batch, 8)):
        assert share.cu_seqlens.tolist() == [0, 1]
        assert share.cu_seqlens_padded.tolist() == [0, 16]
        assert share.tokens_R is not None
        assert share.tokens_R.tolist() == [int(rank == 0), 0]
        assert share.padding_mask_R is not None
        assert share.padding_mask_R.tolist() == [rank != 0, True]


@given(case=cases())
@settings(max_examples=100)
def test_the_ranks_rows_are_the_pack_each_once(case: Case) -> None:
    batch = case.batch
    cut = shares(batch, case.cp)
    order = torch.cat([rows_of_cp_rank(batch.cu_seqlens_padded, case.cp, rank) for rank in range(case.cp)])
    assert sorted(order.tolist()) == list(range(batch.num_rows))
    for of_rank, of_pack in (
        ("tokens_R", batch.tokens_T),
        ("labels_R", batch.labels_T),
        ("loss_mask_R", batch.loss_mask_T),
        ("position_ids_R", batch.position_ids_T),
    ):
        pieces = [getattr(share, of_rank) for share in cut]
        assert {piece.numel() for piece in pieces} == {batch.num_rows // case.cp}
        together = torch.empty_like(of_pack)
        together[order] = torch.cat(pieces)
        assert torch.equal(together, of_pack), of_rank
    # Each real token is some rank's, whatever the order of the rows; numbered samples have no token twice.
    tokens = itertools.chain.from_iterable(share.tokens_R.tolist() for share in cut if share.tokens_R is not None)
    assert sorted(token for token in tokens if token) == list(range(1, sum(case.lengths) + 1))


@given(case=cases())
@settings(max_examples=100)
def test_what_follows_from_the_boundaries(case: Case) -> None:
    batch = case.batch
    padding_T = batch.padding_mask_T()
    for rank, share in enumerate(shares(batch, case.cp)):
        rows = rows_of_cp_rank(batch.cu_seqlens_padded, case.cp, rank)
        assert torch.equal(share.pack_position_ids_T, batch.position_ids_T)
        assert type(share.max_seqlen) is int
        assert share.max_seqlen == batch.max_seqlen
        assert share.cu_seqlens is batch.cu_seqlens
        assert share.cu_seqlens_padded is batch.cu_seqlens_padded
        if batch.is_padded:
            assert share.padding_mask_R is not None
            assert torch.equal(share.padding_mask_R, padding_T[rows])
        else:
            assert share.padding_mask_R is None
            assert not padding_T.any()


@given(case=cases())
@settings(max_examples=100)
def test_a_share_rebuilt_from_boundaries_equals_the_one_cut_from_the_pack(case: Case) -> None:
    batch = case.batch
    for rank, cut in enumerate(shares(batch, case.cp)):
        place = {"cp_size": case.cp, "cp_rank": rank}
        names = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        boundaries = {name: getattr(batch, name) for name in names}
        bare = make_share(**boundaries, **place, is_dummy=False)
        assert_same(bare, replace(cut, tokens_R=None, labels_R=None, loss_mask_R=None))
        own = {name: getattr(cut, name) for name in ("tokens_R", "labels_R", "loss_mask_R")}
        assert_same(make_share(**boundaries, **place, is_dummy=False, **own), cut)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # on the meta device every tensor is a new one
@pytest.mark.parametrize("lengths", [[7, 2], [8, 4]])
def test_boundaries_stay_one_object_where_nothing_is_padded(lengths: list[int], device: str) -> None:
    share = share_of_rank(build_pack(numbered(lengths), alignment=4), cp_size=2, cp_rank=1)
    moved = share.to(device)
    for one in (share, moved):
        assert (one.cu_seqlens is one.cu_seqlens_padded) == (lengths == [8, 4])
    for field in fields(PackShare):
        before, after = getattr(share, field.name), getattr(moved, field.name)
        if isinstance(before, Tensor):
            assert after.device.type == device
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
        else:
            assert (type(after), after) == (type(before), before)
    if device == "cpu":
        assert_same(moved, share)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_dummy_is_shared_out_as_one(cp: int) -> None:
    batch = dummy_pack(alignment=2 * cp)
    for share in shares(batch, cp):
        assert share.is_dummy
        assert share.to("cpu").is_dummy
        assert share.loss_mask_R is not None
        assert not share.loss_mask_R.any()
        assert share.cu_seqlens is share.cu_seqlens_padded
        assert share.padding_mask_R is not None
        assert share.padding_mask_R.all()  # no row belongs to a sample
