"""Compare methods: what is measured, how, and where the numbers are kept.

    plan = Plan(methods=("bn", "tent"), corruptions=("fog", "frost"), images=1000)
    subject = Subject("mine", network, "cifar10", ImageSource(test_images, textures=frost_folder))
    with Results("results.sqlite") as results:
        run(expand(plan, subject), subject, results)
        results.rows()

A `Plan` says what to compare, a `Subject` on what; `expand` makes units of work out of the two, and
`run` runs those that are not in the file yet. A `Cell` is the full key of one number. Nothing here
prints or reads the environment: a `Watcher` is told how it goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ttapca.bench.cells import Cell, Observation, Outcome, Row, Setting
from ttapca.bench.results import Results

if TYPE_CHECKING:
    from ttapca.bench.grid import Unit, expand
    from ttapca.bench.plan import Plan, presets, read_plan, read_preset
    from ttapca.bench.running import Watcher, run
    from ttapca.bench.sources import ImageSource
    from ttapca.bench.subject import Subject

# What needs torch, which takes seconds to import: who reads results does not wait for it.
_HOMES = {
    "ImageSource": "sources",
    "Plan": "plan",
    "Subject": "subject",
    "Unit": "grid",
    "Watcher": "running",
    "expand": "grid",
    "presets": "plan",
    "read_plan": "plan",
    "read_preset": "plan",
    "run": "running",
}

__all__ = [
    "Cell",
    "ImageSource",
    "Observation",
    "Outcome",
    "Plan",
    "Results",
    "Row",
    "Setting",
    "Subject",
    "Unit",
    "Watcher",
    "expand",
    "presets",
    "read_plan",
    "read_preset",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ttapca.bench.{_HOMES[name]}"), name)
    raise AttributeError(f"module `ttapca.bench` has no `{name}`")
