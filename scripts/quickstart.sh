#!/usr/bin/env bash
# Train a small GPT on packed samples, and padded beside it, on the CPU: see scripts/quickstart.py, which this calls.
#
#     bash scripts/quickstart.sh [--iters N] [--nproc N] [--seq-length N] [--capacity N] [--out DIR]
#
# Makes .venv first (see scripts/setup_venv.sh). After that, about four minutes on two cores. Writes out/quickstart/:
# report.json, report.png, the trained weights in checkpoint/, and a log for each run.
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for argument in "$@"; do
    if [[ "$argument" == "-h" || "$argument" == "--help" ]]; then
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit
    fi
done
python="$("$scripts/setup_venv.sh" hf,plot | tail -n 1)"
exec "$python" "$scripts/quickstart.py" "$@"
