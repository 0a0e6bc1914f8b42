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
help of the command line nor the packages for data need it.
"""

# Exports are grouped by purpose, not sorted.
# ruff: noqa: I001
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # the names of `_NAMES`; a test keeps the two lists equal
    from ttapca.adaptation.adapter import Adapter as Adapter, detach as detach
    from ttapca.adaptation.explanation import Cost as Cost, Explanation as Explanation
    from ttapca.adaptation.explanation import explain as explain, measure_cost as measure_cost
    from ttapca.adaptation.guards import CollapseGuard as CollapseGuard
    from ttapca.adaptation.health import Health as Health
    from ttapca.adaptation.named_streams import NamedStream as NamedStream
    from ttapca.adaptation.shift_alarm import ShiftAlarm as ShiftAlarm
    from ttapca.adaptation.surfaces import BatchNormStatistics as BatchNormStatistics
    from ttapca.adaptation.surfaces import SpectralGains as SpectralGains, Surface as Surface
    from ttapca.errors import TtapcaError as TtapcaError, TtapcaWarning as TtapcaWarning
    from ttapca.fitting.attachment import Attachment as Attachment, attach as attach
    from ttapca.fitting.fit import fit as fit
    from ttapca.fitting.fitted_filter import FittedFilter as FittedFilter, load as load
    from ttapca.methods import METHODS as METHODS, Method as Method
    from ttapca.methods import MethodName as MethodName, Mixture as Mixture
    from ttapca.methods.adapt import adapt as adapt
    from ttapca.spectral.filter import SpectralFilter as SpectralFilter
    from ttapca.spectral.pca import PCA as PCA, Moments as Moments

_NAMES = {
    # Fit a filter and keep it
    "fitting.fit": ("fit",),
    "fitting.fitted_filter": ("FittedFilter", "load"),
    "fitting.attachment": ("Attachment", "attach"),
    # Adapt a model
    "methods.adapt": ("adapt",),
    "adaptation.adapter": ("Adapter", "detach"),
    "adaptation.named_streams": ("NamedStream",),
    "adaptation.guards": ("CollapseGuard",),
    # Choose or write a method
    "methods": ("METHODS", "Method", "MethodName", "Mixture"),
    "adaptation.surfaces": ("Surface", "BatchNormStatistics", "SpectralGains"),
    # See what it does and what it costs
    "adaptation.explanation": ("Cost", "measure_cost", "Explanation", "explain"),
    "adaptation.health": ("Health",),
    "adaptation.shift_alarm": ("ShiftAlarm",),
    # The mathematics alone
    "spectral.filter": ("SpectralFilter",),
    "spectral.pca": ("PCA", "Moments"),
    # Errors and warnings
    "errors": ("TtapcaError", "TtapcaWarning"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name or a package of ttapca when it is first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"ttapca.{_HOMES[name]}"), name)
    try:
        return importlib.import_module(f"ttapca.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ttapca.{name}":
            raise
        raise AttributeError(f"module `ttapca` has no attribute `{name}`") from None


def __dir__() -> list[str]:
    """List the public names, for `dir(ttapca)` and completion."""
    return sorted(__all__)
