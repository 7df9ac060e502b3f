"""Which rows of a pack does a context-parallel rank hold?

Zigzag, sample by sample: a sample is cut in 2*CP equal chunks, rank r holds chunks r and 2*CP-1-r, so
that under a causal mask every rank computes the same number of scores. Two samples of 8 and 16 rows,
CP 2:

    rank 0   [0 1 | 6 7]   [8 9 10 11 | 20 21 22 23]
    rank 1   [2 3 4 5]     [12 13 14 15 16 17 18 19]

Equal to Transformer Engine's `thd_get_partitioned_indices`, without needing CUDA.
"""

import functools
import itertools

import torch
from torch import Tensor

from megatron_packing.errors import PackingError


def rows_of_cp_rank(cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """int64 [T / CP]: the pack's rows that a rank holds, in the order in which it holds them.

    Args:
        cu_seqlens_padded: int32 [S + 1], boundaries in rows, each a multiple of 2*CP for CP > 1.
        cp_size: ranks that share the pack.
        cp_rank: 0 <= cp_rank < cp_size.

    Raises:
        PackingError: a boundary that cannot be cut, or a rank out of range.
    """
    if not 0 <= cp_rank < cp_size:
        raise PackingError(f"context-parallel rank {cp_rank} is out of range for {cp_size} ranks.")
    edges = cu_seqlens_padded.tolist()
    if cp_size == 1:
        return torch.arange(edges[-1])
    pieces = []
    for start, end in itertools.pairwise(edges):
        if (end - start) % (2 * cp_size):
            raise PackingError(
                f"a sample of {end - start} rows cannot be cut in 2*CP = {2 * cp_size} equal chunks; pad it first."
            )
        chunk = (end - start) // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(pieces)


@functools.lru_cache(maxsize=8)
def order_of_gathered_rows(lengths: tuple[int, ...], cp_size: int) -> Tensor:
    """int64 [T]: where each row of the pack stands among the ranks' rows laid one rank after the other.

    Every layer asks for the same pack, so that the last few answers are kept.

    Args:
        lengths: rows of each sample, padding included.
        cp_size: ranks that share the pack.
    """
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    gathered = torch.cat([rows_of_cp_rank(edges, cp_size, rank) for rank in range(cp_size)])
    return torch.argsort(gathered)
