#!/usr/bin/env bash
# Run the quick tests with other versions than those of constraints.txt:
#
#   scripts/test_versions.sh lowest     the oldest version that pyproject.toml allows of each dependency
#   scripts/test_versions.sh newest     the newest version of each dependency
#   scripts/test_versions.sh pythons    the versions of constraints.txt, on each Python found on PATH
#
# What follows goes to pytest: `scripts/test_versions.sh lowest tests/spectral/test_pca.py`. Each environment
# is made anew, as `.venv-lowest`, `.venv-newest` or `.venv-3.11`. torch is that of constraints.txt in
# all of them: another one may bring several gigabytes of CUDA packages.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH # the environment's own packages are tested, not those of the caller
python=${PYTHON:-python3}
which=${1:-}
shift || true

lowest_versions() { # each `name>=version` that users install, as `name==version`; tools as pinned
    "$python" - << 'END'
import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"]]
wanted += [line for name, lines in extras.items() if name != "dev" for line in lines]
found = re.findall(r"^([\w.-]+)==(.+)$", Path("constraints.txt").read_text(), re.MULTILINE)
versions = dict(found)
for line in wanted:
    name, _, version = line.partition(">=")
    if version and name != "torch":
        versions[name] = version
print(*(f"{name}=={version}" for name, version in versions.items()), sep="\n")
END
}

run() { # run PYTHON NAME VERSIONS [PYTEST ARGUMENTS]
    local venv=.venv-$2 versions=$3
    rm -rf "$venv"
    "$1" -m venv "$venv"
    echo "$versions" > "$venv/constraints.txt"
    # Not '.[dev]': the linters have needs of their own (import-linter wants a rich of today).
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$venv/constraints.txt" --editable '.[all]' pytest hypothesis playwright
    "$venv/bin/python" -m pip freeze --exclude-editable > "$venv/installed.txt"
    echo "$2: $("$1" --version), versions in $venv/installed.txt"
    "$venv/bin/python" -m pytest -q -m "not slow" -p no:cacheprovider "${@:4}"
}

case $which in
    # Old packages call what newer ones below them have deprecated; that is none of our faults.
    # One test writes complex numbers with safetensors, which the old one cannot; the library never does.
    lowest) run "$python" lowest "$(lowest_versions)" -W ignore::DeprecationWarning \
        -k "not (test_tensors_that_are_no_weights and tensor2)" "$@" ;;
    newest) run "$python" newest "$(grep '^torch==' constraints.txt)" "$@" ;;
    pythons)
        found=0
        for minor in $(seq 11 30); do
            command -v "python3.$minor" > /dev/null || continue
            found=1
            run "python3.$minor" "3.$minor" "$(cat constraints.txt)" "$@"
        done
        [ $found = 1 ] || { echo "No python3.11 or later on PATH." >&2; exit 1; } ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,9p >&2; exit 2 ;;
esac
