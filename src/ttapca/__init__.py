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
    from ttapca.adaptation.adapter import Adapter as Adapter
    from ttapca.adaptation.adapter import detach as detach
    from ttapca.adaptation.costs import Cost as Cost
    from ttapca.adaptation.costs import measure_cost as measure_cost
    from ttapca.adaptation.explanation import Explanation as Explanation
    from ttapca.adaptation.explanation import explain as explain
    from ttapca.adaptation.guards import CollapseGuard as CollapseGuard
    from ttapca.adaptation.named_streams import NamedStream as NamedStream
    from ttapca.adaptation.surfaces import BatchNormStatistics as BatchNormStatistics
    from ttapca.adaptation.surfaces import SpectralGains as SpectralGains
    from ttapca.adaptation.surfaces import Surface as Surface
    from ttapca.errors import TtapcaError as TtapcaError
    from ttapca.errors import TtapcaWarning as TtapcaWarning
    from ttapca.fitting.fitted_filter import Attachment as Attachment
    from ttapca.fitting.fitted_filter import FittedFilter as FittedFilter
    from ttapca.fitting.fitted_filter import attach as attach
    from ttapca.fitting.fitted_filter import load as load
    from ttapca.fitting.routes import fit as fit
    from ttapca.methods import METHODS as METHODS
    from ttapca.methods import Method as Method
    from ttapca.methods import Mixture as Mixture
    from ttapca.methods.adapt import MethodName as MethodName
    from ttapca.methods.adapt import adapt as adapt
    from ttapca.spectral.filter import SpectralFilter as SpectralFilter
    from ttapca.spectral.moments import Moments as Moments
    from ttapca.spectral.pca import PCA as PCA

# The same, for the interpreter: a test keeps the two lists equal.
_HOMES = {
    "Adapter": "adaptation.adapter",
    "NamedStream": "adaptation.named_streams",
    "detach": "adaptation.adapter",
    "Attachment": "fitting.fitted_filter",
    "attach": "fitting.fitted_filter",
    "Cost": "adaptation.costs",
    "measure_cost": "adaptation.costs",
    "TtapcaError": "errors",
    "TtapcaWarning": "errors",
    "Explanation": "adaptation.explanation",
    "explain": "adaptation.explanation",
    "FittedFilter": "fitting.fitted_filter",
    "load": "fitting.fitted_filter",
    "fit": "fitting.routes",
    "CollapseGuard": "adaptation.guards",
    "SpectralFilter": "spectral.filter",
    "PCA": "spectral.pca",
    "Moments": "spectral.moments",
    "METHODS": "methods",
    "Method": "methods",
    "Mixture": "methods",
    "MethodName": "methods.adapt",
    "adapt": "methods.adapt",
    "BatchNormStatistics": "adaptation.surfaces",
    "SpectralGains": "adaptation.surfaces",
    "Surface": "adaptation.surfaces",
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
