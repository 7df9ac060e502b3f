"""Pretrain or fine-tune a GPT with Megatron-Core: a short script in the shape of Megatron-LM's pretrain_gpt.py.

Megatron-Core's wheel ships the training loop but no script to start it; this one fills the gap, for a
laptop or a first run. It knows nothing of packing: started through the launcher, with our flags, it packs.

    python -m megatron_packing.launch examples/pretrain_gpt.py --use-varlen-dataset --data-path FILE.jsonl ...
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# The order in which get_batch returns its fields, as in Megatron-LM's script.
BATCH_KEYS = [
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
]


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None = None) -> list[Any]:
    """The next microbatch, shared over TP. Without packing there is no context parallelism here."""
    args = get_args()
    has_cu_seqlens = args.sft or args.dataloader_inter_document_masking
    if not is_first_or_last_pipeline_stage(vp_stage) and not has_cu_seqlens:
        return [None for _ in BATCH_KEYS]
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        given = next(data_iterator)
        batch = {key: given[key].cuda(non_blocking=True) if key in given else None for key in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=has_cu_seqlens,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return [batch.get(key) for key in BATCH_KEYS]


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum of the targets' losses, and their count: Megatron divides once, by the step's count."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One forward pass; Megatron calls it for every microbatch."""
    batch = dict(zip(BATCH_KEYS, get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage")), strict=True))
    loss_mask = batch["loss_mask"]
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=loss_mask,
        packed_seq_params=packed_inputs(batch),
    )
    return output, partial(loss_func, loss_mask)


def packed_inputs(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Boundaries of rows that Megatron's own datasets packed (--sft, --dataloader-inter-document-masking)."""
    if batch["cu_seqlens"] is None:
        return None
    boundaries, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    update_seqlen_stats_from_cu_seqlens(boundaries)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


def train_valid_test_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Megatron's own datasets, from .bin/.idx files, of conversations (--sft), or made up (--mock-data)."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
    )

    def is_built_on_rank() -> bool:
        has_data = args.sft or is_first_or_last_pipeline_stage(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and has_data

    dataset = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, is_built_on_rank, config).build()


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
