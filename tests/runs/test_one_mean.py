"""L1: the loss of a step is one mean over all its targets, however they are spread over packs and ranks."""

from typing import Any

import pytest
import torch

from megatron_packing.thd import PackedBatch, PackShare, SampleTensors, build_pack, dummy_pack, share_of_rank
from tests.runs.harness import Runner

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
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_packing.mcore.step import CurrentMicrobatch, PackIterator

    class LossIsId(MegatronModule):
        """The loss of a position is its input id times the only weight."""

        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.model_type = ModelType.encoder_or_decoder

        def set_input_tensor(self, tensor: Any) -> None:
            """Pipelines only."""

        def forward(self, share: PackShare) -> torch.Tensor:
            return self.weight * share.tokens_R.float()

    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True, calculate_per_token_loss=True
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), LossIsId(config))

    def forward_step(iterator: PackIterator, module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        share = next(iterator)

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            loss, count = (output * share.loss_mask_R).sum(), share.loss_mask_R.sum().to(torch.int)
            return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}

        return module(share), loss_func

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=PackIterator([share_of_rank(b, cp_size=1, cp_rank=0) for b in batches], CurrentMicrobatch()),
        model=[model],
        num_microbatches=len(batches),
        seq_length=8,
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([loss["lm loss"] for loss in losses]).sum(dim=0)
    torch.distributed.all_reduce(total)
    assert total[0] / total[1] == MEAN
    assert model.module.weight.main_grad.item() == MEAN
