#!/usr/bin/env bash
# Qwen1.5 MoE A2.7B on one node of 8 GPUs: DP 8, of which 4 share the 60 experts. Samples of up to 8k tokens. See
# common.sh.
#
#     DATA=train.jsonl TOKENIZER=DIR CHECKPOINT=DIR bash examples/sft/qwen1.5_moe_1node.sh [--dry-run] [FLAGS]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train qwen1.5_moe_a2.7b \
    --expert-model-parallel-size 4 \
    --recompute-modules moe \
    --seq-length 8192 --max-seqlen-per-dp-cp-rank 8192 --global-batch-size 256 \
    "$@"
