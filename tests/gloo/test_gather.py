"""Rows of all context-parallel ranks, forward and backward, and attention over them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_packing.attention import packed_attention
from megatron_packing.thd.layout import rows_of_cp_rank
from megatron_packing.thd.pack import boundaries_of
from tests.gloo import tasks
from tests.gloo.pool import GlooPool

pytestmark = pytest.mark.gloo

GATHERED_ATTENTION = 1e-6
"""Relative L2 distance to one rank's attention: fp32 sums of the same terms in another order."""


def rows_and_weights(ranks: int, rows: int, columns: int, seed: int) -> list[tuple[list, list]]:
    """For each rank, its rows and its weight for everybody's: small integers, so that all sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(-9, 10, (n, columns), generator=generator).float().tolist() for n in (rows, ranks * rows))
        for _ in range(ranks)
    ]


def on_one_process(of_rank: list[tuple[list, list]]) -> tuple[Tensor, list[Tensor]]:
    """The gathered rows, and the gradient of each rank's rows for the sum of all ranks' losses."""
    leaves = [torch.tensor(rows, requires_grad=True) for rows, _ in of_rank]
    gathered = torch.cat(leaves)
    loss = sum((torch.tensor(weight) * gathered**2).sum() / 2 for _, weight in of_rank)
    return gathered.detach(), list(torch.autograd.grad(loss, leaves))


@given(
    ranks=st.integers(2, 4),
    rows=st.integers(2, 5),  # a rank holds at least two rows of each sample
    columns=st.integers(2, 4),
    how=st.sampled_from(["plain", "strided"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_rows_arrive_rank_by_rank_and_gradients_return_summed(
    pool: GlooPool, ranks: int, rows: int, columns: int, how: str, dtype: torch.dtype, seed: int
) -> None:
    of_rank = rows_and_weights(ranks, rows, columns, seed)
    if dtype == torch.bfloat16:  # whose products of two digits are exact only up to 256
        of_rank = [([[x % 4 for x in row] for row in mine], [[x % 4 for x in row] for row in w]) for mine, w in of_rank]
    gathered, gradients = on_one_process(of_rank)
    answers = pool.run(tasks.gather_rows, ranks, how, dtype, of_rank=of_rank, ranks=ranks)
    assert [rows for rows, _ in answers] == [gathered.tolist()] * ranks
    assert [gradient for _, gradient in answers] == [gradient.tolist() for gradient in gradients]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_gradient_of_a_plain_sum_counts_every_rank(pool: GlooPool, ranks: int) -> None:
    of_rank = [[1.0, 2.0, 3.0]] * ranks
    assert pool.run(tasks.gradient_of_a_plain_sum, ranks, of_rank=of_rank, ranks=ranks) == [[float(ranks)] * 3] * ranks


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_over_gathered_rows_equals_attention_on_one_rank(pool: GlooPool, ranks: int, causal: bool) -> None:
    lengths = [2 * ranks * n for n in (2, 1, 3, 1)]
    *qkv, weight = tasks.attention_inputs(lengths)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = packed_attention(q, k, v, lengths, scale=0.25, causal=causal)
    expected = [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    answers = pool.run(tasks.attend, lengths, ranks, causal, ranks=ranks)
    order = torch.cat([rows_of_cp_rank(boundaries_of(lengths), ranks, rank) for rank in range(ranks)])
    for index, name in enumerate(("output", "dq", "dk", "dv")):
        found = torch.tensor(list(itertools.chain.from_iterable(answer[index] for answer in answers)))
        error = (found - expected[index][order]).norm() / expected[index].norm()
        assert error <= GATHERED_ATTENTION, name
