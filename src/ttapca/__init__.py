"""Test-time adaptation with principal component analysis.

    fitted = ttapca.fit(model, layer="conv1", data=train_loader, n_components=2000)
    adapted = ttapca.adapt(model, "ttapca-relu", filter=fitted)
    logits = adapted(batch)                # predicts and adapts
    with adapted.disabled():               # the untouched model, bit for bit
        plain = model(batch)
    adapted.detach()                       # leaves no trace

`fit` decomposes the output of one layer on source data, `adapt` puts a method on the model, and
the rest of this page are the parts they are made of. See the README for a tour.

Names are imported when they are first used: the command line and the rooms for data need no torch,
which takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ttapca._version import __version__

if TYPE_CHECKING:
    from ttapca.adapter import Adapter as Adapter
    from ttapca.attachment import Attachment as Attachment
    from ttapca.attachment import attach as attach
    from ttapca.costs import Cost as Cost
    from ttapca.costs import measure_cost as measure_cost
    from ttapca.errors import TtapcaError as TtapcaError
    from ttapca.errors import TtapcaWarning as TtapcaWarning
    from ttapca.explanation import Explanation as Explanation
    from ttapca.explanation import explain as explain
    from ttapca.fitted import FittedFilter as FittedFilter
    from ttapca.fitted import load as load
    from ttapca.fitting import fit as fit
    from ttapca.guards import CollapseGuard as CollapseGuard
    from ttapca.layer import SpectralFilter as SpectralFilter
    from ttapca.pca import PCA as PCA
    from ttapca.pca import Moments as Moments
    from ttapca.recipes import RECIPES as RECIPES
    from ttapca.recipes import MethodName as MethodName
    from ttapca.recipes import adapt as adapt
    from ttapca.surfaces import BatchNormStatistics as BatchNormStatistics
    from ttapca.surfaces import SpectralGains as SpectralGains
    from ttapca.surfaces import Surface as Surface

# The same, for the interpreter: a test keeps the two lists equal.
_HOMES = {
    "Adapter": "adapter",
    "Attachment": "attachment",
    "attach": "attachment",
    "Cost": "costs",
    "measure_cost": "costs",
    "TtapcaError": "errors",
    "TtapcaWarning": "errors",
    "Explanation": "explanation",
    "explain": "explanation",
    "FittedFilter": "fitted",
    "load": "fitted",
    "fit": "fitting",
    "CollapseGuard": "guards",
    "SpectralFilter": "layer",
    "PCA": "pca",
    "Moments": "pca",
    "RECIPES": "recipes",
    "MethodName": "recipes",
    "adapt": "recipes",
    "BatchNormStatistics": "surfaces",
    "SpectralGains": "surfaces",
    "Surface": "surfaces",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name, or a room, when it is first asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"ttapca.{_HOMES[name]}"), name)
    try:
        return importlib.import_module(f"ttapca.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ttapca.{name}":
            raise
        raise AttributeError(f"module `ttapca` has no attribute `{name}`") from None


def __dir__() -> list[str]:
    """What `dir(ttapca)` and completion show."""
    return sorted(__all__)
