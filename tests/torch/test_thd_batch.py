from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packing.errors import PackingError
from megatron_packing.thd import PackedBatch, build_pack
from tests.torch.toys import numbered

PLAIN = build_pack(numbered([4, 2]), alignment=1)
PADDED = build_pack(numbered([7, 2]), alignment=4)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_boundaries(boundaries: torch.Tensor, **more: Any) -> PackedBatch:
    """PLAIN (6 rows), but with these boundaries for both real and padded."""
    return replace(PLAIN, cu_seqlens=boundaries, cu_seqlens_padded=boundaries, **more)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        pytest.param(int32(1, 4, 6), "starts at 1; it must start at 0", id="starts-late"),
        pytest.param(int32(-1, 4, 6), "starts at -1; it must start at 0", id="starts-below-zero"),
        pytest.param(int32(0, 4, 4, 6), r"must increase strictly; it is \[0, 4, 4, 6\]", id="empty-sample"),
        pytest.param(int32(0, 4, 6, 6), "must increase strictly", id="filled-up-with-sentinels"),
        pytest.param(int32(0, 5, 4, 6), "must increase strictly", id="goes-back"),
        pytest.param(int32(0, 4, 5), "ends at 5; the pack has 6 rows", id="ends-early"),
        pytest.param(int32(0, 4, 7), "ends at 7; the pack has 6 rows", id="ends-late"),
        pytest.param(torch.tensor([0, 4, 6]), "is torch.int64 .* must be int32", id="int64"),
        pytest.param(torch.tensor([0.0, 4.0, 6.0]), "is torch.float32 .* must be int32", id="float"),
        pytest.param(int32(0, 4, 6)[None], r"of shape \(1, 3\); .* one-dimensional", id="batch-dimension"),
        pytest.param(int32(0), r"of shape \(1,\); .* at least two entries", id="no-sample"),
        pytest.param(int32(), r"of shape \(0,\); .* at least two entries", id="empty"),
    ],
)
def test_rejects_boundaries_that_attention_would_misread(boundaries: torch.Tensor, message: str) -> None:
    with pytest.raises(PackingError, match=f"cu_seqlens_padded.*{message}"):
        with_boundaries(boundaries)


@pytest.mark.parametrize(
    "max_seqlen",
    [
        pytest.param(3, id="too-small"),
        pytest.param(6, id="the-whole-pack"),
        pytest.param(torch.tensor(4, dtype=torch.int32), id="tensor"),
        pytest.param(np.int64(4), id="numpy"),
        pytest.param(4.0, id="float"),
    ],
)
def test_rejects_a_max_seqlen_that_is_not_the_longest_sample_as_an_int(max_seqlen: Any) -> None:
    with pytest.raises(PackingError, match=r"max_seqlen .* must be the Python int 4"):
        replace(PLAIN, max_seqlen=max_seqlen)


def test_true_is_no_max_seqlen() -> None:
    one_row = build_pack(numbered([1]), alignment=1)
    assert one_row.max_seqlen == 1
    with pytest.raises(PackingError, match="max_seqlen is True"):
        replace(one_row, max_seqlen=True)


@pytest.mark.parametrize(
    ("real", "message"),
    [
        pytest.param(int32(1, 7, 9), "cu_seqlens starts at 1", id="starts-late"),
        pytest.param(int32(0, 0, 9), "cu_seqlens must increase strictly", id="empty-sample"),
        pytest.param(torch.tensor([0, 7, 9]), "cu_seqlens is torch.int64", id="int64"),
        pytest.param(int32(0, 9), "cu_seqlens has 1 samples, cu_seqlens_padded 2", id="fewer-samples"),
        pytest.param(int32(0, 4, 9), "a sample is longer than its padded length", id="longer-than-padded"),
        pytest.param(int32(0, 8, 12), "equals .* two tensors. Hand in one", id="equal-copy"),
    ],
)
def test_rejects_wrong_real_boundaries(real: torch.Tensor, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        replace(PADDED, cu_seqlens=real)


@pytest.mark.parametrize("field", ["labels_T", "loss_mask_T", "position_ids_T"])
def test_rejects_fields_of_another_length_than_the_tokens(field: str) -> None:
    with pytest.raises(PackingError, match=rf"{field} has shape \(5,\), tokens_T \(6,\)"):
        replace(PLAIN, **{field: getattr(PLAIN, field)[:5]})


def test_accepts_a_pack_put_together_by_hand() -> None:
    """What the rejections above start from is fine as it is."""
    for pack in (PLAIN, PADDED):
        again = PackedBatch(**{f.name: getattr(pack, f.name) for f in fields(pack)})
        assert again.num_samples == 2
        assert again.num_rows == pack.tokens_T.numel()
    assert with_boundaries(int32(0, 1, 2, 6)).num_samples == 3
    assert with_boundaries(int32(0, 6), max_seqlen=6).num_samples == 1


def test_boundaries_stay_one_tensor_on_the_way_to_a_device() -> None:
    for moved in (PLAIN.to("cpu"), PLAIN.to(torch.device("cpu"))):
        assert moved.cu_seqlens is moved.cu_seqlens_padded
        assert not moved.is_padded


def test_boundaries_stay_one_tensor_where_moving_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self.clone())
    moved = PLAIN.to("elsewhere")
    assert moved.tokens_T is not PLAIN.tokens_T
    assert moved.cu_seqlens is moved.cu_seqlens_padded
    padded = PADDED.to("elsewhere")
    assert padded.cu_seqlens is not padded.cu_seqlens_padded
    assert padded.cu_seqlens.tolist() == [0, 7, 9]
    assert padded.max_seqlen == 8
