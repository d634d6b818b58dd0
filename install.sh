#!/bin/sh
# Installs deep_ep from this clone, compiles its kernels ahead of time if architectures are named, and checks the machine.
set -eu

usage() {
    cat <<'END'
Usage: ./install.sh [--nvshmem-dir DIR] [--cuda-arch LIST] [--dev]

  --nvshmem-dir DIR  look at an installation of NVSHMEM and report on it; this version of deep_ep needs none
  --cuda-arch LIST   compile kernels ahead of time for these compute capabilities, like 9.0 or '8.0;9.0'
  --dev              an editable installation with everything that the tests need, in the pinned versions
  -h, --help         show this message

It installs into the environment that is active, or, if none is, into .venv in this folder, which it makes.
PYTHON=/path/to/python chooses the interpreter. Exit codes: 0 fine, 1 something failed or `deep-ep check` found a
problem, 2 wrong usage.
END
}

give_up() {
    printf '%s\n\nhint: %s\n' "$1" "$2" >&2
    exit "${3:-2}"
}

nvshmem_dir='' cuda_arch='' dev=''
while [ $# -gt 0 ]; do
    case $1 in
        --nvshmem-dir=*) nvshmem_dir=${1#*=} ;;
        --cuda-arch=*) cuda_arch=${1#*=} ;;
        --nvshmem-dir | --cuda-arch)
            [ $# -gt 1 ] || give_up "$1 needs a value." "see ./install.sh --help"
            [ "$1" = --cuda-arch ] && cuda_arch=$2 || nvshmem_dir=$2
            shift
            ;;
        --dev) dev=1 ;;
        -h | --help) usage && exit 0 ;;
        *) give_up "There is no option $1." "see ./install.sh --help" ;;
    esac
    shift
done
cuda_arch=$(printf '%s' "$cuda_arch" | tr ',' ';')
for arch in $(printf '%s' "$cuda_arch" | tr ';' ' '); do
    case $arch in
        [0-9].[0-9] | [0-9][0-9].[0-9] | [0-9].[0-9][a-z] | [0-9][0-9].[0-9][a-z]) ;;
        *) give_up "--cuda-arch is a list of compute capabilities like 9.0 or '8.0;9.0', got $cuda_arch." "see ./install.sh --help" ;;
    esac
done
[ -z "$nvshmem_dir" ] || [ -d "$nvshmem_dir" ] ||
    give_up "--nvshmem-dir is $nvshmem_dir, which is no folder." "leave it out: this version of deep_ep needs no NVSHMEM"
[ -z "$nvshmem_dir" ] || nvshmem_dir=$(cd "$nvshmem_dir" && pwd)

cd "$(dirname "$0")"
chosen=${PYTHON:-python3}
command -v "$chosen" >/dev/null ||
    give_up "$chosen was not found." "install Python 3.11 or newer, or say where it is: PYTHON=/path/to/python3.11 $0"
"$chosen" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    give_up "Python 3.11 or newer is needed, but $chosen is $("$chosen" -V 2>&1)." "PYTHON=python3.11 $0"
python=$(command -v "$chosen")
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ "$("$python" -c 'import sys; print(sys.prefix == sys.base_prefix)')" = True ]; then
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            give_up "$python cannot make environments: venv or ensurepip is missing." "on Debian and Ubuntu: apt install python3-venv"
        printf 'No environment is active: making .venv.\n'
        "$python" -m venv .venv
    fi
    python=$(pwd)/.venv/bin/python
    activate=". .venv/bin/activate"
fi

printf 'Installing deep_ep into %s.\n' "$("$python" -c 'import sys; print(sys.prefix)')"
export PIP_DISABLE_PIP_VERSION_CHECK=1
if [ -n "$dev" ]; then
    PIP_CONSTRAINT=constraints.txt "$python" -m pip install --quiet --editable '.[dev,clients,plot,monitor,docs]'
else
    "$python" -m pip install --quiet '.[cli,plot,monitor]'
fi || give_up "pip could not install deep_ep." "see its message above; it needs to reach a package index" 1

if [ -n "$nvshmem_dir" ]; then
    export NVSHMEM_DIR="$nvshmem_dir"
    printf 'NVSHMEM: looked at below; this version of deep_ep needs none and installs no other for it.\n'
fi
# Not from here, where python would import what is not installed.
cd "${TMPDIR:-/tmp}"
if [ -n "$cuda_arch" ]; then
    printf 'Compiling kernels for %s; with few cores this takes minutes.\n' "$cuda_arch"
    TORCH_CUDA_ARCH_LIST=$cuda_arch "$python" -m deep_ep warm ||
        give_up "kernels could not be compiled ahead of time." "leave --cuda-arch out; kernels are then compiled when they are first used" 1
fi
printf '\n'
code=0
"$python" -m deep_ep check --ranks 2 || code=$?
printf '\n'
[ $code = 0 ] && printf 'deep_ep is installed.' || printf 'deep_ep is installed, but the check above found a problem.'
printf ' Try: %s%s\n' "${activate:+$activate && }" "deep-ep bench"
exit $code
