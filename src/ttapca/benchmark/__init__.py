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

from ttapca.benchmark.cells import Cell, Observation, Outcome, Row, Setting
from ttapca.benchmark.results import Results

if TYPE_CHECKING:
    from ttapca.benchmark.comparisons import frame
    from ttapca.benchmark.grid import Unit, expand
    from ttapca.benchmark.image_source import ImageSource
    from ttapca.benchmark.plan import Plan, presets, read_plan, read_preset
    from ttapca.benchmark.running import Watcher, run
    from ttapca.benchmark.subject import Subject

# What needs torch or pandas, which take long to import: reading results does not wait for them.
_HOMES = {
    "ImageSource": "image_source",
    "Plan": "plan",
    "Subject": "subject",
    "Unit": "grid",
    "Watcher": "running",
    "expand": "grid",
    "frame": "comparisons",
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
    "frame",
    "presets",
    "read_plan",
    "read_preset",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ttapca.benchmark.{_HOMES[name]}"), name)
    raise AttributeError(f"module `ttapca.benchmark` has no `{name}`")
