"""How is attention computed without Transformer Engine? By one call of a kernel that takes boundaries, on CUDA
(`dispatch` says when), else by one SDPA call a sample, on views of the pack.

`split` and not slices: the backward of q[a:b] fills a pack-sized tensor with zeros and adds it, which
makes long packs quadratic; the backward of `split` is one concatenation. Cost: sum of s^2, and some
20 microseconds a sample and layer.

Legend: T rows of the pack, N query heads, G key/value heads (N a multiple of G), H head dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packing.attention.dispatch import Kernel, kernel_function


def varlen_attention(
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    kernel: Kernel,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`packed_attention` by a kernel that takes the boundaries. Nothing here waits for the device.

    Args:
        q_TNH: [T, N, H], half precision, on CUDA.
        k_TGH: [T, G, H].
        v_TGH: [T, G, H].
        cu_seqlens: int32 [S + 1], boundaries in rows from 0 to T; equal neighbours are a sample without rows.
        max_seqlen: rows of the longest sample, or more.
        kernel: varlen or flash.
        scale: factor of the scores.
        causal: whether a row sees only itself and earlier rows of its sample.
        window: how many rows before itself a row sees at most, if causal; None: all.
        dropout: probability of dropping an attention weight; 0 for varlen.

    Returns:
        [T, N, H].
    """
    attend = kernel_function(kernel.name)
    if kernel.name == "varlen":
        assert dropout == 0.0, "the kernel has no dropout; choose_kernel takes another where there is some"
        return attend(  # type: ignore[no-any-return]
            q_TNH,
            k_TGH,
            v_TGH,
            cu_seq_q=cu_seqlens,
            cu_seq_k=cu_seqlens,
            max_q=max_seqlen,
            max_k=max_seqlen,
            scale=scale,
            window_size=(_kernels_window(window), 0) if causal else (-1, -1),
            enable_gqa=q_TNH.shape[1] != k_TGH.shape[1],
        )
    return attend(  # type: ignore[no-any-return]
        q_TNH,
        k_TGH,
        v_TGH,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=causal,
        window_size=(_kernels_window(window), 0 if causal else -1),
        # Its backward adds in any order unless told otherwise; torch's kernel asks torch itself.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def packed_attention(
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
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
        window: how many rows before itself a row sees at most, if causal; None: all.
        dropout: probability of dropping an attention weight; 0 in evaluation.

    Returns:
        [T, N, H]. Equal to `reference.reference_attention` up to rounding.
    """
    pieces = zip(q_TNH.split(lengths), k_TGH.split(lengths), v_TGH.split(lengths), strict=True)
    outputs = [
        _one_sample(q, k, v, scale=scale, dropout=dropout, **_causality(len(q), q.device, causal=causal, window=window))
        for q, k, v in pieces
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def sharded_attention(
    q_RNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    lengths: Sequence[int],
    *,
    cp_size: int,
    cp_rank: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of one context-parallel rank's rows over the keys and values of the whole pack.

    A rank holds two chunks of each sample: `cp_rank` and `2 * cp_size - 1 - cp_rank` of 2 * cp_size. A row sees what
    its true position in the sample allows, wherever it is held.

    Args:
        q_RNH: [R, N, H], the rank's rows, R = T / cp_size.
        k_TGH: [T, G, H], every row, in the order of the pack.
        v_TGH: [T, G, H].
        lengths: rows of each sample over all ranks, each a multiple of 2 * cp_size.
        cp_size: ranks that share the pack.
        cp_rank: this one's number.
        scale: factor of the scores.
        causal: whether a row sees only itself and earlier rows of its sample.
        window: how many rows before itself a row sees at most, if causal; None: all.
        dropout: probability of dropping an attention weight.

    Returns:
        [R, N, H].
    """
    chunks = [length // (2 * cp_size) for length in lengths for _ in range(2)]
    outputs = []
    queries = iter(q_RNH.split(chunks))
    for length, k, v in zip(lengths, k_TGH.split(lengths), v_TGH.split(lengths), strict=True):
        chunk = length // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            seen = (number + 1) * chunk if causal else length
            rows = torch.arange(number * chunk, (number + 1) * chunk, device=q_RNH.device)
            mask = _visible(rows, seen, window) if causal else None
            part = {"scale": scale, "causal": False, "dropout": dropout, "mask": mask}
            outputs.append(_one_sample(next(queries), k[:seen], v[:seen], **part))
    return torch.cat(outputs)


def batched_attention(
    q_SBNH: Tensor,
    k_SBGH: Tensor,
    v_SBGH: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The same for B samples of equal length S side by side, Megatron's unpacked layout.

    Returns:
        [S, B, N, H].
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBNH, k_SBGH, v_SBGH))
    seen = _causality(q.shape[2], q.device, causal=causal, window=window)
    return _sdpa(q, k, v, scale=scale, dropout=dropout, **seen).permute(2, 0, 1, 3)


def _causality(length: int, device: torch.device, *, causal: bool, window: int | None) -> dict[str, Any]:
    """SDPA's arguments for what a row of a sample of `length` rows sees: no mask where the kernel knows the rule."""
    if window is None or not causal or window + 1 >= length:
        return {"causal": causal, "mask": None}
    return {"causal": False, "mask": _visible(torch.arange(length, device=device), length, window)}


def _visible(rows: Tensor, seen: int, window: int | None) -> Tensor:
    """bool [rows, seen]: which of a sample's first `seen` rows each of `rows` (their numbers) sees, causally."""
    columns = torch.arange(seen, device=rows.device)[None, :]
    visible = columns <= rows[:, None]
    return visible if window is None else visible & (columns >= rows[:, None] - window)


def _kernels_window(window: int | None) -> int:
    return -1 if window is None else window


def _one_sample(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, dropout: float, mask: Tensor | None = None
) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [s, heads, H] -> [1, heads, s, H]
    return _sdpa(q, k, v, scale=scale, causal=causal, dropout=dropout, mask=mask).squeeze(0).transpose(0, 1)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, dropout: float, mask: Tensor | None = None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )
