#!/usr/bin/env bash
# Llama 3.1 8B on samples of up to 64k tokens, on any number of nodes: TP 2 and CP 4 within a node, DP over nodes. A pack
# of 64k lies on 4 x 2 GPUs; every layer is computed again in the backward pass. See common.sh.
#
#     NNODES=4 NODE_RANK=0 MASTER_ADDR=HOST DATA=... TOKENIZER=... bash examples/sft/llama3_8b_nodes.sh   # on each node
#     DATA=... TOKENIZER=... sbatch --nodes 4 examples/sft/slurm.sh examples/sft/llama3_8b_nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train llama3_8b \
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 \
    --seq-length 65536 --max-seqlen-per-dp-cp-rank 16384 --global-batch-size 64 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    "$@"
