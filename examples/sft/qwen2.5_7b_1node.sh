#!/usr/bin/env bash
# Qwen2.5 7B on one node of 8 GPUs: TP 2, CP 2, DP 2. Samples of up to 32k tokens, in packs of 32k. See common.sh.
#
#     DATA=train.jsonl TOKENIZER=DIR CHECKPOINT=DIR bash examples/sft/qwen2.5_7b_1node.sh [--dry-run] [FLAGS]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train qwen2.5_7b \
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
    --seq-length 32768 --max-seqlen-per-dp-cp-rank 16384 \
    "$@"
