import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.errors import PackingError
from megatron_packing.thd.layout import rows_of_cp_rank
from megatron_packing.thd.pack import boundaries_of

cases = st.integers(1, 5).flatmap(
    lambda cp: st.tuples(
        st.just(cp),
        st.lists(st.integers(1, 6).map(lambda n: n * 2 * cp if cp > 1 else n), min_size=1, max_size=6),
    )
)


def rows(lengths: list[int], cp: int) -> list[list[int]]:
    return [rows_of_cp_rank(boundaries_of(lengths), cp, rank).tolist() for rank in range(cp)]


def test_two_padded_samples_under_cp_2() -> None:
    assert rows([8, 4], 2) == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_two_long_samples_under_cp_2() -> None:
    assert rows([8, 16], 2) == [
        [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23],
        [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19],
    ]


def test_one_token_under_cp_8_leaves_two_rows_a_rank() -> None:
    assert rows([16], 8) == [[rank, 15 - rank] for rank in range(8)]


@given(case=cases)
@settings(max_examples=60)
def test_every_row_has_exactly_one_rank(case: tuple[int, list[int]]) -> None:
    cp, lengths = case
    held = rows(lengths, cp)
    assert sorted(itertools.chain.from_iterable(held)) == list(range(sum(lengths)))
    assert {len(of_rank) for of_rank in held} == {sum(lengths) // cp}


@given(case=cases)
@settings(max_examples=60)
def test_equals_the_row_by_row_formulation(case: tuple[int, list[int]]) -> None:
    """Asked of each row instead of each rank: which of the sample's chunks is it in, and who mirrors that chunk?"""
    cp, lengths = case
    expected: list[list[int]] = [[] for _ in range(cp)]
    row = 0
    for length in lengths:
        for position in range(length):
            chunk = position * 2 * cp // length
            expected[0 if cp == 1 else min(chunk, 2 * cp - 1 - chunk)].append(row)
            row += 1
    assert rows(lengths, cp) == expected


@given(case=cases)
@settings(max_examples=30)
def test_every_rank_computes_as_many_causal_scores(case: tuple[int, list[int]]) -> None:
    cp, lengths = case
    positions = torch.cat([torch.arange(length) for length in lengths])
    scores = {int((positions[rows_of_cp_rank(boundaries_of(lengths), cp, rank)] + 1).sum()) for rank in range(cp)}
    assert len(scores) == 1


def test_a_sample_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PackingError, match="a sample of 6 rows cannot be cut in 2\\*CP = 4 equal chunks; pad it"):
        rows_of_cp_rank(boundaries_of([8, 6]), 2, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(PackingError, match=f"rank {rank} is out of range for 2 ranks"):
        rows_of_cp_rank(boundaries_of([8]), 2, rank)
