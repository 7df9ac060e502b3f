#!/usr/bin/env bash
# Llama 3.1 8B on one node of 8 GPUs: TP 2, DP 4. Samples of up to 8k tokens, in packs of 16k. See common.sh.
#
#     DATA=train.jsonl TOKENIZER=DIR CHECKPOINT=DIR bash examples/sft/llama3_8b_1node.sh [--dry-run] [FLAGS]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train llama3_8b \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --seq-length 8192 --max-seqlen-per-dp-cp-rank 16384 \
    "$@"
