"""The routes of a fit: five ways from source data to a basis.

Three need sums over the samples only, so that several processes can read the data:

- **folded**, for an affine layer whose input is smaller than its output or is the model's images
  (`acts_on_input` of `ttapca.spectral.basis_choice`): exact, in the space of its input;
- **exact**, for any other layer: one p x p matrix;
- **dct**, for images, and for maps that are too large for a basis of vectors: cosines with exact
  variances, not exactly the principal components (see `ttapca.spectral.cosine`).

Two need the samples themselves, so that one process reads all of them:

- **gram**, for few samples: exact, one samples x samples matrix; the only route that keeps all
  activations in memory;
- **randomised**, for many samples of a long layer: a few passes over the data, until an error bound
  is met.

Another route is a function here, its entry in `SUMMED` or `SAMPLED`, and its name and its cost in
`ttapca.fitting.plan`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.errors import OptionError
from ttapca.fitting.activations import Shapes, SourceActivations
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.plan import RouteName
from ttapca.fitting.source_statistics import MomentsKind, Reading, Side, SourceStatistics
from ttapca.spectral.basis import Basis, Dense
from ttapca.spectral.basis_choice import takes_images
from ttapca.spectral.cosine import Cosine, fit_channel_dct
from ttapca.spectral.cross_validation import Calibration, calibrate, calibrate_fixed, rest_of
from ttapca.spectral.folded import Folded, InputGram, InputPCA, LinearPart, fold, is_affine
from ttapca.spectral.image_statistics import measure, textures
from ttapca.spectral.pca import PCA, Decomposition, SampleGram, hold
from ttapca.spectral.position_sample import HELD_OUT
from ttapca.spectral.randomised import randomised_pca
from ttapca.spectral.resemblance import Resemblance, measured_resemblance


@dataclass(eq=False)
class FitTask:
    """What a route works with.

    Attributes:
        source: Reads the data.
        shapes: Of samples at the layer.
        n_components: As for `ttapca.fit`.
        generator: As for `ttapca.fit`.
        on_demand: Whether the caller named the route.
        groups: The group of each sample; None if the caller names none.
    """

    source: SourceActivations
    shapes: Shapes
    n_components: int | float | None
    generator: torch.Generator | None
    on_demand: bool
    groups: Sequence[Hashable] | None = None
    _begun: Iterator[Tensor] | None = None
    _statistics: SourceStatistics | None = None

    def shape(self, *, at_input: bool = False) -> tuple[int, ...]:
        """Return the shape of a sample at one side of the layer."""
        if not at_input:
            return self.shapes.output
        if self.shapes.input is None:
            raise OptionError(f"The input of `{self.source.path}` is not a single tensor.")
        return self.shapes.input

    @property
    def statistics(self) -> SourceStatistics:
        """What the first pass has collected so far."""
        if self._statistics is None:
            raise RuntimeError("A pass comes first.")
        return self._statistics

    @statistics.setter
    def statistics(self, statistics: SourceStatistics) -> None:
        self._statistics = statistics

    def reading(self, *, at_input: bool, moments: MomentsKind | None = None) -> Reading:
        """Say how a pass over one side of the layer goes."""
        side: Side = "input" if at_input else "output"
        return self.source.reading(side, self.shape(at_input=at_input), moments)

    def read(self, *, at_input: bool = False) -> Iterator[Tensor]:
        """Start a pass over the activations, or continue one that another route gave up."""
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        reading = self.reading(at_input=at_input)
        if self._statistics is not None and self._statistics.reading == reading:
            return self.source.batches(reading, None)  # a later pass shows nothing new
        self._statistics = SourceStatistics.empty(reading, self.source.device)
        return self._first_pass(self._statistics)

    def _first_pass(self, into: SourceStatistics) -> Iterator[Tensor]:
        yield from self.source.batches(into.reading, into)
        into.check_samples()

    def give_back(self, held: list[Tensor], rest: Iterator[Tensor]) -> None:
        """Leave a pass that was begun to the next route."""
        self._begun = itertools.chain(held, rest)

    def calibrated(
        self, calibration: Callable[[Sequence[Hashable] | None], Calibration]
    ) -> Calibration:
        """Calibrate with what resembles each other held out together.

        Args:
            calibration: Calibrates, given the group of each kept sample, or None.
        """
        self.source.stage("calibrating")
        positions = self.statistics.sample.positions()
        groups = self._groups_at(positions)
        found = calibration(groups)
        resemblance = self._resemblance(found, positions, groups)
        if groups is None and resemblance.correlation:
            # A basis that was made with the neighbours of a sample knows the sample, too.
            stretches = torch.arange(len(positions)) * HELD_OUT // len(positions)
            found = calibration(stretches.tolist())
            resemblance = self._resemblance(found, positions, None)
        return dataclasses.replace(found, resemblance=resemblance)

    def _groups_at(self, positions: Tensor) -> list[Hashable] | None:
        """Return the groups of samples by their positions."""
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
        """Return how far the samples of a calibration resemble each other."""
        order = calibration.rows.argsort()
        energies, rows = calibration.energies[order], calibration.rows[order]
        if calibration.rest is not None:
            rest = calibration.rest[order]
            energies = torch.cat([energies, (rest / rest.mean())[:, None]], 1)
        predicted = self.statistics.predicted.at(positions[rows])
        known = predicted >= 0
        classes = predicted[known] if bool(known.any()) else None
        if classes is not None:
            energies, rows = energies[known], rows[known]
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
        shape = self.shape(at_input=basis.at_input)
        center = mean = found.mean.cpu()
        if basis.at_input:
            mean = LinearPart(self.source.layer, shape).output_of(center)
        return FittedFilter(
            layer=self.source.path,
            basis=basis,
            shape=shape,
            output_shape=self.shapes.output,
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
            resemblance_=calibration.resemblance,
        )

    def with_images(self, fitted: FittedFilter, calibration: Calibration) -> FittedFilter:
        """Measure a sample of the layer's input too, where that is the model's input images."""
        shape = self.shapes.input
        if shape is None or not takes_images(shape, self.source.data_shape):
            return fitted
        images = self.statistics.sample.all().view(-1, *shape)
        # Textures stand beside the energies of the same images.
        measured = textures(images[calibration.rows.to(images.device)])
        return dataclasses.replace(
            fitted, outliers_=measure(images), textures_=measured.float().cpu()
        )


@dataclass(frozen=True)
class SummedRoute:
    """A route of one pass.

    Attributes:
        reading: Says what the pass collects.
        find: Makes a filter of what was collected, `task.statistics`.
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
    moments = task.statistics.scatter
    linear = LinearPart(task.source.layer, task.shape(at_input=True))
    pca = fold(moments, linear, task.n_components)
    basis = Folded(*pca.both_ways(linear))

    def without(samples: Tensor, positions: list[int]) -> InputPCA:
        del positions
        found = fold(moments.remove(samples), linear, None)
        moments.update(samples)
        return found

    def basis_of(found: InputPCA) -> Basis:  # `both_ways` changes what it is called on
        return Folded(*found.both_ways(linear))

    calibration = task.calibrated(
        lambda groups: calibrate(task.statistics.sample, pca, without, basis_of, groups)
    )
    return task.with_images(task.fitted("folded", basis, pca, calibration), calibration)


def _exact(task: FitTask) -> FittedFilter:
    moments = task.statistics.scatter
    pca = PCA.from_moments(moments, task.n_components)

    def without(samples: Tensor, positions: list[int]) -> PCA:
        del positions
        found = PCA.from_moments(moments.remove(samples))
        moments.update(samples)
        return found

    calibration = task.calibrated(
        lambda groups: calibrate(task.statistics.sample, pca, without, _dense, groups)
    )
    return task.fitted("exact", Dense(pca.basis.cpu()), pca, calibration)


def _dct(task: FitTask) -> FittedFilter:
    reading, sample = task.statistics.reading, task.statistics.sample
    at_input = reading.at == "input"
    dct = fit_channel_dct(task.statistics.cosines, task.n_components)
    basis = Cosine(dct.rotation, dct.order, reading.shape, at_input=at_input)
    quick, mean = basis.prepared(torch.float32), dct.mean.float()
    variances = dct.explained_variance.float()
    rest = rest_of(sample.all(), mean, quick) if dct.drops_something else None
    calibration = task.calibrated(
        lambda groups: calibrate_fixed(
            sample, mean, variances, quick.project, dct.n_samples, rest, groups
        )
    )
    fitted = task.fitted("dct", basis, dct, calibration)
    return task.with_images(fitted, calibration) if at_input else fitted


SUMMED: dict[RouteName, SummedRoute] = {
    "folded": SummedRoute(_read_folded, _folded),
    "exact": SummedRoute(lambda task: task.reading(at_input=False, moments="scatter"), _exact),
    "dct": SummedRoute(
        lambda task: task.reading(at_input=task.shapes.folds, moments="cosines"), _dct
    ),
}


def by_gram(task: FitTask) -> FittedFilter:
    """Decompose few samples; where they turn out to be many, take the other route."""
    at_input = task.shapes.folds
    size = math.prod(task.shape(at_input=at_input))
    batches = task.read(at_input=at_input)
    held, complete = hold(batches, limited=not task.on_demand)
    if not complete:
        if not at_input:  # at the input, what was read is of no use to the randomised route
            task.give_back(held, batches)
        return randomised(task)
    task.source.stage("decomposing")
    if at_input:
        return _gram_at_input(task, held)
    gram = SampleGram(held, size, device=task.source.device)
    pca, sample = gram.pca(task.n_components), task.statistics.sample
    calibration = task.calibrated(
        lambda groups: calibrate(
            sample, pca, lambda _, out: gram.pca(leave_out=out), _dense, groups
        )
    )
    return task.fitted("gram", Dense(pca.basis.cpu()), pca, calibration)


def _gram_at_input(task: FitTask, held: list[Tensor]) -> FittedFilter:
    gram = InputGram(held, LinearPart(task.source.layer, task.shape(at_input=True)))
    pca, sample = gram.pca(task.n_components), task.statistics.sample
    calibration = task.calibrated(
        lambda groups: calibrate(
            sample,
            pca,
            lambda _, out: gram.pca(leave_out=out),
            lambda found: Folded(found.project, found.rebuild),
            groups,
        )
    )
    basis = Folded(pca.project, pca.rebuild)
    return task.with_images(task.fitted("gram", basis, pca, calibration), calibration)


def randomised(task: FitTask) -> FittedFilter:
    """Read the data several times, until an error bound is met."""
    task.source.require_several_passes()
    pca = randomised_pca(
        task.read,
        math.prod(task.shapes.output),
        task.n_components,
        generator=task.generator,
        device=task.source.device,
    )
    sample, basis = task.statistics.sample, _dense(pca)
    rest = rest_of(sample.all(), pca.mean, basis) if pca.drops_something else None
    calibration = task.calibrated(
        lambda groups: calibrate_fixed(
            sample,
            pca.mean,
            pca.explained_variance,
            lambda centred: centred @ pca.basis,
            pca.n_samples,
            rest,
            groups,
        )
    )
    basis = Dense(pca.basis.cpu())
    return task.fitted("randomised", basis, pca, calibration, error_bound=pca.error_bound.cpu())


def _dense(pca: PCA) -> Basis:
    return Dense(pca.basis)
