"""A loss of your own over pairs of answers, packed: DPO's shape without a reference model.

    python -m megatron_packing.launch examples/train_preferences.py \\
        --packing-dataset preference --data-path pairs.jsonl --max-seqlen-per-dp-cp-rank 16384 ...

A row is {"conversations": [...], "chosen": {...}, "rejected": {...}}. With a reference model, subtract its
log-probabilities of the same pack from both before they are compared. Everything but the loss is pretrain_gpt.py's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt import BATCH_KEYS, get_batch, train_valid_test_datasets_provider
from torch.nn.functional import logsigmoid

from megatron_packing import pair_log_probs

BETA = 0.1


def loss_func(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum of the pairs' losses, and their count: Megatron divides once, by the step's count."""
    chosen, rejected = pair_log_probs(token_losses, loss_mask)
    losses = -logsigmoid(BETA * (chosen - rejected))
    loss, pairs = losses.sum(), torch.tensor(losses.numel(), device=losses.device)
    return loss, pairs.int(), {"preference loss": torch.stack([loss.detach(), pairs])}


def forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One forward pass; Megatron calls it for every microbatch."""
    batch = dict(zip(BATCH_KEYS, get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage")), strict=True))
    loss_mask = batch["loss_mask"]
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"], loss_mask=loss_mask
    )
    return output, partial(loss_func, loss_mask)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
