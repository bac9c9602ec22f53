#!/bin/sh
# Makes .venv with all that the project needs, and the system libraries that headless rendering needs.
# Safe to run again: it does nothing while pyproject.toml, constraints.txt and this file are as they were.
set -eu

CDPATH='' cd -- "$(dirname -- "$0")/.."
venv=.venv
stamp=$venv/.setup-done
gl_packages="libegl1 libgl1 libgl1-mesa-dri"

say() { printf 'setup: %s\n' "$*" >&2; }
is_python_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

# The folder is part of the stamp: commands in .venv/bin name their interpreter by its full path.
wanted=$(pwd; cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

find_python() {
    # A pyenv shim obeys .python-version; it is on the PATH or in pyenv's own folder.
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}/shims/python3.12"; do
        if is_python_312 "$candidate"; then echo "$candidate"; return; fi
    done
    if candidate=$(uv python find --no-project 3.12 2>/dev/null) && is_python_312 "$candidate"; then
        echo "$candidate"; return
    fi
    return 1
}

make_venv() {
    if ! python=$(find_python); then
        say "Python 3.12 was not found (tried \$PYTHON, python3.12, python3, python, pyenv and uv)."
        say "Install it, for instance with 'uv python install 3.12' or 'pyenv install 3.12', or name one: PYTHON=/path/to/python3.12 make setup"
        exit 1
    fi
    say "making $venv with $python"
    if ! "$python" -m venv "$@" "$venv"; then
        rm -rf "$venv"
        say "'$python -m venv' failed; on Debian and Ubuntu it needs: apt-get install python3.12-venv"
        exit 1
    fi
}

if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$(pwd)" ]; then
    say "$venv was made in another folder, making it anew"
    make_venv --clear
elif [ ! -e "$venv/bin/python" ]; then
    make_venv --clear
elif ! is_python_312 "$venv/bin/python"; then
    say "$venv is not a Python 3.12 environment: remove it (rm -rf $venv) and run this again."
    exit 1
fi
rm -f "$stamp"

# uv takes seconds where pip takes minutes; pip is the way out where uv cannot reach a package index.
say "installing the packages of constraints.txt"
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt uv || say "uv cannot be installed"
if ! "$venv/bin/uv" pip install --python "$venv/bin/python" --constraint constraints.txt --editable '.[dev,trl]'; then
    say "uv could not install the packages, trying pip"
    "$venv/bin/python" -m pip install --constraint constraints.txt --editable '.[dev,trl]'
fi

renders() {
    MUJOCO_GL=egl "$venv/bin/python" -c \
        'import mujoco; c = mujoco.GLContext(64, 64); c.make_current(); c.free()' >/dev/null 2>&1
}

# Only EGL, the default, is looked after; who sets another MUJOCO_GL has chosen.
if [ "$(uname -s)" = Linux ] && [ "${MUJOCO_GL:-egl}" = egl ] && ! renders; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "headless rendering does not work yet, installing $gl_packages"
        # shellcheck disable=SC2086  # a list
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $gl_packages; } >&2 || true
    fi
    if ! renders; then
        say "WARNING: headless rendering (EGL) does not work, so neither simulators nor the demo will."
        say "Debian and Ubuntu: apt-get install -y $gl_packages; elsewhere install Mesa's EGL and OpenGL, or a GPU driver's."
        exit 0   # without the stamp: the next run looks again
    fi
fi

printf '%s\n' "$wanted" > "$stamp"
say "done"
