#!/usr/bin/env bash
# Build the wheel and the sdist, and use the wheel as a stranger would:
#
#   scripts/check_release.sh     called by `make release`, which installs `build` first
#
# The wheel is made from the sdist, so a file that the sdist lacks is missed here and not by a user. In
# a new environment with the core alone the example of README runs; then, with the extra `all`, five
# commands. Versions are those of constraints.txt. Stops at the first thing that fails; what was built
# is in `dist/` either way.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH # what is tried is the wheel, never the checkout
here=$PWD
venv=$here/.venv-release
python=${PYTHON:-python3}
trap 'echo "The release check has FAILED: see the last lines above." >&2' ERR
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { echo; echo "== $*"; }
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$here/constraints.txt" "$@"
}

step "wheel and sdist"
rm -rf dist "$venv"
.venv/bin/python -m build --outdir dist .
wheel=$(echo "$here"/dist/ttapca-*.whl)
ls -l dist

step "the core alone: README's ten lines"
"$python" -m venv "$venv"
install "$wheel"
"$python" scripts/readme_example.py "Ten lines of use" > "$work/example.py"
cd "$work" # no checkout to import from
where=$("$venv/bin/python" -c 'import ttapca; print(ttapca.__file__)')
[[ $where == "$venv"/* ]] || { echo "ttapca was imported from $where" >&2; false; }
extras=$("$venv/bin/python" -m pip list --format=freeze |
    grep -iE '^(typer|rich|scipy|pillow|pooch|pandas|opencv|matplotlib|scikit)[^=]*==' || true)
[ -z "$extras" ] || { echo "The core needs none of these, and brought them:" $extras >&2; false; }
"$venv/bin/python" example.py

step "with the extra all: the command line"
install "$wheel[all]"
"$venv/bin/ttapca" --version
"$venv/bin/ttapca" methods
"$venv/bin/ttapca" eval digits --data digits
"$venv/bin/ttapca" eval cifar10-resnet20 --data cifar10-500
# Network, images, photographs of frost and filter must all be in the wheel.
"$venv/bin/ttapca" bench cifar10-resnet20 --data cifar10-500 --images 100 --methods wiener \
    --corruptions frost --settings online
step "$(basename "$wheel") and its sdist are in dist/, and work"
