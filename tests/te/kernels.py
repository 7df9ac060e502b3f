"""What Transformer Engine has compiled for packed samples under context parallelism, in plain torch.

Its algorithms (rings, all-to-all, gathering) are Python and run as they are; they call these for the scores of one step
and for putting steps together. T rows on a rank, N heads, G key heads, H the head's width. `cu_seqlens` are the
boundaries of the rows that a function is given.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Any,
    **settings: Any,
) -> list[Any]:
    """Output [T, N, H], and for the backward the logarithm of softmax's sum [T, N, 1]; NaN in rows of no sample."""
    out = torch.full_like(q, math.nan)
    lse = torch.full((*q.shape[:2], 1), math.nan)
    for rows_q, rows_kv in _sequences(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, settings):
        scores = _scores(q[rows_q], k[rows_kv], settings)
        lse[rows_q] = scores.logsumexp(dim=-1).T[..., None]
        out[rows_q] = torch.einsum("nqk,knh->qnh", scores.softmax(dim=-1), _repeated(v[rows_kv], q)).to(q.dtype)
    return [out, [lse, torch.zeros(2, dtype=torch.int64)]]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    *others: Any,
    **settings: Any,
) -> list[Any]:
    """Gradients of q, k and v, from the softmax's sum over all steps; 0 in rows of no sample."""
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    (saved,) = (other for other in others if isinstance(other, list))  # older versions have one more type before it
    lse = saved[0].reshape(*q.shape[:2])
    for rows_q, rows_kv in _sequences(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, settings):
        probabilities = (_scores(q[rows_q], k[rows_kv], settings) - lse[rows_q].T[..., None]).exp()
        grad_out, group = grad[rows_q].float(), (k.shape[1], q.shape[1] // k.shape[1])
        along = (grad_out * out[rows_q].float()).sum(dim=-1).T[..., None]
        of_probabilities = torch.einsum("qnh,knh->nqk", grad_out, _repeated(v[rows_kv], q))
        of_scores = probabilities * (of_probabilities - along) * settings["attn_scale"]
        grads[0][rows_q] += torch.einsum("nqk,knh->qnh", of_scores, _repeated(k[rows_kv], q))
        of_keys = torch.einsum("nqk,qnh->knh", of_scores, q[rows_q].float())
        of_values = torch.einsum("nqk,qnh->knh", probabilities, grad_out)
        for total, one in ((grads[1], of_keys), (grads[2], of_values)):
            total[rows_kv] += one.unflatten(1, group).sum(dim=2)
    return [*(x.to(q.dtype) for x in grads), None]


def _sequences(
    max_q: int, max_kv: int, cu_q: Tensor, cu_kv: Tensor, settings: dict[str, Any]
) -> Iterator[tuple[slice, slice]]:
    """Rows of each sequence's queries and keys; a longest length that is too small is an error, as on a GPU."""
    sides = []
    for longest, boundaries, padded in (
        (max_q, cu_q, settings["cu_seqlens_q_padded"]),
        (max_kv, cu_kv, settings["cu_seqlens_kv_padded"]),
    ):
        lengths = boundaries.diff().tolist()
        assert max(lengths) <= longest, f"a sequence of {max(lengths)} rows, but max_seqlen {longest}"
        sides.append([slice(at, at + n) for at, n in zip(padded.tolist(), lengths, strict=False)])
    yield from zip(*sides, strict=True)


def _repeated(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.float().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, settings: dict[str, Any]) -> Tensor:
    """[N, q, k], minus infinity where a query does not see a key."""
    kind, (left, _) = settings["attn_mask_type"], settings.get("window_size") or (-1, -1)
    assert kind in ("padding", "padding_causal", "padding_causal_bottom_right")
    shift = k.shape[0] - q.shape[0] if kind.endswith("bottom_right") else 0
    ahead = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None] - shift  # of a key, to a query
    hidden = (ahead > 0) if "causal" in kind else torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    scores = torch.einsum("qnh,knh->nqk", q.float(), _repeated(k, q)) * settings["attn_scale"]
    return scores.masked_fill(hidden, -math.inf)


# --- halves: a rank holds two chunks of each sequence -----------------------------------------------


def _halves(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the first and of the second half of every sequence."""
    first, second = [], []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        middle = (start + end) // 2
        first.append(torch.arange(start, middle))
        second.append(torch.arange(middle, end))
    return torch.cat(first), torch.cat(second)


def thd_read_half_tensor(rows: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    return rows[_halves(cu_seqlens)[half]]


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, rows: int) -> Tensor:
    assert packed
    second = lse[:, _halves(cu_seqlens)[1]]
    assert second.shape[1] == rows
    return second


def thd_second_half_lse_correction(lse: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    assert packed
    second = _halves(cu_seqlens)[1]
    lse[:, second] = torch.logaddexp(lse[:, second], step)


def thd_out_correction(out: Tensor, step: Tensor, *rest: Any) -> None:
    """Add a step's output: in 2.17 with final sums (all steps', this one's), in 2.20 with (old, new, this one's)."""
    *sums, cu_seqlens, only_second_half, packed = rest
    assert packed
    rows = _halves(cu_seqlens)[1] if only_second_half else torch.arange(out.shape[0])
    weight = (sums[-1] - sums[-2][:, rows]).exp().T[..., None]
    before = out[rows] * (sums[0] - sums[1])[:, rows].exp().T[..., None] if len(sums) == 3 else out[rows]
    out[rows] = (before + step.view(rows.numel(), *out.shape[1:]) * weight).to(out.dtype)


def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """Each half of `grad` copies, adds, is zeroed or left alone; a step of half the rows is of the half that moves."""
    whole = step.shape[0] == grad.shape[0]
    for rows, what in zip(_halves(cu_seqlens), (first, second), strict=True):
        if what == "zero":
            grad[rows] = 0
        elif what in ("copy", "add"):
            moving = step[rows] if whole else step
            grad[rows] = moving if what == "copy" else grad[rows] + moving


# --- orders of rows ---------------------------------------------------------------------------------


def _rank_order(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Rows of the pack as the ranks hold them, one rank after the other."""
    rows = []
    for rank in range(cp_size):
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            chunks = torch.arange(start, end).chunk(2 * cp_size)
            rows += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(rows)


def thd_cp_rank_order_to_sequence_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, rows: int) -> Tensor:
    assert rows == int(cu_seqlens[-1])
    return x[_rank_order(cu_seqlens, cp_size).argsort()]


def thd_sequence_order_to_cp_rank_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, rows: int) -> Tensor:
    assert rows == int(cu_seqlens[-1])
    return x[_rank_order(cu_seqlens, cp_size)]


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    all_rows: Tensor, split: Tensor, starts: Tensor, cu_seqlens: Tensor
) -> None:
    for start, length in zip(starts.tolist(), cu_seqlens.diff().tolist(), strict=False):
        all_rows[start : start + length] = split[start : start + length]


EXTENSION = (
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_out_correction,
    thd_grad_correction,
    thd_cp_rank_order_to_sequence_order,
    thd_sequence_order_to_cp_rank_order,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
)
"""What of this belongs to the compiled extension; the fused kernels' Python around them is left out."""
