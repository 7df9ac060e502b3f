"""What would it cost not to pack? Exact accounts of padding every sample to one length; one sort of the lengths.

slots        N rows of L places: one row a sample
bound        the least number of rows of L places that hold the real tokens at all, whatever the samples' borders
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedAccount:
    """N samples, each padded to a row of L tokens, against the same samples packed without a gap. Totals over all."""

    slots: int
    """N * L: places for tokens."""
    real_tokens: int
    padding_tokens: int
    """Slots without a real token."""
    waste: float
    """padding_tokens / slots."""
    bound_packs: int
    """ceil(real_tokens / L): no packing needs fewer packs of L tokens."""
    bound_slots: int
    """bound_packs * L."""
    tail_padding: int
    """Slots of the bound without a real token."""
    saved: int
    """slots - bound_slots: the most that packing can save."""
    score_half_squares: int | float
    """Half the sum of s * s: attention scores below the diagonal, as kernels count them, of the real samples."""
    causal_pairs: int
    """Sum of s * (s + 1) / 2: the (query, key) pairs that causal attention needs, the diagonal included."""
    padded_half_squares: int | float
    """N * L * L / 2: what `score_half_squares` is where padding attends like tokens. Not in `as_dict`."""

    def as_dict(self) -> dict[str, int | float]:
        """The ten figures that reports carry, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "padded_half_squares"}


def padded_account(lengths: Int64Array, seq_length: int) -> PaddedAccount:
    """The account of `lengths` (int64 [N], N of at least 1, each from 1 to `seq_length`) padded to `seq_length`."""
    values, counts = np.unique(lengths, return_counts=True)
    # Python's integers from here on: the sums of squares of a corpus may leave 64 bits.
    histogram = list(zip(values.tolist(), counts.tolist(), strict=True))
    real = sum(count * s for s, count in histogram)
    squares = sum(count * s * s for s, count in histogram)
    slots = len(lengths) * seq_length
    bound_packs = -(-real // seq_length)
    bound_slots = bound_packs * seq_length
    return PaddedAccount(
        slots=slots,
        real_tokens=real,
        padding_tokens=slots - real,
        waste=(slots - real) / slots,
        bound_packs=bound_packs,
        bound_slots=bound_slots,
        tail_padding=bound_slots - real,
        saved=slots - bound_slots,
        score_half_squares=_half(squares),
        causal_pairs=(squares + real) // 2,  # s * (s + 1) is even for every s
        padded_half_squares=_half(slots * seq_length),
    )


def _half(total: int) -> int | float:
    return total / 2 if total % 2 else total // 2
