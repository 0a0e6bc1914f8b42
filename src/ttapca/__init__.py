"""Test-time adaptation with principal component analysis.

    fitted = ttapca.fit(model, layer="conv1", data=train_loader, n_components=2000)
    adapted = ttapca.adapt(model, "ttapca-relu", filter=fitted)
    logits = adapted(batch)                # predicts and adapts
    with adapted.disabled():               # the untouched model, bit for bit
        plain = model(batch)
    adapted.detach()                       # leaves no trace

`fit` decomposes the output of one layer on source data, `adapt` puts a method on the model, and
the rest of this page are the parts they are made of. See the README for a tour.
"""

from ttapca._version import __version__
from ttapca.adapter import Adapter
from ttapca.attach import Attachment, attach
from ttapca.errors import TtapcaError
from ttapca.fitted import FittedFilter
from ttapca.fitting import fit
from ttapca.layer import SpectralFilter
from ttapca.pca import PCA, Moments
from ttapca.recipes import RECIPES, MethodName, adapt
from ttapca.surfaces import BatchNormStatistics, SpectralGains, Surface

load = FittedFilter.load

__all__ = [
    "PCA",
    "RECIPES",
    "Adapter",
    "Attachment",
    "BatchNormStatistics",
    "FittedFilter",
    "MethodName",
    "Moments",
    "SpectralFilter",
    "SpectralGains",
    "Surface",
    "TtapcaError",
    "__version__",
    "adapt",
    "attach",
    "fit",
    "load",
]
