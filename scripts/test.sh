#!/usr/bin/env bash
# Set up what the tests need and run all of them: style, types, then the tests, fast ones first.
#
#     bash scripts/test.sh [--no-te] [PYTEST ARGUMENTS]          e.g. tests/pure, -k isolation
#
# Makes .venv first (see scripts/setup_venv.sh). After that, about twelve minutes on two cores. Needs no GPU, and no
# network beyond the installation. The last part runs tests/te with the Python of two versions of Transformer Engine, each in an
# environment of its own (see scripts/setup_te.sh); --no-te leaves it out, PYTEST ARGUMENTS do not reach it.
# MEGATRON_LM=DIR, a checkout of Megatron-LM at core_r0.19.0, adds the tests that run its own pretrain_gpt.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
with_te=yes
arguments=()
for argument in "$@"; do
    case "$argument" in
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit
        ;;
    --no-te) with_te=no ;;
    *) arguments+=("$argument") ;;
    esac
done
python="$(scripts/setup_venv.sh dev | tail -n 1)"
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m mypy
# Small matrices: more threads than one cost more than they save, and results must not depend on the number of cores.
export OMP_NUM_THREADS=1
failed=0
"$python" -m pytest -rs ${arguments[@]+"${arguments[@]}"} || failed=$?
if [[ "$with_te" == no ]]; then
    echo "tests/te left out (--no-te): nothing was run with Transformer Engine."
    exit "$failed"
fi
for version in $("$python" -c "from megatron_packing.mcore.te_versions import TESTED; print(*TESTED)"); do
    te_python="$(scripts/setup_te.sh "$version" "$python" | tail -n 1)" || {
        echo "test.sh: no environment for Transformer Engine $version (see above); --no-te does without." >&2
        exit 1
    }
    echo "tests/te with Transformer Engine $version"
    "$te_python" -m pytest -rs tests/te || failed=$?
done
exit "$failed"
