"""What is right? Dense attention in fp32 with the mask written out. Cost: T x T scores a head.

Legend: T rows of the pack, N query heads, G key/value heads (N a multiple of G), H head dimension.
"""

import torch
from torch import Tensor


def visible_TT(cu_seqlens_padded: Tensor, *, causal: bool = True, window: int | None = None) -> Tensor:
    """bool [T, T]: whether row i (first index) may see row j: same sample; when causal not later, and at most `window`
    rows earlier.
    """
    total = int(cu_seqlens_padded[-1])
    rows = torch.arange(total, device=cu_seqlens_padded.device)
    sample_T = torch.searchsorted(cu_seqlens_padded[1:].contiguous(), rows.to(torch.int32), right=True)
    same = sample_T[:, None] == sample_T[None, :]
    if not causal:
        return same
    before = rows[:, None] - rows[None, :]
    return same & (before >= 0) & (before <= (total if window is None else window))


def reference_attention(
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    cu_seqlens_padded: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Softmax attention within each sample, computed in fp32 whatever the inputs' type.

    softmax(scale * q k^T + mask) v, Vaswani et al., "Attention Is All You Need", eq. 1; query head n uses
    key/value head n // (N / G), Ainslie et al., "GQA".

    Args:
        q_TNH: [T, N, H].
        k_TGH: [T, G, H].
        v_TGH: [T, G, H].
        cu_seqlens_padded: int32 [S + 1], boundaries in rows.
        scale: factor of the scores, usually H ** -0.5.
        causal: whether a row sees only itself and earlier rows.
        window: how many rows before itself a row sees at most, if causal; None: all.

    Returns:
        [T, N, H] in the type of `q_TNH`.
    """
    repeat = q_TNH.shape[1] // k_TGH.shape[1]
    k_TNH = k_TGH.float().repeat_interleave(repeat, dim=1)
    v_TNH = v_TGH.float().repeat_interleave(repeat, dim=1)
    scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH.float(), k_TNH) * scale
    scores_NTT = scores_NTT.masked_fill(~visible_TT(cu_seqlens_padded, causal=causal, window=window), float("-inf"))
    return torch.einsum("nqk,knh->qnh", scores_NTT.softmax(-1), v_TNH).to(q_TNH.dtype)
