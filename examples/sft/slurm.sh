#!/usr/bin/env bash
#SBATCH --job-name=sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --open-mode=append
# Start a recipe on every node of a Slurm job, by default as one task a node, which starts torchrun:
#
#     DATA=... TOKENIZER=... sbatch --nodes 4 examples/sft/slurm.sh examples/sft/llama3_8b_nodes.sh [FLAGS]
#
# With sbatch --ntasks-per-node 8 each task is a rank of its own. Without sbatch, with --dry-run, it shows what would be
# started for NNODES nodes and checks every flag.
set -euo pipefail
recipe="${1:?a recipe of examples/sft}"
source "$(dirname "$recipe")/common.sh"
command=(srun --kill-on-bad-exit=1 bash "$@")
if [[ " $* " == *" --dry-run "* ]]; then
    printf '%q ' "${command[@]}"
    echo
    exec bash "$@"
fi
find_master
exec "${command[@]}"
