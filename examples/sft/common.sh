# How does a recipe of this folder start on one node, on several, and under Slurm? Sourced by all of them.
#
# Set in the environment:
#   DATA             rows to train on: any path that --data-path takes
#   TOKENIZER        folder of a Hugging Face tokenizer
#   OUT              folder for checkpoints; a run goes on from what lies there (default: out/RECIPE)
#   CHECKPOINT       weights to begin with, in Megatron's format (default: random weights)
#   SCRIPT           training script (default: examples/pretrain_gpt.py; or Megatron-LM's own pretrain_gpt.py)
#   PYTHON           interpreter (default: python)
#   DEVICE           default: cuda; cpu tries a recipe out where there is no GPU, with flags for a small model
#   GPUS_PER_NODE    default: 8
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    for several nodes without Slurm, the same on each but for NODE_RANK
#
# --dry-run anywhere prints the command and checks every flag for the whole number of ranks; it needs no GPU and no file.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# The first node of this step (of the job, outside a step) is where ranks meet. Its names need scontrol, which
# containers often lack: slurm.sh calls this outside of them.
find_master() {
    export MASTER_PORT="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 10000))}"
    if [[ -z "${MASTER_ADDR:-}" ]]; then
        local hosts
        hosts="$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")"
        export MASTER_ADDR="${hosts%%$'\n'*}"
    fi
}

# Sets `ranks`, and `start`: the words before the launcher's.
choose_start() {
    local gpus="${GPUS_PER_NODE:-8}" nodes="${NNODES:-1}" node="${NODE_RANK:-0}"
    if [[ -n "${SLURM_STEP_ID:-}" ]]; then
        nodes="$SLURM_STEP_NUM_NODES" node="$SLURM_NODEID"
        find_master
        if ((SLURM_STEP_NUM_TASKS > nodes)); then # a task is a rank
            ranks="$SLURM_STEP_NUM_TASKS"
            start=(env "RANK=$SLURM_PROCID" "LOCAL_RANK=$SLURM_LOCALID" "WORLD_SIZE=$ranks" "$PYTHON")
            return
        fi
    fi
    ranks=$((nodes * gpus))
    start=("$PYTHON" -m torch.distributed.run --nproc-per-node "$gpus")
    if ((nodes == 1)); then
        start+=(--standalone)
    else
        : "${MASTER_ADDR:?the host name of the first of $nodes nodes, the same on each}"
        start+=(--nnodes "$nodes" --node-rank "$node" --master-addr "$MASTER_ADDR")
        start+=(--master-port "${MASTER_PORT:-29500}")
    fi
}

# train MODEL FLAGS...: MODEL is a file of configs/ without .yaml.
train() {
    local model="$1" word dry_run="" flags=() ranks start
    shift
    for word in "$@"; do
        if [[ "$word" == --dry-run ]]; then dry_run=--dry-run; else flags+=("$word"); fi
    done
    if [[ -n "$dry_run" ]]; then
        : "${DATA:=DATA.jsonl}" "${TOKENIZER:=TOKENIZER}"
        [[ "${NNODES:-1}" == 1 ]] || : "${MASTER_ADDR:=MASTER_ADDR}"
    fi
    # Under TP and CP Megatron wants messages to start before the work that they overlap with.
    case " ${flags[*]} " in
        *" --tensor-model-parallel-size "* | *" --context-parallel-size "*) export CUDA_DEVICE_MAX_CONNECTIONS=1 ;;
    esac
    PYTHON="${PYTHON:-python}"
    choose_start
    local out="${OUT:-$root/out/$(basename "$0" .sh)}"
    local launch=(-m megatron_packing.launch --device "${DEVICE:-cuda}")
    local script=(
        --config "$root/configs/$model.yaml" --config "$root/configs/sft.yaml" "${SCRIPT:-$root/examples/pretrain_gpt.py}"
        --data-path "${DATA:?rows to train on}" --tokenizer-model "${TOKENIZER:?folder of a Hugging Face tokenizer}"
        --save "$out" --load "$out" ${CHECKPOINT:+--pretrained-checkpoint "$CHECKPOINT"}
    )
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    if [[ -z "$dry_run" ]]; then
        exec "${start[@]}" "${launch[@]}" "${script[@]}" "${flags[@]}"
    fi
    printf '%q ' ${CUDA_DEVICE_MAX_CONNECTIONS:+"CUDA_DEVICE_MAX_CONNECTIONS=$CUDA_DEVICE_MAX_CONNECTIONS"} \
        "${start[@]}" "${launch[@]}" "${script[@]}" "${flags[@]}"
    echo
    RANK=0 WORLD_SIZE="$ranks" exec "$PYTHON" "${launch[@]}" --dry-run "${script[@]}" "${flags[@]}"
}
