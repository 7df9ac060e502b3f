"""How do samples become one pack? Laid one after the other, each padded to the alignment.

Cost: one concatenation a field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packing.errors import CapacityError, PackingError
from megatron_packing.thd.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTensors:
    """One sample without padding; L is its length in tokens."""

    tokens_L: Tensor
    """int64 [L]: input ids."""
    labels_L: Tensor
    """int64 [L]: the id to predict at each position."""
    loss_mask_L: Tensor
    """float32 [L]: weight of each position's loss."""

    def __post_init__(self) -> None:
        if not self.tokens_L.shape == self.labels_L.shape == self.loss_mask_L.shape or self.tokens_L.dim() != 1:
            raise PackingError(
                f"a sample's fields must be one-dimensional and equally long; they are {tuple(self.tokens_L.shape)}, "
                f"{tuple(self.labels_L.shape)} and {tuple(self.loss_mask_L.shape)}."
            )

    @property
    def length(self) -> int:
        """L, in tokens."""
        return self.tokens_L.numel()

    @property
    def targets(self) -> int:
        """Positions whose label counts in the loss."""
        return int(torch.count_nonzero(self.loss_mask_L))


def build_pack(samples: Sequence[SampleTensors], *, alignment: int) -> PackedBatch:
    """Lay `samples` one after the other, each padded to a multiple of `alignment` tokens.

    Raises:
        PackingError: there is no sample, or one has no tokens.
        CapacityError: the rows do not fit in int32 boundaries.
    """
    if not samples:
        raise PackingError("a pack needs at least one sample; use dummy_pack for an empty one.")
    lengths = [sample.length for sample in samples]
    if min(lengths) < 1:
        raise PackingError(f"a sample of {min(lengths)} tokens cannot be packed; drop it before planning.")
    padded = [-(-length // alignment) * alignment for length in lengths]
    padded_boundaries = boundaries_of(padded)
    real_boundaries = padded_boundaries if padded == lengths else boundaries_of(lengths)
    return PackedBatch(
        tokens_T=_lay_out([s.tokens_L for s in samples], padded),
        labels_T=_lay_out([s.labels_L for s in samples], padded),
        loss_mask_T=_lay_out([s.loss_mask_L for s in samples], padded),
        position_ids_T=_lay_out([torch.arange(length) for length in lengths], padded),
        cu_seqlens=real_boundaries,
        cu_seqlens_padded=padded_boundaries,
        max_seqlen=max(padded),
    )


def dummy_pack(*, alignment: int) -> PackedBatch:
    """The smallest pack that runs: one alignment unit of rows, fully masked.

    A rank that has fewer packs than the others runs it, so that every rank meets every collective.
    """
    zeros = torch.zeros(alignment, dtype=torch.int64)
    boundaries = boundaries_of([alignment])
    return PackedBatch(
        tokens_T=zeros,
        labels_T=zeros.clone(),
        loss_mask_T=torch.zeros(alignment, dtype=torch.float32),
        position_ids_T=torch.arange(alignment),
        cu_seqlens=boundaries,
        cu_seqlens_padded=boundaries,
        max_seqlen=alignment,
        is_dummy=True,
    )


def fill_up(batch: PackedBatch, *, rows: int, num_boundaries: int | None = None) -> PackedBatch:
    """`batch` with a tail that no sample owns, and on request with a fixed number of boundaries.

    The tail is a segment of its own, with no real token: masked in loss and routing, seen by no sample. What follows it
    are sentinels, segments without rows. Neither changes what a sample computes.

    Args:
        batch: a pack or a dummy.
        rows: of the result, at least the pack's.
        num_boundaries: entries of both `cu_seqlens`; then `max_seqlen` is `rows`, so that no shape and no number
            depends on the samples. None: as many as there are segments.

    Raises:
        CapacityError: the pack has more rows or segments than that.
    """
    tail = rows - batch.num_rows
    segments = batch.cu_seqlens_padded.numel() - 1 + (tail > 0)
    if tail < 0 or (num_boundaries is not None and segments + 1 > num_boundaries):
        raise CapacityError(
            f"a pack of {batch.num_rows} rows and, tail included, {segments} segments cannot be filled up to {rows} "
            f"rows and {num_boundaries} boundaries. Raise --max-seqlen-per-dp-cp-rank or --thd-max-packed-sequences."
        )
    if tail == 0 and num_boundaries is None:
        return batch
    more = (segments + 1 if num_boundaries is None else num_boundaries) - batch.cu_seqlens_padded.numel()
    padded_boundaries = F.pad(batch.cu_seqlens_padded, (0, more), value=rows)
    real_boundaries = padded_boundaries
    if tail or batch.is_padded:
        real_boundaries = F.pad(batch.cu_seqlens, (0, more), value=int(batch.cu_seqlens[-1]))
    return replace(
        batch,
        tokens_T=F.pad(batch.tokens_T, (0, tail)),
        labels_T=F.pad(batch.labels_T, (0, tail)),
        loss_mask_T=F.pad(batch.loss_mask_T, (0, tail)),
        position_ids_T=F.pad(batch.position_ids_T, (0, tail)),
        cu_seqlens=real_boundaries,
        cu_seqlens_padded=padded_boundaries,
        max_seqlen=max(batch.max_seqlen, tail) if num_boundaries is None else rows,
        is_fixed=num_boundaries is not None,
    )


def boundaries_of(lengths: Sequence[int]) -> Tensor:
    """int32 [S + 1]: running sum of `lengths` (tokens), from 0.

    Raises:
        CapacityError: the sum does not fit in int32; a silent wrap would send attention to negative rows.
    """
    edges = [0, *accumulate(int(length) for length in lengths)]
    if edges[-1] >= 2**31:
        raise CapacityError(
            f"a pack of {edges[-1]} tokens does not fit in int32 boundaries; the limit is {2**31 - 1}. Lower "
            "--max-seqlen-per-dp-cp-rank."
        )
    return torch.tensor(edges, dtype=torch.int32)


def _lay_out(pieces: Sequence[Tensor], padded: Sequence[int]) -> Tensor:
    """Concatenate `pieces`, each followed by zeros up to its padded length."""
    parts: list[Tensor] = []
    for piece, rows in zip(pieces, padded, strict=True):
        parts.append(piece)
        if rows > piece.numel():
            parts.append(piece.new_zeros(rows - piece.numel()))
    return torch.cat(parts)
