"""Test-time adaptation with principal component analysis.

    fitted = ttapca.fit(model, layer="conv1", data=train_loader, n_components=2000)
    adapted = ttapca.adapt(model, "wiener", filter=fitted)    # or "ttapca-relu", "tent", "bn", ...
    logits = adapted(batch)                # predicts and adapts
    with adapted.disabled():               # the untouched model, bit for bit
        plain = model(batch)
    adapted.detach()                       # leaves no trace

`fit` decomposes the output of one layer on source data, and `adapt` puts a method on the model.
The other names are the parts that these two are made of. See the README for a tour.

A name is imported when it is first used, because torch takes seconds to import, and neither the
help of the command line nor the packages for data need it. `__init__.pyi` lists them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ttapca.support.lazy import exports_of

__version__ = "0.2.0"

_HOMES = exports_of(Path(__file__))

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name or a package of ttapca when it is first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    try:
        return importlib.import_module(f"ttapca.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ttapca.{name}":
            raise
        raise AttributeError(f"module `ttapca` has no attribute `{name}`") from None


def __dir__() -> list[str]:
    """List the public names, for `dir(ttapca)` and completion."""
    return sorted(__all__)
