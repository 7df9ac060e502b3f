#!/usr/bin/env bash
# Check packing on a machine with GPUs, and measure padded against packed: see scripts/gpu_check.py, which this calls.
#
#     bash scripts/gpu_check.sh [--python PYTHON] [--device cuda|cpu] [--nproc N] [--iters N] [--parts PART ...] [--out DIR]
#
# --python names an interpreter that has torch and megatron-core[training], for example a container's; Transformer Engine
# is used if it is there. Without it .venv is made first (see scripts/setup_venv.sh). Some ten minutes on a GPU machine.
# --device cpu is a reduced form for any machine. Writes report.md, report.json and a log for each run to out/gpu_check/.
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="" arguments=()
while (($#)); do
    case "$1" in
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
            exit
            ;;
        --python) python="${2:?--python needs the path of an interpreter}" && shift 2 ;;
        *) arguments+=("$1") && shift ;;
    esac
done
[[ -n "$python" ]] || python="$("$scripts/setup_venv.sh" hf,plot | tail -n 1)"
export PYTHONPATH="$(dirname "$scripts")${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$scripts/gpu_check.py" "${arguments[@]}"
