# Sourced by the other scripts: picks or makes the Python environment and sets $PYTHON.
# The active environment is used if it has torch; otherwise .venv is made in the checkout.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

has_torch() { "$1" -c 'import torch' >/dev/null 2>&1; }

find_python() {
    for name in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python 3.11 or newer on PATH" >&2
    exit 1
}

# setup EXTRAS: installs autosel in editable mode with EXTRAS ("" or "[dev]").
setup() {
    local extras=$1 stamp stamp_file name
    PYTHON=
    for name in python python3; do
        if command -v "$name" >/dev/null && has_torch "$name"; then
            PYTHON=$(command -v "$name")
            say "Using the active environment, which has torch: $PYTHON"
            break
        fi
    done
    if [ -z "$PYTHON" ]; then
        PYTHON=$root/.venv/bin/python
        if [ ! -x "$PYTHON" ]; then
            say "Making a virtual environment in .venv"
            "$(find_python)" -m venv "$root/.venv" || exit 1
        fi
        if ! has_torch "$PYTHON"; then
            say "Installing torch, the largest download"
            if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
                "$PYTHON" -m pip install --disable-pip-version-check 'torch>=2.9' >&2 || exit 1
            else
                # No GPU: the pinned release, so that a CPU build is taken where one is offered.
                "$PYTHON" -m pip install --disable-pip-version-check torch==2.13.0 >&2 || exit 1
            fi
        fi
    fi
    # Installing again costs seconds, so it is skipped while nothing it depends on has changed.
    stamp="$root $(cat pyproject.toml constraints.txt | cksum)"
    stamp_file=$("$PYTHON" -c 'import sys; print(sys.prefix)')/autosel-installed$extras
    if [ "$(cat "$stamp_file" 2>/dev/null)" != "$stamp" ]; then
        say "Installing autosel$extras and what it needs"
        "$PYTHON" -m pip install --disable-pip-version-check -q \
            $([ -e /dev/nvidiactl ] || echo "-c constraints.txt") -e ".$extras" || exit 1
        echo "$stamp" >"$stamp_file" 2>/dev/null || true
    fi
    export PYTHON
}
