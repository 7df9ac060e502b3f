#!/usr/bin/env bash
# Qwen2.5 7B on an even number of nodes: TP 2, PP 2 with two stages of 7 layers on each rank, DP with the rest. The
# pipeline's halves lie on different nodes: what passes between them is small. See common.sh.
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST DATA=... TOKENIZER=... bash examples/sft/qwen2.5_7b_nodes.sh   # on each node
#     DATA=... TOKENIZER=... sbatch --nodes 2 examples/sft/slurm.sh examples/sft/qwen2.5_7b_nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train qwen2.5_7b \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 7 \
    --seq-length 8192 --max-seqlen-per-dp-cp-rank 16384 --global-batch-size 512 \
    "$@"
