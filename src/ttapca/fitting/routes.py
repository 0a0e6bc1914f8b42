"""The routes of a fit: five ways from source data to a basis.

Three need sums over the samples only, so that several processes can read the data: **folded**,
exact in the space of an affine layer's input; **exact**, by one p x p matrix; **dct**, cosines with
exact variances. Two need the samples themselves: **gram**, for few of them, exact by one samples x
samples matrix; and **randomised**, by a few passes over the data until an error bound is met.

Another route is a function here, its entry in `SUMMED` or `SAMPLED`, and its name and cost in
`ttapca.fitting.plan`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.errors import OptionError
from ttapca.fitting.activations import SourceActivations
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.plan import RouteName
from ttapca.fitting.source_statistics import ClassSums, MomentsKind, PassConfig, SourceStatistics
from ttapca.spectral.basis import Basis, Dense
from ttapca.spectral.basis_choice import takes_images
from ttapca.spectral.cosine import CoefficientMoments, Cosine, fit_channel_dct
from ttapca.spectral.cross_validation import (
    AnyPCA,
    Calibration,
    calibrate,
    calibrate_fixed,
    rest_of,
)
from ttapca.spectral.folded import Folded, FoldedPCA, InputGram, LinearPart, fold, is_affine
from ttapca.spectral.image_statistics import measure, textures
from ttapca.spectral.pca import PCA, Decomposition, Moments, SampleGram, hold
from ttapca.spectral.position_sample import HELD_OUT
from ttapca.spectral.randomised import randomised_pca
from ttapca.spectral.resemblance import Resemblance, measured_resemblance

Groups = Sequence[Hashable] | None
STRETCH = 32  # kept scenes in a row that are taken for those of one place


@dataclass(eq=False)
class FitTask:
    """The input of a route; options as for `ttapca.fit`."""

    source: SourceActivations
    n_components: int | float | None
    generator: torch.Generator | None
    on_demand: bool
    groups: Groups = None
    statistics: SourceStatistics = dataclasses.field(init=False)
    begun: Iterator[Tensor] | None = None  # a pass that another route gave up

    def read(self, *, at_input: bool = False) -> Iterator[Tensor]:
        """Start a pass over the activations, or continue one that another route gave up."""
        begun, self.begun = self.begun, None
        if begun is not None:
            return begun
        config = self.source.pass_config(at_input=at_input)
        if hasattr(self, "statistics") and self.statistics.config == config:
            return self.source.batches(config, None)  # a later pass shows nothing new
        self.statistics = SourceStatistics(config, self.source.device)
        return self._first_pass(self.statistics)

    def _first_pass(self, into: SourceStatistics) -> Iterator[Tensor]:
        yield from self.source.batches(into.config, into)
        into.check_samples()

    def cross_validated(
        self,
        pca: AnyPCA,
        without: Callable[[Tensor, list[int]], AnyPCA],
        basis_of: Callable[[AnyPCA], Basis],
    ) -> Calibration:
        """Calibrate by bases that others of the kept samples make; see `calibrate`."""
        sample = self.statistics.sample
        return self._calibrated(lambda groups: calibrate(sample, pca, without, basis_of, groups))

    def calibrated_as_fixed(
        self, found: Decomposition, variances: Tensor, basis: Basis, mean: Tensor
    ) -> Calibration:
        """Calibrate with one basis, which hardly depends on the kept samples."""
        sample = self.statistics.sample
        rest = rest_of(sample.all(), mean, basis) if found.drops_something else None
        return self._calibrated(
            lambda groups: calibrate_fixed(
                sample, mean, variances, basis.project, found.n_samples, rest, groups
            )
        )

    def _calibrated(self, calibration: Callable[[Groups], Calibration]) -> Calibration:
        """Calibrate, given the group of each kept sample: each group is held out together."""
        self.source.tell("stage", "calibrating")
        positions = self.statistics.sample.positions()
        groups = self._groups_at(positions)
        found = calibration(groups)
        resemblance = self._resemblance(found, positions, groups)
        if groups is None and resemblance.between is not None:
            # A basis that was made with the neighbours of a sample knows the sample, too.
            stretches = torch.arange(len(positions)) * HELD_OUT // len(positions)
            found = calibration(stretches.tolist())
            resemblance = self._resemblance(found, positions, None)
        return dataclasses.replace(found, resemblance=resemblance)

    def class_sums(self) -> ClassSums:
        """Return the sums of classes, or those of stretches of scenes, or of their groups."""
        # Scenes have some of all classes; but those of one drive have much in common.
        if not self.source.of_places:
            return self.statistics.class_sums
        sample, sums = self.statistics.sample, ClassSums()
        positions = sample.positions()
        names = self._groups_at(positions) or (torch.arange(len(positions)) // STRETCH).tolist()
        number = {name: place for place, name in enumerate(dict.fromkeys(names))}
        shares = F.one_hot(torch.tensor([number[name] for name in names])).to(self.source.device)
        sums.add(sample.all(), shares)
        return sums

    def _groups_at(self, positions: Tensor) -> list[Hashable] | None:
        if self.groups is None:
            return None
        if len(self.groups) != self.statistics.samples:
            raise OptionError(
                "`groups` names a group for each sample, in order of the data; found "
                f"{len(self.groups):,} names for {self.statistics.samples:,} samples."
            )
        found = [self.groups[position] for position in positions.tolist()]
        if len(set(found)) < 2:
            raise OptionError(
                "`groups` tells how much groups differ, which takes two of them or more; found "
                f"{found[0]!r} for all samples. Leave `groups` out."
            )
        return found

    def _resemblance(
        self, calibration: Calibration, positions: Tensor, groups: list[Hashable] | None
    ) -> Resemblance:
        order = calibration.rows.argsort()
        energies, rows = calibration.energies[order], calibration.rows[order]
        if calibration.rest is not None:
            rest = calibration.rest[order]
            energies = torch.cat([energies, (rest / rest.mean())[:, None]], 1)
        predicted = self.statistics.predicted.at(positions[rows])
        known = predicted >= 0
        classes = None
        if bool(known.any()):
            classes, energies, rows = predicted[known], energies[known], rows[known]
        of_rows = None if groups is None else [groups[row] for row in rows.tolist()]
        found = measured_resemblance(energies, classes, of_rows)
        stand_for = len(calibration.energies) / len(energies)
        return dataclasses.replace(
            found, independent=found.independent * stand_for, average=found.average * stand_for
        )

    def fitted(
        self,
        route: str,
        basis: Basis,
        found: Decomposition,
        calibration: Calibration,
        error_bound: Tensor | None = None,
    ) -> FittedFilter:
        """Make a filter of what a route found, with the components that calibration resolves."""
        if calibration.variances is not None and len(calibration.variances) < basis.n_components:
            basis = basis.truncated(len(calibration.variances))
            found = found.truncated(len(calibration.variances))
        shape = self.source.shapes.side(at_input=basis.at_input)
        center = mean = found.mean.cpu()
        outliers = measured = None
        if basis.at_input:
            mean = LinearPart(self.source.layer, shape).output_of(center)
            if takes_images(shape, self.source.data_shape):
                images = self.statistics.sample.all().view(-1, *shape)
                outliers = measure(images)
                # Textures stand beside the energies of the same images.
                measured = textures(images[calibration.rows.to(images.device)]).float().cpu()
        return FittedFilter(
            layer=self.source.path,
            basis=basis,
            shape=shape,
            output_shape=self.source.shapes.output,
            mean_=mean,
            center_=center,
            singular_values_=found.singular_values.cpu(),
            n_samples_=found.n_samples,
            total_variance_=found.total_variance,
            route=route,
            error_bound_=error_bound,
            variances_=calibration.variances,
            energies_=calibration.energies,
            rest_=calibration.rest,
            outliers_=outliers,
            textures_=measured,
            resemblance_=calibration.resemblance,
        )


def summed_config(task: FitTask, route: RouteName) -> PassConfig:
    """Say how the one pass of a route goes that needs sums only."""
    layer, shapes = task.source.layer, task.source.shapes
    if route == "folded" and (shapes.input is None or not is_affine(layer)):
        raise OptionError(
            "Folding needs an affine layer (Conv1d, Conv2d, Conv3d or Linear, without hooks); "
            f"`{task.source.path}` is a {type(layer).__name__}. Leave `route` at auto."
        )
    at_input = route == "folded" or (route == "dct" and shapes.folds)
    moments: MomentsKind = "cosines" if route == "dct" else "scatter"
    return task.source.pass_config(at_input=at_input, moments=moments)


def _without(
    moments: Moments, find: Callable[[Moments], AnyPCA]
) -> Callable[[Tensor, list[int]], AnyPCA]:
    def without(samples: Tensor, _positions: list[int]) -> AnyPCA:
        found = find(moments.remove(samples))
        moments.update(samples)
        return found

    return without


def _folded(task: FitTask) -> FittedFilter:
    moments = cast(Moments, task.statistics.moments)
    linear = LinearPart(task.source.layer, task.statistics.config.shape)
    pca = fold(moments, linear, task.n_components)
    basis_of = partial(_basis_of, linear=linear)
    basis = basis_of(pca)  # before others are made of these moments
    without = _without(moments, partial(fold, linear=linear, n_components=None))
    return task.fitted("folded", basis, pca, task.cross_validated(pca, without, basis_of))


def _exact(task: FitTask) -> FittedFilter:
    moments = cast(Moments, task.statistics.moments)
    pca = PCA.from_moments(moments, task.n_components)
    calibration = task.cross_validated(pca, _without(moments, PCA.from_moments), _basis_of)
    return task.fitted("exact", _basis_of(pca).cpu(), pca, calibration)


def _dct(task: FitTask) -> FittedFilter:
    config = task.statistics.config
    dct = fit_channel_dct(cast(CoefficientMoments, task.statistics.moments), task.n_components)
    basis = Cosine(dct.rotation, dct.order, config.shape, at_input=config.at == "input")
    quick, variances = basis.prepared(torch.float32), dct.explained_variance.float()
    calibration = task.calibrated_as_fixed(dct, variances, quick, dct.mean.float())
    return task.fitted("dct", basis, dct, calibration)


# These find a filter in the statistics of one pass.
SUMMED: dict[RouteName, Callable[[FitTask], FittedFilter]] = {
    "folded": _folded,
    "exact": _exact,
    "dct": _dct,
}


def _gram(task: FitTask) -> FittedFilter:
    """Decompose few samples; if there are many, take the other route."""
    shapes, at_input = task.source.shapes, task.source.shapes.folds
    batches = task.read(at_input=at_input)
    held, complete = hold(batches, limited=not task.on_demand)
    if not complete:
        if not at_input:  # at the input, what was read is of no use to the randomised route
            task.begun = itertools.chain(held, batches)
        return _randomised(task)
    task.source.tell("stage", "decomposing")
    gram: SampleGram | InputGram
    if at_input:
        gram = InputGram(held, LinearPart(task.source.layer, shapes.side(at_input=True)))
    else:
        gram = SampleGram(held, math.prod(shapes.output), device=task.source.device)
    pca = gram.pca(task.n_components)
    calibration = task.cross_validated(pca, lambda _, out: gram.pca(leave_out=out), _basis_of)
    return task.fitted("gram", _basis_of(pca).cpu(), pca, calibration)


def _randomised(task: FitTask) -> FittedFilter:
    """Read the data several times, until an error bound is met."""
    task.source.require_several_passes()
    size, device = math.prod(task.source.shapes.output), task.source.device
    pca = randomised_pca(
        task.read, size, task.n_components, generator=task.generator, device=device
    )
    basis = _basis_of(pca)
    calibration = task.calibrated_as_fixed(pca, pca.explained_variance, basis, pca.mean)
    return task.fitted("randomised", basis.cpu(), pca, calibration, pca.error_bound.cpu())


SAMPLED: dict[RouteName, Callable[[FitTask], FittedFilter]] = {
    "gram": _gram,
    "randomised": _randomised,
}


def _basis_of(pca: AnyPCA, linear: LinearPart | None = None) -> Basis:
    match pca:
        case PCA():
            return Dense(pca.basis)
        case FoldedPCA():
            return Folded(pca.project, pca.rebuild)
    return Folded(*pca.both_ways(cast(LinearPart, linear)))
