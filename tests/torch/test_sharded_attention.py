"""Attention of one context-parallel rank at a time, all of them simulated in one process.

Legend: T rows of the pack, R = T / CP rows of a rank, N query heads, G key/value heads, H head dimension.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_packing.attention.core import sharded_attention
from megatron_packing.thd.layout import rows_of_cp_rank
from megatron_packing.thd.pack import boundaries_of
from tests.tolerances import ATTENTION_FP32
from tests.torch.test_attention import SCALE, Inputs, inputs, largest_error, output_and_gradients, reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    cp: int
    lengths: list[int]
    heads: int
    kv_heads: int
    causal: bool
    window: int | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cp = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return Case(
        cp=cp,
        lengths=[2 * cp * n for n in draw(st.lists(st.integers(1, 16 // cp), min_size=1, max_size=4))],
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 0, 3, 9])),
        seed=draw(st.integers(0, 2**16)),
    )


def sharded(
    given: Inputs,
    lengths: list[int],
    cp: int,
    *,
    causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """What all ranks make of a pack: output and dq in its order, dk and dv summed. Then each rank's own output.

    A row that no rank fills stays NaN.
    """
    out, dq = (torch.full_like(given.q, float("nan")) for _ in range(2))
    dk, dv = torch.zeros_like(given.k), torch.zeros_like(given.v)
    outputs = []
    for rank in range(cp):
        rows = rows_of_cp_rank(boundaries_of(lengths), cp, rank)
        q, k, v = (x.clone().requires_grad_() for x in (given.q[rows], given.k, given.v))
        place = {"cp_size": cp, "cp_rank": rank}
        how = {"causal": causal, "window": window, "dropout": dropout}
        mine = sharded_attention(q, k, v, lengths, **place, scale=SCALE, **how)
        gradients = torch.autograd.grad((mine * given.weight[rows]).sum(), (q, k, v))
        outputs.append(mine.detach())
        out[rows], dq[rows] = mine.detach(), gradients[0]
        dk, dv = dk + gradients[1], dv + gradients[2]
    return [out, dq, dk, dv], outputs


@given(case=cases())
@settings(max_examples=150)
def test_every_rank_s_rows_equal_the_reference_with_gradients(case: Case) -> None:
    given = inputs(sum(case.lengths), heads=case.heads, kv_heads=case.kv_heads, seed=case.seed)
    how = {"causal": case.causal, "window": case.window}
    found, outputs = sharded(given, case.lengths, case.cp, **how)
    true = output_and_gradients(reference(case.lengths, **how), given)
    assert {out.shape[0] for out in outputs} == {sum(case.lengths) // case.cp}
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, true, strict=True):
        assert ours.shape == theirs.shape
        assert largest_error(ours, theirs) <= ATTENTION_FP32, name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_no_sample_sees_another(cp: int, causal: bool, dropout: float) -> None:
    """The loss of one sample alone: its gradient reaches every row of that sample and none of another's."""
    lengths = [2 * cp, 6 * cp, 4 * cp]
    for chosen, (start, end) in enumerate([(0, 2 * cp), (2 * cp, 8 * cp), (8 * cp, 12 * cp)]):
        given = inputs(sum(lengths), kv_heads=2, seed=chosen)
        given.weight[:start] = given.weight[end:] = 0.0
        torch.manual_seed(0)
        (_, *gradients), _ = sharded(given, lengths, cp, causal=causal, dropout=dropout)
        for gradient in gradients:
            assert not gradient[:start].any()
            assert not gradient[end:].any()
            assert gradient[start:end].any()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_row_sees_itself_and_what_is_before_it_in_its_sample(cp: int) -> None:
    lengths = [2 * cp, 4 * cp]
    for row in range(sum(lengths)):
        given = inputs(sum(lengths), kv_heads=2, seed=row)
        kept = given.weight[row].clone()
        given.weight.zero_()
        given.weight[row] = kept
        (_, _, _, dv), _ = sharded(given, lengths, cp)
        first = 0 if row < lengths[0] else lengths[0]
        assert dv.abs().sum((1, 2)).nonzero()[:, 0].tolist() == list(range(first, row + 1))


@pytest.mark.parametrize("cp", [2, 4])
def test_equal_scores_average_what_is_seen(cp: int) -> None:
    """Values that are their own positions: row p of a sample averages 0..p, so its output is p / 2, on every rank."""
    lengths = [2 * cp, 4 * cp]
    positions = torch.cat([torch.arange(n) for n in lengths]).float()
    values = positions[:, None, None].expand(-1, 1, 16)
    for rank in range(cp):
        rows = rows_of_cp_rank(boundaries_of(lengths), cp, rank)
        zeros = torch.zeros(sum(lengths), 1, 16)
        out = sharded_attention(zeros[rows], zeros, values, lengths, cp_size=cp, cp_rank=rank, scale=SCALE)
        torch.testing.assert_close(out[:, 0, 0], positions[rows] / 2)


def test_lengths_that_do_not_cover_the_pack_are_an_error() -> None:
    given = inputs(12)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        sharded_attention(given.q[:6], given.k, given.v, [8], cp_size=2, cp_rank=0, scale=SCALE)
