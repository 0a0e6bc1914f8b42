"""A fitted filter: the components of a layer on source data, returned by `ttapca.fit`."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ttapca import __version__
from ttapca.errors import AttachError, NotEnoughDataError, OtherWeightsWarning, warn_caller
from ttapca.fitting.fingerprint import SAME_WEIGHTS, distance, fingerprint
from ttapca.fitting.input_range import InputRange
from ttapca.fitting.saved_format import Storage as Storage
from ttapca.fitting.source_statistics import ClassSums
from ttapca.fitting.store import filter_arguments, read_filter, save_filter
from ttapca.spectral import closed_form as closed_form  # so that its gains are known by name
from ttapca.spectral.basis import Basis
from ttapca.spectral.calibration import band_edges
from ttapca.spectral.closed_form_rule import class_reach
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import Gain, GainName, SourceComponents, make_gain
from ttapca.spectral.pca import MOST_DROPPED
from ttapca.spectral.randomised import singular_value_error
from ttapca.spectral.resemblance import Resemblance
from ttapca.spectral.source_classes import SourceClasses

# Users are warned of a filter that changes more source predictions than this. Variance is a poor
# guide: at the stem of a CIFAR-100 ResNet-20, dropping 0.005 % of it changes 2 % of the
# predictions, 0.06 % changes 14 %, and 0.45 % changes 30 % (2,000, 1,500 and 1,000 components; 500
# test images).
LEAST_AGREEMENT = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class FittedFilter:
    """The components of a layer on source data, principal ones or cosines, ready to filter with.

    Names that end in an underscore were learned from the data, as in scikit-learn; d numbers are
    filtered, and the layer has p outputs. What an older ttapca did not measure is None or empty.

    Attributes:
        layer: Dotted path of the layer.
        basis: From samples to components and back; `basis.at_input` says on which side it acts.
        shape: Shape of one sample that is filtered, at the fit. Cosines take other sizes of images.
        output_shape: Shape of one sample of the layer's output, at the fit.
        mean_: Mean of the layer's output, float64, shape (p,); None for saved cosines at its input.
        center_: Mean of the samples that are filtered, float64, shape (d,).
        singular_values_: Singular values of the centred output, falling, float64, (components,).
        n_samples_: Number of samples it was fitted on.
        total_variance_: Variance of the output over all components, kept or not.
        route: How it was computed: `folded`, `exact`, `gram`, `randomised` or `dct`.
        error_bound_: Bound on the relative error of each squared singular value; None if exact.
        variances_: Variance of each component over held-out samples, float64, shape (components,).
        energies_: Band energies of some source samples, (samples, bands), for gains in closed form.
        rest_: Squared length outside the basis for these samples, (samples,); None if negligible.
        class_reach_: Distance of the farthest class mean from the mean of all, in squared
            deviations within classes, shape (components,).
        outliers_: Size and shares of outlying values in some source images, shape (samples, 3).
        textures_: Textures of the samples of `energies_`, shape (samples, numbers).
        resemblance_: How far the samples of `energies_` resemble each other, as frames of a drive
            do.
        agreement_: Share of source predictions that stay with all gains at 1, which drops the
            variance outside the basis; None if nothing is dropped.
        mirror_agreement_: Share of source predictions that stay when images are mirrored.
        temperature_: Temperature at which the network's probabilities are true of the source, for
            `health.expected_error`; None unless labelled samples were given to `fit`.
        group_norm_: Mean and variance of the channels of GroupNorm layers by path, (2, channels).
        layer_norm_: The same for LayerNorm layers.
        classes_: What classes do to the network; see `ttapca.spectral.source_classes`.
        inputs_: Range, mean and deviation of the network's inputs, by channel of images.
        fingerprint_: Fingerprints of the weights that all of this depends on, by path.
        versions: Versions of the software that computed it.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        >>> data = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> import ttapca
        >>> ttapca.fit(model, "0", data, n_components=3)
        FittedFilter(layer='0', 3 components, 100 samples, folded (4,) -> (6,))
    """

    layer: str
    basis: Basis
    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    mean_: Tensor | None
    center_: Tensor
    singular_values_: Tensor
    n_samples_: int
    total_variance_: float
    route: str
    error_bound_: Tensor | None = None
    variances_: Tensor | None = None
    energies_: Tensor | None = None
    rest_: Tensor | None = None
    class_reach_: Tensor | None = None
    outliers_: Tensor | None = None
    textures_: Tensor | None = None
    resemblance_: Resemblance | None = None
    agreement_: float | None = None
    mirror_agreement_: float | None = None
    temperature_: float | None = None
    group_norm_: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    layer_norm_: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    classes_: SourceClasses | None = None
    inputs_: InputRange | None = None
    fingerprint_: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(
        default_factory=lambda: {
            "ttapca": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )

    def __repr__(self) -> str:
        """Return one line for a person."""
        where = f"folded {self.shape} -> {self.output_shape}" if self.basis.at_input else self.shape
        if not self.basis.principal:
            where = f"cosines of the {'input' if self.basis.at_input else 'output'} {self.shape}"
        return (
            f"FittedFilter(layer={self.layer!r}, {self.n_components_} components, "
            f"{self.n_samples_} samples, {where})"
        )

    @property
    def n_components_(self) -> int:
        """Number of components kept."""
        return len(self.singular_values_)

    @property
    def explained_variance_(self) -> Tensor:
        """Variance along each component, shape (components,)."""
        return self.singular_values_.square() / (self.n_samples_ - 1)

    @property
    def source_variance_(self) -> Tensor:
        """Variance that each component has over new source samples, shape (components,)."""
        return self.explained_variance_ if self.variances_ is None else self.variances_

    @property
    def explained_variance_ratio_(self) -> Tensor:
        """Share of the total variance along each component, shape (components,)."""
        return self.explained_variance_ / self.total_variance_

    @property
    def singular_value_error_(self) -> float | None:
        """Bound on the relative error of a singular value in the first half; None if exact."""
        return None if self.error_bound_ is None else singular_value_error(self.error_bound_)

    @property
    def accuracy_(self) -> str:
        """How exact the components are, in words."""
        error = self.singular_value_error_
        if error is None:
            return self.basis.accuracy
        return f"singular values of the first half are within {100 * error:.2g} % of exact ones"

    @property
    def dropped_variance_(self) -> float:
        """Share of the variance outside the basis, which only learned gains drop."""
        if self.n_components_ == math.prod(self.shape):
            return 0.0  # nothing lies outside; a file of cosines rounds their variances down
        return max(0.0, 1.0 - float(self.explained_variance_ratio_.sum()))

    @property
    def drops_too_much(self) -> bool:
        """Whether components are too few, so that learned gains change source predictions."""
        if self.agreement_ is not None:
            return self.agreement_ < LEAST_AGREEMENT
        return self.dropped_variance_ > MOST_DROPPED

    def space_in_words(self) -> str:
        """Return the number of outputs or inputs of the layer that it has components of."""
        if self.basis.of_input:
            return f"{math.prod(self.shape):,} inputs"
        return f"{math.prod(self.output_shape):,} outputs"

    def loss_in_words(self) -> str:
        """Say what dropping the variance outside the basis does to source samples."""
        words = f"drops {100 * self.dropped_variance_:.2f} % of the source variance"
        if self.agreement_ is None:
            return words
        return f"{words} and changes {100 * (1 - self.agreement_):.1f} % of the source predictions"

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ShapeError` unless samples of this shape can be filtered."""
        self.basis.check_shape(tuple(shape), self.shape)

    def fingerprint_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the fingerprint of the weights of a model that this filter depends on."""
        paths = {*self.group_norm_, *self.layer_norm_}
        if self.classes_ is not None:
            paths |= self.classes_.layers.keys()
        if self.basis.of_weights:  # these are compared with the basis
            return fingerprint(model, paths - {self.layer})
        return fingerprint(model, paths | {self.layer}) or fingerprint(model, {""})

    def check_weights(self, model: nn.Module, *, strict: bool = False) -> None:
        """Warn if a model has other weights than that of the fit; raise if `strict`."""
        if strict and not self.fingerprint_ and not self.basis.of_weights:
            raise AttachError(
                "`strict=True` needs a filter that knows the weights it was fitted on; this one "
                "was saved by an older ttapca, or its network has none. Fit it again, or leave "
                "`strict` out."
            )
        found = fingerprint(model, self.fingerprint_)
        # The layer apart: it would count for little among many that normalise.
        own = {path: each for path, each in self.fingerprint_.items() if path in ("", self.layer)}
        others = {path: each for path, each in self.fingerprint_.items() if path not in own}
        away = max(distance(own, found), distance(others, found))
        if away <= SAME_WEIGHTS:
            return
        fault = (
            f"The filter at `{self.layer}` was fitted on other weights: those of this model differ "
            f"by {100 * away:.0f} % in that layer or in normalisation layers, where rounding makes "
            f"less than {100 * SAME_WEIGHTS:.0f} %."
        )
        if strict:
            raise AttachError(f"{fault} Fit a filter on this model, or leave `strict` out.")
        warn_caller(
            f"{fault} What it knows of source data is not true of this model. Fit a filter on it.",
            OtherWeightsWarning,
        )

    def truncated(self, n_components: int) -> FittedFilter:
        """Return the same filter with its first components only, without a new fit."""
        if n_components < 1 or n_components > self.n_components_:
            raise NotEnoughDataError(
                f"This filter has {self.n_components_} components and can be truncated to 1 or "
                f"more of them; found {n_components}."
            )
        bands, rest = len(band_edges(n_components)) - 1, self._rest_beyond(n_components)
        by_component = ("singular_values_", "error_bound_", "variances_", "class_reach_")
        first: dict[str, Any] = {
            name: each[:n_components]
            for name in by_component
            if (each := getattr(self, name)) is not None
        }
        return dataclasses.replace(
            self,
            **first,
            basis=self.basis.truncated(n_components),
            # The last band may have lost components; its old energies stand for those left.
            energies_=None if self.energies_ is None else self.energies_[:, :bands],
            rest_=rest,
            resemblance_=self.resemblance_
            and self.resemblance_.truncated(bands, rest=rest is not None),
            # It was measured with all components.
            agreement_=self.agreement_ if n_components == self.n_components_ else None,
        )

    def _rest_beyond(self, n_components: int) -> Tensor | None:
        """Return what `rest_` would be with fewer components."""
        if n_components == self.n_components_ or self.energies_ is None:
            return self.rest_
        kept = self.explained_variance_ratio_[:n_components].sum()
        unknown = self.rest_ is None and self.dropped_variance_ > MOST_DROPPED
        if unknown or 1 - float(kept) <= MOST_DROPPED:
            return None
        # Components do not vary together, so that their squared lengths add up on average.
        variances = (self.source_variance_ * self.basis.lengths()).clone()
        variances[:n_components] = 0.0
        edges = band_edges(self.n_components_)
        sums = torch.stack([variances[low:high].sum() for low, high in pairwise(edges)])
        beyond = (self.energies_.double() @ sums).float()
        return beyond if self.rest_ is None else self.rest_ + beyond

    def reach_of(self, classes: ClassSums) -> Tensor | None:
        """Return what `class_reach_` is by the class means of the samples."""
        found = classes.means()
        if found is None:
            return None
        means, shares = found
        # Some at a time: there may be a thousand classes of large images.
        some = torch.split(means, 64)
        away = torch.cat([self.basis.project(each - self.center_) for each in some])
        return class_reach(away, shares, self.source_variance_).float()

    def spectral_filter(
        self,
        gain: GainName | type[Gain] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        **options: object,
    ) -> SpectralFilter:
        """Build the module that filters in this precision; arguments as for `attach`."""
        source = SourceComponents(
            self.singular_values_.to(dtype),
            self.source_variance_.sqrt().to(dtype),
            self.energies_,
            self.basis.noise,
            None if self.class_reach_ is None else self.class_reach_.to(dtype),
            self.rest_,
            self.textures_,
            math.prod(self.shape),
            self.resemblance_,
        )
        made: Gain | None = None
        if isinstance(gain, str):
            made = make_gain(gain, source, **options)
        elif gain is not None:
            made = gain(source, **options)
        return SpectralFilter(
            self.center_.to(dtype, copy=True),
            self.basis.prepared(dtype),
            shape=self.shape,
            gain=made,
        )

    def visible_shift(self, samples: int) -> float:
        """Return the smallest shift that a stream of this number of samples shows for sure.

        It is the factor by which the variance of the components of a band must have changed, for
        the middle one of all bands.

        Example:
            >>> import ttapca
            >>> model = nn.Sequential(nn.Linear(12, 8), nn.ReLU())
            >>> data = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
            >>> many, few = ttapca.fit(model, "0", data), ttapca.fit(model, "0", data[:40])
            >>> many.visible_shift(100) < few.visible_shift(100) < few.visible_shift(1)
            True
        """
        made = self.spectral_filter(closed_form.ClosedFormGain).gain
        gain = cast(closed_form.ClosedFormGain, made)
        usual = gain.normal.batches_of(samples).normal_range(gain.threshold)
        away = usual.reach * len(usual.mean) / usual.precision.diagonal()
        return float(away.sqrt().median().exp())

    def save(
        self, path: str | os.PathLike[str], *, dtype: Storage = "float32", overwrite: bool = False
    ) -> None:
        """Write the filter to a folder: `config.json`, `filter.safetensors`, `README.md`.

        Several processes may save to one path: the last one's filter stays, and readers always find
        a whole one.

        Args:
            path: A new or empty folder.
            dtype: Precision of the large matrices; half precision halves the folder.
            overwrite: Whether to replace a saved filter that is there already.

        Raises:
            OptionError: There is no such precision, or float16 cannot hold the numbers.
            FilterExistsError: The path holds a saved filter that is not to be replaced, or
                something else.
            StorageError: The disk is full, or the folder cannot be written.
        """
        save_filter(self, Path(path), dtype=dtype, overwrite=overwrite)


def load(path: str | os.PathLike[str]) -> FittedFilter:
    """Read a filter that `FittedFilter.save` wrote to a folder.

    Raises:
        SavedFilterError: The folder is missing, foreign, truncated or altered, or makes no filter:
            shapes, finiteness, ranges and order are checked.
    """
    return FittedFilter(**filter_arguments(*read_filter(Path(path))))
