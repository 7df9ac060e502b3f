"""Which rows a context-parallel rank holds: as Transformer Engine cuts a pack itself, on random boundaries."""

import itertools
import random

import pytest
import torch

from megatron_packing.thd.layout import order_of_gathered_rows, rows_of_cp_rank
from tests.runs.harness import Runner


def test_our_ranks_hold_the_rows_that_its_own_partition_gives_them(runner: Runner) -> None:
    runner.call(_same_partition)


def _same_partition() -> None:
    rng = random.Random(11)
    unlike_contiguous = 0
    for _ in range(150):
        cp = rng.choice([2, 3, 4, 8])
        lengths = [2 * cp * rng.randint(1, 6) for _ in range(rng.randint(1, 6))]
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for rank in range(cp):
            mine = rows_of_cp_rank(boundaries, cp, rank)
            assert torch.equal(mine, _its_rows(boundaries, cp, rank))
            unlike_contiguous += not torch.equal(mine, torch.arange(mine.numel()) + rank * mine.numel())
        gathered = torch.cat([_its_rows(boundaries, cp, rank) for rank in range(cp)])
        assert torch.equal(gathered[order_of_gathered_rows(tuple(lengths), cp)], torch.arange(sum(lengths)))
    assert unlike_contiguous > 300
    assert not torch.equal(_its_rows(boundaries, cp, 0), rows_of_cp_rank(boundaries, cp, 1))


def _its_rows(boundaries: torch.Tensor, cp: int, rank: int) -> torch.Tensor:
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    rows = torch.arange(int(boundaries[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda group: cp)
        patch.setattr(torch.distributed, "get_rank", lambda group: rank)
        parts = context_parallel.get_batch_on_this_cp_rank(boundaries, rows[None], rows[None], rows, cp_group=object())
    tokens, labels, positions = parts
    assert torch.equal(tokens[0], positions)
    assert torch.equal(labels[0], positions)
    return positions
