"""Compare methods by a plan, and keep the numbers in one file.

    plan = Plan("digits", "digits", methods=("bn", "tent"), corruptions=("fog", "frost"))
    rows = Benchmark(plan).run("results.sqlite")

A `Benchmark` loads network and images, fits the filter, and makes the measurements of a `Plan` that
are not in the file yet. If you have network, images and filter already, put them into a `Subject`:
`expand` gives the units of work, and `run` runs them. A `Row` is one measurement: its `Cell` is the
question, its `Outcome` the answer. A `Tuning` chooses the options of a method.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ttapca.benchmark.results import Results
from ttapca.benchmark.rows import Cell, Observation, Outcome, Row, Setting

if TYPE_CHECKING:
    from ttapca.benchmark.comparisons import frame
    from ttapca.benchmark.filters import recommended_layer
    from ttapca.benchmark.plan import Plan, Unit, expand, presets, read_plan, read_preset
    from ttapca.benchmark.running import run
    from ttapca.benchmark.search import Choices, Range, Search, SearchSpace
    from ttapca.benchmark.session import Benchmark
    from ttapca.benchmark.subject import ImageSource, Subject
    from ttapca.benchmark.tuning import Trial, Tuned, Tuning
    from ttapca.networks.source import NetworkSource

# These need torch or pandas, which take long to import: who only reads results need not wait.
_LAZY = {
    "benchmark.comparisons": ("frame",),
    "benchmark.filters": ("recommended_layer",),
    "benchmark.plan": ("Plan", "Unit", "expand", "presets", "read_plan", "read_preset"),
    "benchmark.running": ("run",),
    "benchmark.search": ("Choices", "Range", "Search", "SearchSpace"),
    "benchmark.session": ("Benchmark",),
    "benchmark.subject": ("ImageSource", "Subject"),
    "benchmark.tuning": ("Trial", "Tuned", "Tuning"),
    "networks.source": ("NetworkSource",),
}

__all__ = [
    "Benchmark", "Cell", "Choices", "ImageSource", "NetworkSource", "Observation", "Outcome",
    "Plan", "Range", "Results", "Row", "Search", "SearchSpace", "Setting", "Subject", "Trial",
    "Tuned", "Tuning", "Unit", "expand", "frame", "presets", "read_plan", "read_preset",
    "recommended_layer", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"ttapca.{module}"), name)
    raise AttributeError(f"module `ttapca.benchmark` has no `{name}`")
