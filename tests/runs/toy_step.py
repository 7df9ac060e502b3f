"""One step of Megatron's own schedule and gradient reduction on a model whose losses can be written down."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_packing.thd import PackShare


def mean_loss_and_gradient(shares: Sequence[PackShare], *, cp_size: int = 1) -> tuple[float, float]:
    """Run `shares` as the microbatches of one step. Every rank of Megatron's groups calls this.

    The loss of a position is its input id times the model's only weight, which is 1: the mean loss over all targets of
    all ranks, and the weight's gradient, must both be the mean of the targets' ids.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_packing.mcore.step import CurrentMicrobatch, PackIterator

    class LossIsId(MegatronModule):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.model_type = ModelType.encoder_or_decoder

        def set_input_tensor(self, tensor: Any) -> None:
            """Pipelines only."""

        def forward(self, share: PackShare) -> torch.Tensor:
            return self.weight * share.tokens_R.float()

    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        context_parallel_size=cp_size,
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
        data_iterator=PackIterator(shares, CurrentMicrobatch()),
        model=[model],
        num_microbatches=len(shares),
        seq_length=8,
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([loss["lm loss"] for loss in losses]).sum(dim=0)
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1]), model.module.weight.main_grad.item()
