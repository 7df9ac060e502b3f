"""Packs filled up with a tail that no sample owns, and to shapes that say nothing of the samples.

Legend: T rows of the pack, R = T / CP rows of a rank.
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.errors import CapacityError, PackingError
from megatron_packing.mcore.params import padding_mask, to_packed_seq_params
from megatron_packing.thd import PackedBatch, build_pack, dummy_pack, fill_up, make_share, share_of_rank, sum_by_sample
from megatron_packing.thd.layout import rows_of_cp_rank
from tests.torch.test_attention import inputs
from tests.torch.test_sharded_attention import sharded
from tests.torch.test_thd_batch import int32
from tests.torch.test_thd_pack import as_lists, taken_apart
from tests.torch.toys import numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    lengths: list[int]
    alignment: int
    cp: int
    more: int
    """Units of the alignment in the tail."""
    spare: int
    """Segments that stay free."""

    @property
    def batch(self) -> PackedBatch:
        return build_pack(numbered(self.lengths), alignment=self.alignment)

    @property
    def rows(self) -> int:
        return self.batch.num_rows + self.more * self.alignment

    @property
    def filled(self) -> PackedBatch:
        return fill_up(self.batch, rows=self.rows, num_boundaries=len(self.lengths) + 2 + self.spare)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cp = draw(st.sampled_from([1, 2, 4]))
    return Case(
        lengths=draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)),
        alignment=draw(st.sampled_from([1, 3])) * (2 * cp if cp > 1 else 1),
        cp=cp,
        more=draw(st.integers(0, 5)),
        spare=draw(st.integers(0, 3)),
    )


def test_a_tail_of_its_own_behind_the_samples() -> None:
    filled = fill_up(build_pack(numbered([7, 2]), alignment=4), rows=16)
    assert filled.cu_seqlens.tolist() == [0, 7, 9, 9]
    assert filled.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    assert filled.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert filled.padding_mask_T().int().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1]
    assert (filled.num_samples, filled.max_seqlen, filled.is_fixed) == (2, 8, False)
    longer = fill_up(build_pack(numbered([4]), alignment=1), rows=16)
    assert (longer.cu_seqlens.tolist(), longer.cu_seqlens_padded.tolist()) == ([0, 4, 4], [0, 4, 16])
    assert longer.max_seqlen == 12, "the tail is the longest segment"


def test_a_fixed_shape_says_nothing_of_the_samples() -> None:
    for lengths in ([7, 2], [16], [1, 1, 1], [8, 8], [2, 2, 2, 2]):
        filled = fill_up(build_pack(numbered(lengths), alignment=2), rows=16, num_boundaries=6)
        assert filled.cu_seqlens.shape == filled.cu_seqlens_padded.shape == (6,)
        assert filled.cu_seqlens_padded[-1] == filled.num_rows == filled.max_seqlen == 16
        assert filled.num_samples == len(lengths)
    assert fill_up(dummy_pack(alignment=2), rows=16, num_boundaries=6).cu_seqlens_padded.tolist() == [0, 2] + [16] * 4


def test_what_is_full_and_free_stays_as_it_is() -> None:
    pack = build_pack(numbered([7, 2]), alignment=4)
    assert fill_up(pack, rows=12) is pack


@pytest.mark.parametrize("lengths", [[8, 4], [7, 2]])
def test_boundaries_are_one_object_where_every_row_is_a_sample_s(lengths: list[int]) -> None:
    filled = fill_up(build_pack(numbered(lengths), alignment=4), rows=12, num_boundaries=5)
    assert (filled.cu_seqlens is filled.cu_seqlens_padded) == (lengths == [8, 4])
    share = share_of_rank(filled, cp_size=1, cp_rank=0).to("cpu")
    params = to_packed_seq_params(share)
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded
    assert (padding_mask(share) is None) == (lengths == [8, 4])


@given(case=cases())
@settings(max_examples=80)
def test_samples_and_their_rows_stay_what_they_were(case: Case) -> None:
    plain, filled = case.batch, case.filled
    assert as_lists(taken_apart(filled))[: len(case.lengths)] == as_lists(taken_apart(plain))
    rows = plain.num_rows
    padding = torch.cat([plain.padding_mask_T(), torch.ones(filled.num_rows - rows, dtype=torch.bool)])
    assert torch.equal(filled.padding_mask_T(), padding)
    for name in ("tokens_T", "labels_T", "loss_mask_T", "position_ids_T"):
        assert torch.equal(getattr(filled, name)[:rows], getattr(plain, name))
        assert not getattr(filled, name)[rows:].any()
    again = PackedBatch(**{f.name: getattr(filled, f.name) for f in fields(filled)})
    assert again.num_samples == len(case.lengths)


@given(case=cases())
@settings(max_examples=60)
def test_ranks_share_a_filled_pack_and_rebuild_it(case: Case) -> None:
    filled = case.filled
    seen, sums = [], torch.zeros(len(case.lengths))
    for rank in range(case.cp):
        share = share_of_rank(filled, cp_size=case.cp, cp_rank=rank)
        seen += rows_of_cp_rank(filled.cu_seqlens_padded, case.cp, rank).tolist()
        assert share.position_ids_R.numel() == filled.num_rows // case.cp, "as many rows on each rank"
        bare = make_share(
            cu_seqlens=filled.cu_seqlens,
            cu_seqlens_padded=filled.cu_seqlens_padded,
            max_seqlen=share.max_seqlen,
            is_dummy=False,
            cp_size=case.cp,
            cp_rank=rank,
        )
        assert (bare.max_seqlen, bare.num_samples) == (filled.num_rows, len(case.lengths))
        assert torch.equal(bare.pack_position_ids_T, filled.position_ids_T)
        assert share.loss_mask_R is not None
        sums += sum_by_sample(share.loss_mask_R, share)
        assert to_packed_seq_params(share).max_seqlen_q == filled.num_rows
    assert sorted(seen) == list(range(filled.num_rows))
    assert sums.tolist() == [sample.loss_mask_L.sum().item() for sample in numbered(case.lengths)]


def test_tail_and_sentinels_change_no_bit_of_a_sample() -> None:
    """What lies in the tail is anything but zero here: no sample looks at it, on one rank or on two."""
    given, other = inputs(24, kv_heads=2), inputs(24, kv_heads=2, seed=1)
    for kept, changed in zip(given.all(), other.all(), strict=True):
        changed[:16] = kept[:16]
    plain = replace(given, **{name: getattr(given, name)[:16] for name in ("q", "k", "v", "weight")})
    for cp in (1, 2):
        alone, _ = sharded(plain, [4, 12], cp)
        for filled in (given, other):
            found, _ = sharded(filled, [4, 12, 8, 0, 0], cp)
            for mine, theirs in zip(found, alone, strict=True):
                assert torch.equal(mine[:16], theirs)
                assert mine[16:].isfinite().all()
        leaking, _ = sharded(other, [4, 20], cp)
        assert not torch.equal(leaking[2][:16], alone[2]), "the comparison sees a tail that a sample owns"


@pytest.mark.parametrize(
    ("rows", "entries"),
    [(8, None), (11, 9), (12, 2), (16, 3)],
    ids=["fewer-rows", "fewer-rows-fixed", "more-samples", "no-room-for-the-tail"],
)
def test_what_does_not_fit_is_an_error(rows: int, entries: int | None) -> None:
    with pytest.raises(CapacityError, match=r"cannot be filled up to .* Raise --max-seqlen"):
        fill_up(build_pack(numbered([7, 2]), alignment=4), rows=rows, num_boundaries=entries)


FIXED = fill_up(build_pack(numbered([7, 2]), alignment=4), rows=16, num_boundaries=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"is_fixed": False}, "must increase strictly", id="sentinels-of-a-free-shape"),
        pytest.param({"max_seqlen": 8}, "must be the Python int 16", id="longest-of-a-fixed-shape"),
        pytest.param({"cu_seqlens": int32(0, 7, 7, 7, 7, 7)}, "1 samples for 3 segments", id="two-tails"),
        pytest.param({"cu_seqlens": int32(0, 7, 7, 9, 9, 9)}, "must increase strictly", id="a-sample-without-tokens"),
        pytest.param({"cu_seqlens_padded": int32(0, 8, 8, 16, 16, 16)}, "must increase strictly", id="hole"),
        pytest.param({"cu_seqlens_padded": int32(0, 8, 16, 12, 16, 16)}, "must increase strictly", id="goes-back"),
        pytest.param(
            {"cu_seqlens_padded": int32(0, 8, 12, 12, 12, 12)}, "ends at 12; the pack has 16", id="ends-early"
        ),
    ],
)
def test_rejects_what_attention_would_misread(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        replace(FIXED, **changes)
