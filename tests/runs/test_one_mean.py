"""L1: the loss of a step is one mean over all its targets, however they are spread over packs and ranks."""

import pytest
import torch

from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, dummy_pack, share_of_rank
from tests.runs.harness import Runner
from tests.runs.toy_step import mean_loss_and_gradient

pytestmark = pytest.mark.run

# One target of loss 4, and three of loss 1: a mean over targets of 1.75, a mean of means of 2.5. Ids are losses.
ONE_TARGET = ([4, 9], [1.0, 0.0])
THREE_TARGETS = ([9, 1, 1, 1], [0.0, 1.0, 1.0, 1.0])
MEAN = 1.75


def test_one_pack(runner: Runner) -> None:
    runner.call(_one_pack)


def test_two_packs(runner: Runner) -> None:
    runner.call(_two_packs)


def test_two_ranks(runner: Runner) -> None:
    runner.call(_two_ranks, ranks=2)


def test_two_ranks_one_of_which_only_runs_a_dummy(runner: Runner) -> None:
    runner.call(_two_ranks_with_a_dummy, ranks=2)


def _one_pack() -> None:
    _check([build_pack([_sample(*ONE_TARGET), _sample(*THREE_TARGETS)], alignment=1)])


def _two_packs() -> None:
    _check([build_pack([_sample(*ONE_TARGET)], alignment=1), build_pack([_sample(*THREE_TARGETS)], alignment=1)])


def _two_ranks() -> None:
    mine = (ONE_TARGET, THREE_TARGETS)[torch.distributed.get_rank()]
    _check([build_pack([_sample(*mine)], alignment=1)])


def _two_ranks_with_a_dummy() -> None:
    both = build_pack([_sample(*ONE_TARGET), _sample(*THREE_TARGETS)], alignment=1)
    _check([both if torch.distributed.get_rank() == 0 else dummy_pack(alignment=4)])


def _sample(tokens: list[int], mask: list[float]) -> SampleTensors:
    ids = torch.tensor(tokens)
    return SampleTensors(tokens_L=ids, labels_L=ids, loss_mask_L=torch.tensor(mask))


def _check(batches: list[PackedBatch]) -> None:
    """One step through Megatron's own schedule and gradient reduction: loss and gradient are both the mean."""
    loss, gradient = mean_loss_and_gradient([share_of_rank(b, cp_size=1, cp_rank=0) for b in batches])
    assert loss == MEAN
    assert gradient == MEAN
