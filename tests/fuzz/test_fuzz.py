"""Two thousand damaged files, the same on every machine; `scripts/fuzz.py` reads as many as wanted.

Each is either read, or refused by an error of the library that names the file. See CONTRIBUTING.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.runner import BAD, Kind, Runner, all_targets

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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not limited")
def test_every_fault_is_noticed_and_the_file_kept(tmp_path: Path) -> None:
    with Runner(keep=tmp_path, modules=["fuzz.faults"], seconds=1) as faulty:
        for kind in get_args(Kind):
            assert faulty.run(kind, "seed").kind == kind
        assert faulty.run("data", "seed").kind == "data"
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == sorted(f"{kind}-{kind}-seed" for kind in BAD)
    assert "IndexError" in (tmp_path / "raw-raw-seed" / "outcome.txt").read_text()
    assert (tmp_path / "raw-raw-seed" / "file.bin").is_file()


def test_a_seed_decides_the_damage() -> None:
    for mutate, content in ((mutate_bytes, bytes(range(256))), (mutate_json, b'{"a": [1, {}]}')):
        once, again = ([mutate(content, Random(f"x:{n}")) for n in range(50)] for _ in range(2))
        assert once == again
        assert len(set(once)) > 25
