#!/usr/bin/env bash
# Qwen1.5 MoE A2.7B on an even number of nodes: PP 2 over nodes, and DP, of which 4 within a node share the 60 experts.
# Samples of up to 8k tokens, in packs of 16k. See common.sh.
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST DATA=... TOKENIZER=... bash examples/sft/qwen1.5_moe_nodes.sh   # on each node
#     DATA=... TOKENIZER=... sbatch --nodes 2 examples/sft/slurm.sh examples/sft/qwen1.5_moe_nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train qwen1.5_moe_a2.7b \
    --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --recompute-modules moe \
    --seq-length 8192 --max-seqlen-per-dp-cp-rank 16384 --global-batch-size 512 \
    "$@"
