"""What the loader hands over, as `VarlenDataset`, our `SFTDataset` and upstream's make it, and what comes out."""

from typing import Any

import pytest
import torch

from megatron_packing.errors import PackingError
from megatron_packing.mcore.iterator import samples_of_row

Samples = list[tuple[list[int], list[int], list[float]]]


def taken_out(item: dict[str, Any]) -> Samples:
    samples = samples_of_row(item)
    assert all(sample.loss_mask_L.dtype == torch.float32 for sample in samples)
    return [(s.tokens_L.tolist(), s.labels_L.tolist(), s.loss_mask_L.tolist()) for s in samples]


def collated(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch's default collate makes of a batch of this one item."""
    return {name: value[None] for name, value in item.items()}


def varlen_item() -> dict[str, torch.Tensor]:
    """5 real tokens padded to 8 with the id 7, which is also the end of a sample."""
    return {
        "tokens": torch.tensor([11, 12, 21, 22, 7, 7, 7, 7]),
        "labels": torch.tensor([12, 21, 22, 7, 9, 7, 7, 7]),
        "loss_mask": torch.tensor([0.0, 1, 1, 1, 1, 0, 0, 0]),
        "position_ids": torch.arange(8),
        "original_seq_len": torch.tensor([5], dtype=torch.int32),
        "padded_seq_len": torch.tensor([8], dtype=torch.int32),
    }


VARLEN: Samples = [([11, 12, 21, 22, 7], [12, 21, 22, 7, 9], [0, 1, 1, 1, 1])]


def sft_item(boundaries: list[int], loss_mask: list[float]) -> dict[str, torch.Tensor]:
    """A buffer of 10 tokens; the boundaries are filled up with its length, as upstream does."""
    cu_seqlens = torch.full((11,), 10, dtype=torch.int32)
    cu_seqlens[: len(boundaries)] = torch.tensor(boundaries, dtype=torch.int32)
    return {
        "tokens": torch.arange(10, 20),
        "labels": torch.arange(11, 21),
        "loss_mask": torch.tensor(loss_mask),
        "position_ids": torch.arange(10),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": torch.tensor(4, dtype=torch.int32),
    }


# Two conversations of 4 and 3 tokens, 3 rows of tail.
MASK = [0.0, 0, 1, 1, 0, 1, 1, 0, 0, 0]
SFT: Samples = [
    ([10, 11, 12, 13], [11, 12, 13, 14], [0, 0, 1, 1]),
    ([14, 15, 16], [15, 16, 17], [0, 1, 1]),
]


@pytest.mark.parametrize("shape", [dict, collated], ids=["plain", "collated"])
def test_a_varlen_item_is_one_sample_without_its_padding(shape: Any) -> None:
    assert taken_out(shape(varlen_item())) == VARLEN


@pytest.mark.parametrize("shape", [dict, collated], ids=["plain", "collated"])
@pytest.mark.parametrize(
    "boundaries",
    [
        pytest.param([0, 4, 7], id="tail-is-a-segment"),  # ours: [0, 4, 7, 10, 10, ...]
        pytest.param([0, 4], id="tail-is-in-the-last-conversation"),  # upstream's: [0, 4, 10, 10, ...]
    ],
)
def test_an_sft_item_is_its_conversations_without_the_tail(boundaries: list[int], shape: Any) -> None:
    assert taken_out(shape(sft_item(boundaries, MASK))) == SFT


def test_a_full_buffer_loses_no_target() -> None:
    full = taken_out(sft_item([0, 4], [0.0, 0, 1, 1, 0, 1, 1, 0, 0, 1]))
    assert full == [SFT[0], ([14, 15, 16, 17, 18, 19], [15, 16, 17, 18, 19, 20], [0, 1, 1, 0, 0, 1])]


def test_one_conversation_in_an_sft_item() -> None:
    assert taken_out(sft_item([0], [0.0, 1, 1, 0, 0, 0, 0, 0, 0, 0])) == [([10, 11, 12], [11, 12, 13], [0, 1, 1])]


def test_a_conversation_in_the_middle_keeps_its_rows_behind_the_last_target() -> None:
    """Only the tail is cut: what stands between two boundaries is a conversation's own, masked or not."""
    first, _ = taken_out(sft_item([0, 4, 7], [0.0, 1, 0, 0, 0, 1, 1, 0, 0, 0]))
    assert first == ([10, 11, 12, 13], [11, 12, 13, 14], [0, 1, 0, 0])


def test_an_sft_item_without_targets_has_no_samples_behind_its_last_boundary() -> None:
    assert taken_out(sft_item([0], [0.0] * 10)) == []


def test_an_integer_or_bool_loss_mask_becomes_float() -> None:
    item = varlen_item()
    for dtype in (torch.int64, torch.bool):
        assert taken_out({**item, "loss_mask": item["loss_mask"].to(dtype)}) == VARLEN


@pytest.mark.parametrize("field", ["tokens", "labels", "loss_mask"])
def test_a_missing_field_is_named(field: str) -> None:
    item = varlen_item()
    del item[field]
    with pytest.raises(PackingError, match=f"item lacks '{field}'; it has .*original_seq_len"):
        samples_of_row(item)


def test_an_item_that_does_not_say_how_long_it_is_names_what_would() -> None:
    item = varlen_item()
    del item["original_seq_len"]
    with pytest.raises(PackingError, match=r"has the fields .*needs original_seq_len .* or cu_seqlens .*Derive"):
        samples_of_row(item)


def test_two_rows_at_once_name_the_flag() -> None:
    two = {name: torch.stack([value, value]) for name, value in varlen_item().items()}
    with pytest.raises(PackingError, match=r"holds 2 rows of 'tokens'; .*--micro-batch-size 1"):
        samples_of_row(two)
