"""What is fuzzed: how a small valid file is made, how a user reads it, how it is damaged.

A room of the library has its targets in a file of its own (`data_targets.py`, `store_targets.py`),
which ends with a list `TARGETS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutations import ANY_FILE, Mutate

MODULES = tuple(sorted(f"fuzz.{path.stem}" for path in Path(__file__).parent.glob("*_targets.py")))


@dataclass(frozen=True)
class Target:
    """One kind of foreign file.

    Attributes:
        name: What it is called.
        make: Writes a valid file, or a folder of files, into an empty folder; gives its path.
        read: Reads it as a user would, and uses what it read.
        mutators: The kinds of damage, of which one is chosen at random; a kind that is listed
            twice is chosen twice as often.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    mutators: tuple[Mutate, ...] = ANY_FILE


def all_targets(modules: Sequence[str] = MODULES) -> dict[str, Target]:
    """Every target of some modules, by name."""
    found = [target for name in modules for target in importlib.import_module(name).TARGETS]
    assert len({target.name for target in found}) == len(found), "two targets have one name"
    return {target.name: target for target in found}
