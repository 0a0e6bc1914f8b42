"""What all routes share: reading the activations, and making a filter of what was found."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.errors import OptionError
from ttapca.fitting.activations import Shapes, SourceActivations
from ttapca.fitting.collected import Collected, MomentsKind, Reading, Side
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.affine import LinearPart, takes_images
from ttapca.spectral.basis import Basis
from ttapca.spectral.calibration import Calibration
from ttapca.spectral.outliers import measure
from ttapca.spectral.pca import Decomposition
from ttapca.spectral.textures import textures


@dataclass(eq=False)
class FitTask:
    """What a route works with; `on_demand` is whether the caller named the route."""

    source: SourceActivations
    shapes: Shapes
    n_components: int | float | None
    generator: torch.Generator | None
    on_demand: bool
    _begun: Iterator[Tensor] | None = None
    _collected: Collected | None = None

    def shape(self, *, at_input: bool = False) -> tuple[int, ...]:
        """Return the shape of a sample at one side of the layer."""
        if not at_input:
            return self.shapes.output
        if self.shapes.input is None:
            raise OptionError(f"The input of `{self.source.path}` is not a single tensor.")
        return self.shapes.input

    @property
    def collected(self) -> Collected:
        """What the first pass has collected so far."""
        if self._collected is None:
            raise RuntimeError("A pass comes first.")
        return self._collected

    @collected.setter
    def collected(self, collected: Collected) -> None:
        self._collected = collected

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
        if self._collected is not None and self._collected.reading == reading:
            return self.source.batches(reading, None)  # a later pass shows nothing new
        self._collected = Collected.nothing(reading, self.source.device)
        return self._first_pass(self._collected)

    def _first_pass(self, into: Collected) -> Iterator[Tensor]:
        yield from self.source.batches(into.reading, into)
        into.check_samples()

    def give_back(self, held: list[Tensor], rest: Iterator[Tensor]) -> None:
        """Leave a pass that was begun to the next route."""
        self._begun = itertools.chain(held, rest)

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
        )

    def with_images(self, fitted: FittedFilter, calibration: Calibration) -> FittedFilter:
        """Measure a sample of the layer's input too, where that is the model's input images."""
        shape = self.shapes.input
        if shape is None or not takes_images(shape, self.source.data_shape):
            return fitted
        images = self.collected.sample.all().view(-1, *shape)
        # Textures stand beside the energies of the same images.
        measured = textures(images[calibration.rows.to(images.device)])
        return dataclasses.replace(
            fitted, outliers_=measure(images), textures_=measured.float().cpu()
        )
