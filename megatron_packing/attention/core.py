"""How is attention computed without Transformer Engine? One SDPA call a sample, on views of the pack.

`split` and not slices: the backward of q[a:b] fills a pack-sized tensor with zeros and adds it, which
makes long packs quadratic; the backward of `split` is one concatenation. Cost: sum of s^2, and some
20 microseconds a sample and layer.

Legend: T rows of the pack, N query heads, G key/value heads (N a multiple of G), H head dimension.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in which no row sees another sample's rows.

    Args:
        q_TNH: [T, N, H].
        k_TGH: [T, G, H].
        v_TGH: [T, G, H].
        lengths: rows of each sample, padding included; their sum is T.
        scale: factor of the scores, usually H ** -0.5.
        causal: whether a row sees only itself and earlier rows of its sample.
        dropout: probability of dropping an attention weight; 0 in evaluation.

    Returns:
        [T, N, H]. Equal to `reference.reference_attention` up to rounding.
    """
    pieces = zip(q_TNH.split(lengths), k_TGH.split(lengths), v_TGH.split(lengths), strict=True)
    outputs = [_one_sample(q, k, v, scale=scale, causal=causal, dropout=dropout) for q, k, v in pieces]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def batched_attention(
    q_SBNH: Tensor, k_SBGH: Tensor, v_SBGH: Tensor, *, scale: float, causal: bool = True, dropout: float = 0.0
) -> Tensor:
    """The same for B samples of equal length S side by side, Megatron's unpacked layout.

    Returns:
        [S, B, N, H].
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBNH, k_SBGH, v_SBGH))
    return _sdpa(q, k, v, scale=scale, causal=causal, dropout=dropout).permute(2, 0, 1, 3)


def _one_sample(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, dropout: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [s, heads, H] -> [1, heads, s, H]
    return _sdpa(q, k, v, scale=scale, causal=causal, dropout=dropout).squeeze(0).transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, dropout: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=grouped)
