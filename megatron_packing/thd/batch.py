"""What is a pack, as tensors, and when is it well formed?

Two samples of real lengths 7 and 2, aligned to 4 tokens (T = 12 rows):

    row                 0  1  2  3  4  5  6  7 | 8  9 10 11
    sample              A  A  A  A  A  A  A  . | B  B  .  .
    position_ids        0  1  2  3  4  5  6  0 | 0  1  0  0
    padding_mask        f  f  f  f  f  f  f  T | f  f  T  T
    cu_seqlens          [0, 7, 9]      real tokens, counted without the padding
    cu_seqlens_padded   [0, 8, 12]     rows

Filled up to 16 rows and a capacity of 4 segments (`pack.fill_up`), it ends in a tail that no sample owns and in
sentinels, segments without rows, so that packs of any samples have the same shapes:

    cu_seqlens          [0, 7, 9, 9, 9]
    cu_seqlens_padded   [0, 8, 12, 16, 16]

Dimensions: T rows of the pack, S samples in it; with the tail and sentinels S stands for all segments.
"""

import itertools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_packing.errors import PackingError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One pack. Construction checks the boundaries and raises `PackingError` where they are wrong."""

    tokens_T: Tensor
    """int64 [T]: input ids; 0 in padding rows."""
    labels_T: Tensor
    """int64 [T]: the id to predict at each row; 0 in padding rows."""
    loss_mask_T: Tensor
    """float32 [T]: weight of each row's loss; 0 in padding rows."""
    position_ids_T: Tensor
    """int64 [T]: position within the row's own sample, from 0; 0 in padding rows."""
    cu_seqlens: Tensor
    """int32 [S + 1]: real boundaries. The same object as `cu_seqlens_padded` where nothing is padded."""
    cu_seqlens_padded: Tensor
    """int32 [S + 1]: boundaries in rows."""
    max_seqlen: int
    """Rows of the longest segment, padding included; T where the shape is fixed."""
    is_dummy: bool = False
    """Whether the pack only keeps the ranks' microbatch counts equal: it runs, fully masked."""
    is_fixed: bool = False
    """Whether the shapes say nothing of the samples: sentinels may follow the last segment, and max_seqlen is T."""

    def __post_init__(self) -> None:
        rows = self.tokens_T.numel()
        for name in ("labels_T", "loss_mask_T", "position_ids_T"):
            if getattr(self, name).shape != self.tokens_T.shape:
                raise PackingError(
                    f"PackedBatch.{name} has shape {tuple(getattr(self, name).shape)}, tokens_T ({rows},)."
                )
        edges = _check_boundaries("cu_seqlens_padded", self.cu_seqlens_padded, total=rows)
        if len(edges) < self.cu_seqlens_padded.numel() and not self.is_fixed:
            raise PackingError(
                f"PackedBatch.cu_seqlens_padded must increase strictly; it is {self.cu_seqlens_padded.tolist()}."
            )
        longest = rows if self.is_fixed else max(b - a for a, b in itertools.pairwise(edges))
        if type(self.max_seqlen) is not int or self.max_seqlen != longest:
            raise PackingError(
                f"PackedBatch.max_seqlen is {self.max_seqlen!r}; it must be the Python int {longest}, the largest "
                "difference of cu_seqlens_padded, or all rows where the shape is fixed."
            )
        if self.cu_seqlens is not self.cu_seqlens_padded:
            self._check_real_boundaries(segments=len(edges) - 1)

    def _check_real_boundaries(self, segments: int) -> None:
        samples = len(_check_boundaries("cu_seqlens", self.cu_seqlens, total=None)) - 1
        if self.cu_seqlens.shape != self.cu_seqlens_padded.shape:
            raise PackingError(
                f"PackedBatch.cu_seqlens has {self.cu_seqlens.numel() - 1} samples, cu_seqlens_padded "
                f"{self.cu_seqlens_padded.numel() - 1}."
            )
        if samples < segments - 1:
            raise PackingError(
                f"PackedBatch.cu_seqlens has {samples} samples for {segments} segments; only the last may be a tail "
                "without one."
            )
        padding = self.cu_seqlens_padded.diff() - self.cu_seqlens.diff()
        if bool((padding < 0).any()):
            raise PackingError("PackedBatch: a sample is longer than its padded length.")
        if not padding.any():
            raise PackingError(
                "PackedBatch: cu_seqlens equals cu_seqlens_padded, but they are two tensors. Hand in one tensor for "
                "both: kernels tell by its identity that nothing is padded."
            )

    @property
    def num_samples(self) -> int:
        """Samples in the pack; a dummy holds none."""
        return 0 if self.is_dummy else count_samples(self.cu_seqlens)

    @property
    def num_rows(self) -> int:
        """T: rows that the model runs."""
        return self.tokens_T.numel()

    @property
    def is_padded(self) -> bool:
        """Whether a sample has rows beyond its length."""
        return self.cu_seqlens is not self.cu_seqlens_padded

    def padding_mask_T(self) -> Tensor:
        """bool [T]: True where a row belongs to no sample, as no row of a dummy does."""
        if self.is_dummy:
            return torch.ones_like(self.tokens_T, dtype=torch.bool)
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.cu_seqlens.device)
        sample_of_row = torch.searchsorted(self.cu_seqlens_padded[1:], rows, right=True)
        real_ends = self.cu_seqlens_padded[:-1] + self.cu_seqlens.diff()
        return rows >= real_ends[sample_of_row]

    def to(self, device: torch.device | str | int) -> "PackedBatch":
        """The same pack on `device`; boundaries that were one object stay one object."""
        moved = object.__new__(PackedBatch)  # checked already: checking again would wait for the device
        for field in fields(self):
            value = getattr(self, field.name)
            on_device = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            object.__setattr__(moved, field.name, on_device)
        if not self.is_padded:
            object.__setattr__(moved, "cu_seqlens", moved.cu_seqlens_padded)
        return moved


def count_samples(cu_seqlens: Tensor) -> int:
    """Samples between real boundaries: a tail and sentinels have no tokens, every sample has some."""
    return int(torch.count_nonzero(cu_seqlens.diff()))


def _check_boundaries(name: str, boundaries: Tensor, total: int | None) -> list[int]:
    """`boundaries` up to where their end is first reached, after checking them: int32, 1-D, from 0, strictly increasing
    up to there, to `total`."""
    if boundaries.dtype != torch.int32 or boundaries.dim() != 1 or boundaries.numel() < 2:
        raise PackingError(
            f"PackedBatch.{name} is {boundaries.dtype} of shape {tuple(boundaries.shape)}; it must be int32, "
            "one-dimensional, with at least two entries."
        )
    values = boundaries.tolist()
    edges = values[: values.index(values[-1]) + 1]
    if values[0] != 0:
        raise PackingError(f"PackedBatch.{name} starts at {values[0]}; it must start at 0.")
    increasing = all(before < after for before, after in itertools.pairwise(edges))
    if len(edges) < 2 or not increasing or any(value != edges[-1] for value in values[len(edges) :]):
        raise PackingError(f"PackedBatch.{name} must increase strictly; it is {values}.")
    if total is not None and values[-1] != total:
        raise PackingError(f"PackedBatch.{name} ends at {values[-1]}; the pack has {total} rows.")
    return edges
