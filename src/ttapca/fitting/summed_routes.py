"""Routes that need sums over the samples only, so that parts of the data can be read anywhere.

- **folded**, for an affine layer whose input is smaller than its output or is the model's images
  (`acts_on_input` of `ttapca.spectral.affine`): exact, in the space of its input;
- **exact**, for any other layer: one p x p matrix;
- **dct**, for images, and for maps that are too large for a basis of vectors: cosines with exact
  variances, not exactly the principal components (see `ttapca.spectral.cosine`).

A further route is one `SummedRoute`, its entry in `SUMMED`, its name in `RouteName`, and its cost
in `ttapca.fitting.route_costs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.errors import OptionError
from ttapca.fitting.collected import Reading
from ttapca.fitting.fit_plan import RouteName
from ttapca.fitting.fit_task import FitTask
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.affine import InputPCA, LinearPart, fold, is_affine
from ttapca.spectral.basis import Basis, Cosine, Dense, Folded
from ttapca.spectral.calibration import Calibration, calibrate, energies_of, rest_of
from ttapca.spectral.cosine import fit_channel_dct
from ttapca.spectral.pca import PCA


@dataclass(frozen=True)
class SummedRoute:
    """A route of one pass.

    Attributes:
        reading: Says what the pass collects.
        find: Makes a filter of what was collected, `task.collected`.
    """

    reading: Callable[[FitTask], Reading]
    find: Callable[[FitTask], FittedFilter]


def _read_folded(task: FitTask) -> Reading:
    layer = task.source.layer
    if task.shapes.input is None or not is_affine(layer):
        raise OptionError(
            "Folding needs an affine layer (Conv1d, Conv2d, Conv3d or Linear, without hooks); "
            f"`{task.source.path}` is a {type(layer).__name__}. Leave `route` at auto."
        )
    return task.reading(at_input=True, moments="scatter")


def _folded(task: FitTask) -> FittedFilter:
    moments = task.collected.scatter
    linear = LinearPart(task.source.layer, task.shape(at_input=True))
    pca = fold(moments, linear, task.n_components)
    basis = Folded(*pca.both_ways(linear))
    task.source.stage("calibrating")

    def without(samples: Tensor, positions: list[int]) -> InputPCA:
        del positions
        found = fold(moments.remove(samples), linear, None)
        moments.update(samples)
        return found

    def basis_of(found: InputPCA) -> Basis:  # `both_ways` changes what it is called on
        return Folded(*found.both_ways(linear))

    calibration = calibrate(task.collected.sample, pca, without, basis_of)
    return task.with_images(task.fitted("folded", basis, pca, calibration), calibration)


def _exact(task: FitTask) -> FittedFilter:
    moments = task.collected.scatter
    pca = PCA.from_moments(moments, task.n_components)
    task.source.stage("calibrating")

    def without(samples: Tensor, positions: list[int]) -> PCA:
        del positions
        found = PCA.from_moments(moments.remove(samples))
        moments.update(samples)
        return found

    calibration = calibrate(task.collected.sample, pca, without, lambda found: Dense(found.basis))
    return task.fitted("exact", Dense(pca.basis.cpu()), pca, calibration)


def _dct(task: FitTask) -> FittedFilter:
    reading, samples = task.collected.reading, task.collected.sample.all()
    at_input = reading.at == "input"
    dct = fit_channel_dct(task.collected.cosines, task.n_components)
    task.source.stage("calibrating")
    basis = Cosine(dct.rotation, dct.order, reading.shape, at_input=at_input)
    quick, mean = basis.prepared(torch.float32), dct.mean.float()
    variances = dct.explained_variance.float()
    energies = energies_of(samples, mean, variances, quick.project, dct.n_samples)
    rest = rest_of(samples, mean, quick) if dct.drops_something else None
    calibration = Calibration(energies, torch.arange(len(samples)), rest)
    fitted = task.fitted("dct", basis, dct, calibration)
    return task.with_images(fitted, calibration) if at_input else fitted


SUMMED: dict[RouteName, SummedRoute] = {
    "folded": SummedRoute(_read_folded, _folded),
    "exact": SummedRoute(lambda task: task.reading(at_input=False, moments="scatter"), _exact),
    "dct": SummedRoute(
        lambda task: task.reading(at_input=task.shapes.folds, moments="cosines"), _dct
    ),
}
