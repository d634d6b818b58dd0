# Makes the environment in which scripts/test and scripts/demo run, or finds that it is there. They source this file,
# from the root of the repository.
#
#   VENV    where it is: .venv, if not set
#   PYTHON  what to make it with: python3, if not set
#
# shellcheck shell=sh

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}

give_up() {
    printf '%s\n\nhint: %s\n' "$1" "$2" >&2
    exit 2
}

command -v "$PYTHON" >/dev/null ||
    give_up "$PYTHON was not found." "install Python 3.11 or newer, or say where it is: PYTHON=/path/to/python3.11 $0"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    give_up "Python 3.11 or newer is needed, but $PYTHON is $("$PYTHON" -V 2>&1)." "PYTHON=python3.11 $0"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    give_up "$PYTHON cannot make environments: venv or ensurepip is missing." "on Debian and Ubuntu: apt install python3-venv"

# What is installed is out of date when one of these has changed.
sources=$({ pwd && "$PYTHON" -V && cat pyproject.toml constraints.txt scripts/environment.sh; } | cksum)
if [ "$(cat "$VENV/installed" 2>/dev/null)" != "$sources" ]; then
    printf 'Making the environment %s. This takes some minutes, once.\n' "$VENV"
    if [ -e "$VENV/installed" ]; then
        "$PYTHON" -m venv --clear "$VENV"
    else
        "$PYTHON" -m venv "$VENV" # what is in a folder that this script did not fill stays
    fi
    # The variable, unlike the option, holds for what builds the package too.
    PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$VENV/bin/python" -m pip install --quiet --editable '.[dev,clients,plot,monitor,docs]' ||
        give_up "pip could not install what constraints.txt names." "see its message above; it needs to reach a package index"
    printf '%s\n' "$sources" >"$VENV/installed"
fi
