"""examples/pretrain_gpt.py with a check that rejects the losses of steps 3 and 4, as Megatron-LM's does a spiky loss.

Megatron then runs the step a second time on the same samples, finds the same loss, and goes on: the check is not fatal.
"""

from typing import Any

import pretrain_gpt as script
import torch
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

REJECTED = (3, 4)
plain_loss_func = script.loss_func


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Any:
    loss, *rest = plain_loss_func(loss_mask, output_tensor)
    machine = get_rerun_state_machine()
    machine.validate_result(
        result=loss,
        rejection_func=lambda loss: machine.current_iteration in REJECTED and torch.distributed.get_rank() == 0,
        message="Spiky loss",
        fatal=False,
    )
    return loss, *rest


if __name__ == "__main__":
    script.loss_func = loss_func
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        script.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        script.forward_step,
    )
