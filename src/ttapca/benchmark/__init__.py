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
from pathlib import Path
from typing import Any

from ttapca.support.lazy import exports_of

# Some need torch or pandas, which take long to import: who only reads results need not wait.
_HOMES = exports_of(Path(__file__))

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module `ttapca.benchmark` has no `{name}`")
