"""Two thousand damaged files, the same on every machine; `scripts/fuzz.py` reads as many as wanted.

Each is either read, or refused by an error of the library that names the file. See CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.runner import BAD, Runner
from fuzz.targets import all_targets

pytest.importorskip("resource", reason="processor time and memory are limited as Unix does it")

FILES = 2000
NAMES = sorted(all_targets())


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused(name: str, runner: Runner) -> None:
    assert runner.run(name, None).kind == "data"
    outcomes = [runner.run(name, f"{name}:{number}") for number in range(-(-FILES // len(NAMES)))]
    bad = [f"{each.seed}: {each.kind}: {each.headline}" for each in outcomes if each.kind in BAD]
    assert bad == []
