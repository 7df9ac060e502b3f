#!/usr/bin/env bash
# Which Python runs tests/te? Finds or makes .venv-te-VERSION at the root, which sees all of .venv and Transformer
# Engine's Python of that version, and prints the path of its interpreter as the last line of standard output.
#
#     scripts/setup_te.sh VERSION [PYTHON]        VERSION: e.g. 2.20.2; PYTHON: whose packages it sees (default: .venv's)
#
# No compiled part and no GPU: tests/te/standin.py stands in for them. It is an environment of its own because Megatron
# takes Transformer Engine for whole wherever it can be imported. A second call returns at once; delete the folder to
# begin anew.
set -euo pipefail

readonly EINOPS="0.8.2"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

main() {
    if [[ $# -eq 0 || "$1" == "-h" || "$1" == "--help" ]]; then
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        return
    fi
    local version="$1" python="${2:-}"
    [[ -n "$python" ]] || python="$("$root/scripts/setup_venv.sh" dev | tail -n 1)"
    local venv="$root/.venv-te-$version"
    local stamp="$venv/installed" seen
    seen="$("$python" -c 'import sys, sysconfig; print(sysconfig.get_path("purelib"), sys.version)') einops $EINOPS"
    if [[ ! -f "$stamp" || "$(<"$stamp")" != "$seen" ]]; then
        printf 'setup_te: making .venv-te-%s\n' "$version" >&2
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --disable-pip-version-check --quiet --no-deps \
            --only-binary :all: "transformer_engine==$version" "einops==$EINOPS" >&2
        # `addsitedir` and not a bare path: it also follows what .venv itself points at, such as this project.
        printf 'import site; site.addsitedir("%s")\n' "${seen%% *}" \
            >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_main_venv.pth"
        printf '%s\n' "$seen" >"$stamp"
    fi
    printf '%s\n' "$venv/bin/python"
}

main "$@"
