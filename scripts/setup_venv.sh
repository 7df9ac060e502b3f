#!/usr/bin/env bash
# Which Python runs this project's scripts? Finds or makes .venv at the root, installs the project into it with EXTRAS,
# and prints the path of its interpreter as the last line of standard output. Progress goes to standard error.
#
#     scripts/setup_venv.sh [EXTRAS]          EXTRAS: extras of pyproject.toml, e.g. hf,plot (default) or dev
#
# PYTHON=... chooses the interpreter that a new .venv is made with. A second call returns at once while pyproject.toml,
# the extras and the interpreter stay the same; delete .venv to begin anew.
set -euo pipefail

readonly NEEDED="3.12"
readonly NEEDED_GB=9 # .venv itself 7, and wheels while they are unpacked
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/installed-extras"

say() { printf '%s\n' "$*" >&2; }

# An interpreter counts if it runs (a pyenv shim may not), is new enough, and can make environments with pip (Debian
# splits that off).
fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Tested versions first: wheels of a brand-new Python often come later than Python itself.
candidates() {
    [[ -n "${PYTHON:-}" ]] && printf '%s\n' "$PYTHON"
    printf '%s\n' python3.12 python3.13
    local version
    for version in 3.12 3.13 "3.1[4-9]"; do
        # Unquoted on purpose: the pattern must expand.
        # shellcheck disable=SC2086
        compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version*/bin/python" || true
    done
    printf '%s\n' python3 python3.14 python
}

find_python() {
    if [[ -n "${PYTHON:-}" ]] && ! fits "$PYTHON"; then
        say "setup_venv: PYTHON=$PYTHON does not run, is older than $NEEDED, or lacks venv; looking for another."
    fi
    local candidate
    while read -r candidate; do
        if fits "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(candidates)
    return 1
}

make_venv() {
    if [[ -e "$venv" && ! -e "$venv/pyvenv.cfg" ]]; then
        say "setup_venv: $venv exists and is no virtual environment. Move it away."
        exit 1
    fi
    rm -rf "$venv"
    local python
    if python="$(find_python)"; then
        say "setup_venv: making .venv with $("$python" --version) ($(command -v "$python"))"
        "$python" -m venv "$venv"
    elif command -v uv >/dev/null 2>&1; then
        say "setup_venv: making .venv with uv"
        uv venv --quiet --seed --python ">=$NEEDED" "$venv" >&2
    else
        say "setup_venv: no Python $NEEDED or newer (with venv and ensurepip) found: looked for \$PYTHON, python3.12," \
            "python3.13, pyenv's versions, python3 and uv. Install one, or set PYTHON=/path/to/python3.12."
        exit 1
    fi
}

# Whole gigabytes that are free where the folder $1 lies.
free_gb() {
    df -Pk "$1" | awk 'NR == 2 { print int($4 / 1000000) }'
}

# What an installation depends on. The install is editable, so the sources are not part of it.
fingerprint() {
    "$venv/bin/python" - "$root/pyproject.toml" <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes() + sys.version.encode()).hexdigest())
PY
}

# `dev` holds all that the scripts need besides.
is_installed() {
    [[ -f "$stamp" ]] && grep -qxF -e "$1 $2" -e "$1 dev" "$stamp"
}

main() {
    if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        return
    fi
    local extras="${1:-hf,plot}"
    fits "$venv/bin/python" || make_venv
    local print
    print="$(fingerprint)"
    if ! is_installed "$print" "$extras"; then
        say "setup_venv: installing megatron-packing[$extras] into .venv; the first time this takes some minutes"
        "$venv/bin/python" -m pip install --disable-pip-version-check --quiet -e "$root[$extras]" >&2 || {
            say "setup_venv: the installation failed (see above). With torch's CUDA build it takes $NEEDED_GB GB of disk;" \
                "free: $(free_gb "$root") GB for .venv, $(free_gb "${TMPDIR:-/tmp}") GB for what pip unpacks" \
                "(${TMPDIR:-/tmp}, or where TMPDIR says)."
            exit 1
        }
        printf '%s %s\n' "$print" "$extras" >>"$stamp"
    fi
    printf '%s\n' "$venv/bin/python"
}

main "$@"
