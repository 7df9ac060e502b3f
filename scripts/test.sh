#!/usr/bin/env bash
# Set up what the tests need and run all of them: style, types, then the tests, fast ones first.
#
#     bash scripts/test.sh [PYTEST ARGUMENTS]          e.g. tests/pure, -k isolation
#
# Makes .venv first (see scripts/setup_venv.sh). After that, about eleven minutes on two cores. Needs no GPU, no Transformer
# Engine, and no network beyond the installation. MEGATRON_LM=DIR, a checkout of Megatron-LM at core_r0.19.0, adds the
# tests that run its own pretrain_gpt.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
    if [[ "$argument" == "-h" || "$argument" == "--help" ]]; then
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit
    fi
done
python="$(scripts/setup_venv.sh dev | tail -n 1)"
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m mypy
# Small matrices: more threads than one cost more than they save, and results must not depend on the number of cores.
export OMP_NUM_THREADS=1
exec "$python" -m pytest -rs "$@"
