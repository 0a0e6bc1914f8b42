"""Compare methods: what is measured, how, and where the numbers are kept.

    plan = Plan("digits", "digits", methods=("bn", "tent"), corruptions=("fog", "frost"))
    rows = Benchmark(plan).run("results.sqlite")

A `Plan` says what to compare, and a `Benchmark` runs it: it loads the network and the images, fits
the filter, and runs what is not in the file yet. Whoever has a network, images and a filter in hand
makes a `Subject` of them: `expand` makes units of work from plan and subject, `run` runs them. A
`Cell` is the full key of one result, a `Row` that key with what was measured. Nothing here prints
or reads the environment: a `Reporter` is told how it goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ttapca.benchmark.cells import Cell, Observation, Outcome, Row, Setting
from ttapca.benchmark.results import Results

if TYPE_CHECKING:
    from ttapca.benchmark.comparisons import frame
    from ttapca.benchmark.image_source import ImageSource
    from ttapca.benchmark.plan import Plan, Unit, expand, presets, read_plan, read_preset
    from ttapca.benchmark.running import run
    from ttapca.benchmark.session import Benchmark, NetworkSource, recommended_layer
    from ttapca.benchmark.subject import Subject

# What needs torch or pandas, which take long to import: reading results does not wait for them.
_HOMES = {
    "Benchmark": "session",
    "ImageSource": "image_source",
    "NetworkSource": "session",
    "Plan": "plan",
    "Subject": "subject",
    "Unit": "plan",
    "expand": "plan",
    "frame": "comparisons",
    "presets": "plan",
    "read_plan": "plan",
    "read_preset": "plan",
    "recommended_layer": "session",
    "run": "running",
}

__all__ = [
    "Benchmark",
    "Cell",
    "ImageSource",
    "NetworkSource",
    "Observation",
    "Outcome",
    "Plan",
    "Results",
    "Row",
    "Setting",
    "Subject",
    "Unit",
    "expand",
    "frame",
    "presets",
    "read_plan",
    "read_preset",
    "recommended_layer",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ttapca.benchmark.{_HOMES[name]}"), name)
    raise AttributeError(f"module `ttapca.benchmark` has no `{name}`")
