"""L4, L5: context parallelism changes neither the loss, nor its scale, nor the gradients of a whole model."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, share_of_rank
from megatron_packing.thd.layout import rows_of_cp_rank
from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.toy_model import VOCAB, hooked, toy_gpt
from tests.runs.toy_step import mean_loss_and_gradient

pytestmark = pytest.mark.run

GRADIENT_REL_L2 = 1e-7
"""Relative L2 distance of each parameter's gradient from that of one rank, in fp64, where 2.5e-15 was measured.
Megatron's cross entropy rounds logits to fp32; one that is rounded the other way may cost 1e-8. In fp32 the same
comparison gives 1.2e-6, the rounding of two layers, which would hide a small fault."""

LENGTHS = (7, 2, 16, 1, 12)
ALIGNMENT = 8  # of CP 4; the others run the same pack


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_loss_is_one_mean_and_its_gradient_that_of_one_rank(cp: int, runner: Runner) -> None:
    runner.call(partial(_one_mean, cp), ranks=cp)


@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "none"])
def test_losses_and_gradients_of_a_model_equal_those_of_one_rank(positions: str, runner: Runner) -> None:
    runner.call(partial(_equal_one_rank, positions), ranks=2)


def test_losses_and_gradients_of_a_model_over_four_ranks(runner: Runner) -> None:
    runner.call(partial(_equal_one_rank, "rope"), ranks=4)


def test_two_runs_are_equal_to_the_bit(runner: Runner) -> None:
    runner.call(_twice_the_same, ranks=2)


def test_a_wrong_share_is_seen(runner: Runner) -> None:
    """The comparison can fail: ranks that run each other's rows attend from the wrong positions."""
    runner.call(_rows_of_the_wrong_rank, ranks=2)


def _initialize(cp_size: int) -> None:
    """Megatron's groups anew: `cp_size` ranks share each pack, the others are data-parallel."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)


def _one_mean(cp_size: int) -> None:
    """One sample of losses 1 to 8 of which the first three are targets, through Megatron's schedule and reduction.

    Of two ranks the first holds losses 1, 2, 7 and 8, the other 3 to 6: a mean of the ranks' means would be 2.25.
    """
    _initialize(cp_size)
    ids = torch.arange(1, 9)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    batch = build_pack([SampleTensors(tokens_L=ids, labels_L=ids, loss_mask_L=mask)], alignment=8)
    share = share_of_rank(batch, cp_size=cp_size, cp_rank=dist.get_rank())
    loss, gradient = mean_loss_and_gradient([share], cp_size=cp_size)
    assert loss == 2.0
    assert gradient == 2.0  # with one rank as with two: their ratio is 1


def _batch() -> PackedBatch:
    """Samples of random ids; some positions are no targets, and some samples are padded."""
    rng = torch.Generator().manual_seed(1)
    samples = [
        SampleTensors(
            tokens_L=torch.randint(VOCAB, (n,), generator=rng),
            labels_L=torch.randint(VOCAB, (n,), generator=rng),
            loss_mask_L=(torch.arange(n) != n // 2).float() if n > 2 else torch.ones(n),
        )
        for n in LENGTHS
    ]
    return build_pack(samples, alignment=ALIGNMENT)


def _losses_and_gradients(
    positions: str, cp_size: int, *, wrong_rank: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted losses in the pack's order, and the gradients of their sum, over `cp_size` ranks; computed in fp64."""
    _initialize(cp_size)
    cp_rank = dist.get_rank() % cp_size
    model, batch = hooked(toy_gpt(positions=positions).double()), _batch()
    model.config.context_parallel_size = cp_size
    share = share_of_rank(batch, cp_size=cp_size, cp_rank=(cp_rank + wrong_rank) % cp_size)
    model.current.share = share
    mine_R = model(share.tokens_R[None], share.position_ids_R[None], None, labels=share.labels_R[None])[0]
    weighted_R = mine_R * share.loss_mask_R
    weighted_R.sum().backward()
    losses_T = torch.zeros(batch.num_rows)
    losses_T[rows_of_cp_rank(batch.cu_seqlens_padded, cp_size, cp_rank)] = weighted_R.detach()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    if cp_size > 1:
        for tensor in (losses_T, *gradients.values()):
            dist.all_reduce(tensor)
    return losses_T, gradients


def _differences(positions: str, **how: Any) -> tuple[float, dict[str, float]]:
    """Of all ranks together from one rank alone: the largest of a loss, and the relative L2 norm of each gradient."""
    losses, gradients = _losses_and_gradients(positions, 1)
    losses_of_all, gradients_of_all = _losses_and_gradients(positions, dist.get_world_size(), **how)
    assert losses.any()
    of_losses = float((losses_of_all - losses).abs().max()) / max(1.0, float(losses.abs().max()))
    of_gradients = {
        name: float((gradients_of_all[name] - gradient).norm() / gradient.norm())
        for name, gradient in gradients.items()
    }
    return of_losses, of_gradients


def _equal_one_rank(positions: str) -> None:
    of_losses, of_gradients = _differences(positions)
    assert of_losses <= tolerances.LOGITS, of_losses
    assert max(of_gradients.values()) <= GRADIENT_REL_L2, of_gradients


def _rows_of_the_wrong_rank() -> None:
    of_losses, of_gradients = _differences("rope", wrong_rank=True)
    assert of_losses > 1e-3
    assert max(of_gradients.values()) > 1e-3


def _twice_the_same() -> None:
    losses, gradients = _losses_and_gradients("rope", 2)
    again, gradients_again = _losses_and_gradients("rope", 2)
    assert torch.equal(losses, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name
