"""What does one rank run of a pack? Its rows under context parallelism, and the fields that its stage uses.

The boundaries are those of the whole pack on every rank: Megatron's RoPE and attention divide by CP
themselves. A pack of two samples, 8 and 4 rows, CP 2:

    rank 0   rows [0 1 6 7 | 8 11]     rank 1   rows [2 3 4 5 | 9 10]

Dimensions: T rows of the pack, R = T / CP rows of the rank, S samples.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_packing.thd.batch import PackedBatch, count_samples
from megatron_packing.thd.layout import rows_of_cp_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackShare:
    """One rank's share of one pack. Fields that the rank's pipeline stage does not use are None."""

    tokens_R: Tensor | None
    """int64 [R]: input ids, on the first stage."""
    labels_R: Tensor | None
    """int64 [R], on the last stage."""
    loss_mask_R: Tensor | None
    """float32 [R], on the last stage."""
    position_ids_R: Tensor
    """int64 [R]: position of each of the rank's rows within its own sample."""
    padding_mask_R: Tensor | None
    """bool [R]: True where a row belongs to no sample, as no row of a dummy does; None where every row does."""
    pack_position_ids_T: Tensor
    """int64 [T]: position of every row of the pack: RoPE's angles are cut to the rank by Megatron."""
    cu_seqlens: Tensor
    """int32 [S + 1]: real boundaries of the whole pack."""
    cu_seqlens_padded: Tensor
    """int32 [S + 1]: boundaries of the whole pack in rows; the same object where nothing is padded."""
    max_seqlen: int
    """Rows of the longest segment, over all ranks of the pack; T where the shape is fixed."""
    num_samples: int
    """Samples in the pack; a dummy holds none."""
    is_dummy: bool = False
    """Whether the pack only keeps the ranks' counts equal."""
    cp_size: int = 1
    """Ranks that share the pack."""
    cp_rank: int = 0
    """Which of them holds these rows."""

    def to(self, device: torch.device | str | int) -> "PackShare":
        """The same share on `device`; boundaries that were one object stay one object."""
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        if self.cu_seqlens is self.cu_seqlens_padded:
            moved["cu_seqlens"] = moved["cu_seqlens_padded"]
        return PackShare(**moved)


def share_of_rank(batch: PackedBatch, *, cp_size: int, cp_rank: int) -> PackShare:
    """The rows of `batch` that a context-parallel rank runs, with every field."""
    rows = rows_of_cp_rank(batch.cu_seqlens_padded, cp_size, cp_rank)
    return make_share(
        cu_seqlens=batch.cu_seqlens,
        cu_seqlens_padded=batch.cu_seqlens_padded,
        max_seqlen=batch.max_seqlen,
        is_dummy=batch.is_dummy,
        cp_size=cp_size,
        cp_rank=cp_rank,
        tokens_R=batch.tokens_T[rows],
        labels_R=batch.labels_T[rows],
        loss_mask_R=batch.loss_mask_T[rows],
    )


def make_share(
    *,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor,
    max_seqlen: int,
    is_dummy: bool,
    cp_size: int,
    cp_rank: int,
    tokens_R: Tensor | None = None,
    labels_R: Tensor | None = None,
    loss_mask_R: Tensor | None = None,
) -> PackShare:
    """A share from the pack's boundaries, from which positions and padding follow, and the rank's own rows."""
    rows = rows_of_cp_rank(cu_seqlens_padded, cp_size, cp_rank)
    positions_T, padding_T = _positions_and_padding(cu_seqlens, cu_seqlens_padded)
    if is_dummy:
        padding_T = torch.ones_like(padding_T)
    has_padding = is_dummy or cu_seqlens is not cu_seqlens_padded
    return PackShare(
        tokens_R=tokens_R,
        labels_R=labels_R,
        loss_mask_R=loss_mask_R,
        position_ids_R=positions_T[rows],
        padding_mask_R=padding_T[rows] if has_padding else None,
        pack_position_ids_T=positions_T,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        max_seqlen=max_seqlen,
        num_samples=0 if is_dummy else count_samples(cu_seqlens),
        is_dummy=is_dummy,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


def _positions_and_padding(cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [T] positions, 0 in padding rows as in `PackedBatch`; bool [T] padding."""
    rows = torch.arange(int(cu_seqlens_padded[-1]))
    sample = torch.searchsorted(cu_seqlens_padded[1:].long(), rows, right=True)
    positions = rows - cu_seqlens_padded.long()[sample]
    padding = positions >= cu_seqlens.long().diff()[sample]
    return positions.masked_fill(padding, 0), padding


def sum_by_sample(values_R: Tensor, share: PackShare) -> Tensor:
    """[num_samples]: the sum of `values_R` over each sample's rows; under context parallelism, over those that this
    rank holds.

    Args:
        values_R: floating point [R], one for each of the rank's rows; the gradient flows through.
        share: the pack.
    """
    rows_S = share.cu_seqlens_padded.diff().long()
    # Each rank holds as many rows of every sample.
    sample_of_row_R = torch.repeat_interleave(rows_S // share.cp_size, output_size=values_R.numel())
    return values_R.new_zeros(rows_S.numel()).index_add(0, sample_of_row_R, values_R)[: share.num_samples]
