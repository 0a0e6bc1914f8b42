"""A fitted filter: what `ttapca.fit` returns, what is saved, and what is put on a model."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ttapca._version import __version__
from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.fitting.saved_form import GROUP_NORM, check_filter
from ttapca.fitting.store import read_folder, write_folder
from ttapca.spectral.bands import band_edges
from ttapca.spectral.filter import DCTFilter, SpectralFilter
from ttapca.spectral.gains import GainName, SourceComponents, make_gain
from ttapca.spectral.half_precision import NarrowBasis
from ttapca.spectral.randomised import singular_value_error

Storage = Literal["float64", "float32", "bfloat16", "float16"]
Route = Literal["folded", "exact", "gram", "randomised", "dct"]

# A filter that changes more source predictions than this is warned of. Variance is a poor guide: at
# the stem of a CIFAR-100 ResNet-20, dropping 0.005 % of it changes 2 % of the predictions, 0.06 %
# changes 14 %, and 0.45 % changes 30 % (2,000, 1,500 and 1,000 components; 500 test images).
LEAST_AGREEMENT = 0.95
MOST_DROPPED = 1e-4


@dataclass(frozen=True, eq=False, repr=False)
class FittedFilter:
    """The PCA of a layer's output on source data, ready to filter with.

    Names that end in an underscore were learned from the data, as in scikit-learn.

    Attributes:
        layer: Dotted path of the layer.
        route: How it was computed: `folded`, `exact`, `gram`, `randomised` or `dct`.
        shape: Of one sample of the tensor that is filtered: the layer's input when folded, its
            output otherwise.
        output_shape: Of one sample of the layer's output.
        mean_: Mean of the layer's output, flattened, float64, shape (p,).
        singular_values_: Of the centred output, falling, float64, shape (components,).
        project: From the tensor that is filtered, centred, to components, shape (d, components);
            for the `dct` route, which has no such matrix, the rotation of the channels alone.
        rebuild: And back, when folded; None where it is the same matrix.
        input_mean_: Mean of the layer's input, when folded, float64, shape (d,); None otherwise.
        n_samples_: Number of samples it was fitted on.
        total_variance_: Variance of the output over all components, kept or not.
        error_bound_: For the randomised route, for each component a bound on the relative error of
            its squared singular value, shape (components,); None where the result is exact.
        order_: For the `dct` route, which coefficient each component is, shape (components,); see
            `ttapca.spectral.cosine`. None for the others.
        energies_: Band energies of some source samples, for closed-form gains, shape (samples,
            bands); see `ttapca.spectral.bands`. None in filters that an older ttapca saved.
        agreement_: Share of predictions on source samples that stay the same when the network is
            run with the filter at gains of 1, which drops what lies outside the basis; see
            `dropped_variance_`. None where nothing is dropped, where the model returns no classes,
            and for a filter that was truncated or saved by an older ttapca.
        group_norm_: Mean and variance of every channel of each GroupNorm layer of the network, by
            its path, shape (2, channels); see `ttapca.support.group_norm`. Empty without any.
        versions: Of what computed it.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        >>> data = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> import ttapca
        >>> ttapca.fit(model, "0", data, n_components=3)
        FittedFilter(layer='0', 3 components, 100 samples, folded (4,) -> (6,))
    """

    layer: str
    route: Route
    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    mean_: Tensor
    singular_values_: Tensor
    project: Tensor
    n_samples_: int
    total_variance_: float
    rebuild: Tensor | None = None
    input_mean_: Tensor | None = None
    error_bound_: Tensor | None = None
    energies_: Tensor | None = None
    order_: Tensor | None = None
    agreement_: float | None = None
    group_norm_: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(
        default_factory=lambda: {
            "ttapca": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )

    def __repr__(self) -> str:
        """One line for a person."""
        where = f"folded {self.shape} -> {self.output_shape}" if self.folded else f"{self.shape}"
        return (
            f"FittedFilter(layer={self.layer!r}, {self.n_components_} components, "
            f"{self.n_samples_} samples, {where})"
        )

    @property
    def folded(self) -> bool:
        """Whether the filter works on the layer's input instead of its output."""
        return self.input_mean_ is not None

    @property
    def center(self) -> Tensor:
        """Mean of the tensor that is filtered, shape (d,)."""
        return self.mean_ if self.input_mean_ is None else self.input_mean_

    @property
    def rebuild_matrix(self) -> Tensor:
        """From components to the tensor that is filtered, centred, shape (d, components)."""
        return self.project if self.rebuild is None else self.rebuild

    @property
    def n_components_(self) -> int:
        """Number of components kept."""
        return len(self.singular_values_)

    @property
    def explained_variance_(self) -> Tensor:
        """Variance along each component, shape (components,)."""
        return self.singular_values_.square() / (self.n_samples_ - 1)

    @property
    def explained_variance_ratio_(self) -> Tensor:
        """Share of the total variance along each component, shape (components,)."""
        return self.explained_variance_ / self.total_variance_

    @property
    def singular_value_error_(self) -> float | None:
        """Bound on the relative error of a singular value in the first half; None where exact."""
        return None if self.error_bound_ is None else singular_value_error(self.error_bound_)

    @property
    def accuracy_(self) -> str:
        """How exact the components are, in words."""
        if self.route == "dct":
            return "cosines, not principal components; their variances are exact"
        if self.singular_value_error_ is None:
            return "exact up to rounding"
        return (
            "singular values of the first half of the components are within "
            f"{100 * self.singular_value_error_:.2g} % of exact ones"
        )

    @property
    def dropped_variance_(self) -> float:
        """Share of the variance outside the basis: learned gains drop it, closed-form ones do not.

        It cannot be brought back by any gain, on source images either.
        """
        return max(0.0, 1.0 - float(self.explained_variance_ratio_.sum()))

    @property
    def drops_too_much(self) -> bool:
        """Whether predictions on source samples change when what lies outside the basis is dropped.

        Where that was not measured, the variance must do: see `MOST_DROPPED`.
        """
        if self.agreement_ is not None:
            return self.agreement_ < LEAST_AGREEMENT
        return self.dropped_variance_ > MOST_DROPPED

    def loss_in_words(self) -> str:
        """What dropping the variance outside of the basis does to source samples, for people.

        Example:
            >>> import ttapca
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
            >>> data = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
            >>> ttapca.fit(model, "0", data).loss_in_words()
            'drops 0.00 % of the source variance'
        """
        words = f"drops {100 * self.dropped_variance_:.2f} % of the source variance"
        if self.agreement_ is None:
            return words
        return f"{words} and changes {100 * (1 - self.agreement_):.1f} % of the source predictions"

    def truncated(self, n_components: int) -> FittedFilter:
        """The same filter with its first components only: no new fit is needed for a lower rank.

        Raises:
            NotEnoughDataError: When it has fewer components than that.
        """
        if n_components < 1 or n_components > self.n_components_:
            raise NotEnoughDataError(
                f"This filter has {self.n_components_} components and can be truncated to 1 or "
                f"more of them; found {n_components}."
            )
        bands = len(band_edges(n_components)) - 1
        return dataclasses.replace(
            self,
            singular_values_=self.singular_values_[:n_components],
            project=self.project if self.order_ is not None else self.project[:, :n_components],
            rebuild=None if self.rebuild is None else self.rebuild[:, :n_components],
            error_bound_=None if self.error_bound_ is None else self.error_bound_[:n_components],
            order_=None if self.order_ is None else self.order_[:n_components],
            # The last band may have lost components; what it varied by stands for what is left.
            energies_=None if self.energies_ is None else self.energies_[:, :bands],
            # It was measured with all components.
            agreement_=self.agreement_ if n_components == self.n_components_ else None,
        )

    def spectral_filter(
        self,
        gain: GainName | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        **options: object,
    ) -> SpectralFilter:
        """Build the module that filters.

        Args:
            gain: Which gains it has; without, it only drops what lies outside its basis.
            dtype: Precision that it computes in.
            **options: Of the gain, see `ttapca.spectral.gains`.
        """
        center = self.center.to(dtype, copy=True)
        gains = make_gain(gain, self.source_components(dtype), **options) if gain else None
        if self.order_ is not None:
            rotation, order = self.project.to(dtype, copy=True), self.order_.clone()
            return DCTFilter(center, rotation, order, shape=self.shape, gain=gains)
        return SpectralFilter(
            center,
            _by_component(self.project, dtype),
            None if self.rebuild is None else _by_component(self.rebuild, dtype),
            shape=self.shape,
            gain=gains,
            narrow=self._narrow(dtype),
        )

    def _narrow(self, dtype: torch.dtype) -> NarrowBasis | None:
        """For single samples, where the filter was stored so and computes in float32."""
        if self.project.dtype != torch.float16 or dtype != torch.float32:
            return None
        return NarrowBasis(self.project, self.rebuild_matrix)

    def source_components(self, dtype: torch.dtype) -> SourceComponents:
        """What gains are made from."""
        return SourceComponents(
            self.singular_values_.to(dtype),
            self.explained_variance_.sqrt().to(dtype),
            self.energies_,
            self._noise_of,
        )

    def _noise_of(self, variance: float) -> Tensor:
        """What noise of this variance in every number that is filtered is in the components."""
        if self.order_ is not None:
            return torch.full_like(self.singular_values_, variance)  # that basis is orthonormal
        return variance * self.project.double().square().sum(0)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: Storage = "float32",
        overwrite: bool = False,
    ) -> None:
        """Write the filter to a folder: `config.json`, `filter.safetensors`, `README.md`.

        Args:
            path: A new or empty folder.
            overwrite: Whether to replace a saved filter that is there already.
            dtype: How the two large matrices are stored. Half precision halves the folder; means
                and singular values are always kept in float64. float16 is the more precise one,
                and on a processor filters single samples in three quarters of the time.

        Raises:
            OptionError: When there is no such precision, or float16 cannot hold the numbers.
            FilterExistsError: When the path holds a saved filter, and it was not to be replaced.
            SavedFilterError: When the path holds something else.
        """
        stored = stored_dtype(dtype)
        tensors = {
            "output_mean": self.mean_,
            "singular_values": self.singular_values_,
            "input_mean": self.input_mean_,
            "error_bound": self.error_bound_,
            "energies": self.energies_,
            "order": self.order_,
            "project": _narrowed(self.project, stored),
            "rebuild": None if self.rebuild is None else _narrowed(self.rebuild, stored),
            **{GROUP_NORM + path: found for path, found in self.group_norm_.items()},
        }
        config: dict[str, Any] = {
            "layer": self.layer,
            "route": self.route,
            "shape": list(self.shape),
            "output_shape": list(self.output_shape),
            "n_components": self.n_components_,
            "storage": dtype,
            "source": {
                "n_samples": self.n_samples_,
                "total_variance": self.total_variance_,
                "explained_variance": float(self.explained_variance_ratio_.sum()),
                "largest_singular_value": float(self.singular_values_[0]),
                "smallest_singular_value": float(self.singular_values_[-1]),
                **({} if self.agreement_ is None else {"agreement": self.agreement_}),
            },
            "versions": self.versions,
        }
        if self.singular_value_error_ is not None:
            config["source"]["singular_value_error"] = self.singular_value_error_
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        write_folder(Path(path), config, present, _card(self, config), overwrite=overwrite)


def load(path: str | os.PathLike[str]) -> FittedFilter:
    """Read a filter that `FittedFilter.save` wrote.

    Args:
        path: The folder.

    Raises:
        SavedFilterError: When the folder is missing, foreign, truncated or altered, or its parts
            do not make a filter: shapes, finiteness, ranges and order are checked.
    """
    config, tensors = read_folder(Path(path))
    check_filter(config, tensors, Path(path))
    return FittedFilter(
        layer=config["layer"],
        route=config["route"],
        shape=tuple(config["shape"]),
        output_shape=tuple(config["output_shape"]),
        mean_=tensors["output_mean"],
        singular_values_=tensors["singular_values"],
        project=tensors["project"],
        n_samples_=config["source"]["n_samples"],
        total_variance_=config["source"]["total_variance"],
        agreement_=config["source"].get("agreement"),
        rebuild=tensors.get("rebuild"),
        input_mean_=tensors.get("input_mean"),
        error_bound_=tensors.get("error_bound"),
        energies_=tensors.get("energies"),
        order_=tensors.get("order"),
        group_norm_={
            name.removeprefix(GROUP_NORM): tensor
            for name, tensor in tensors.items()
            if name.startswith(GROUP_NORM)
        },
        versions=config["versions"],
    )


def stored_dtype(name: str) -> torch.dtype:
    """The precision of that name, or `OptionError`."""
    if name not in get_args(Storage):
        raise OptionError(f"`dtype` is one of {', '.join(get_args(Storage))}; found {name!r}.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _by_component(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in which the numbers of one component lie side by side, shape (d, components).

    A single image is then multiplied a fifth faster; and with one layout for all, a saved filter
    rounds as the fitted one does.
    """
    return matrix.T.to(dtype, copy=True, memory_format=torch.contiguous_format).T


def _narrowed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = matrix.to(dtype)
    if not torch.isfinite(narrow).all():
        raise OptionError(
            f"{str(dtype).removeprefix('torch.')} cannot hold numbers as large as those of this "
            f"filter ({float(matrix.abs().max()):.3g}). Store it as bfloat16, which has their "
            "range."
        )
    return narrow


def _card(fitted: FittedFilter, config: dict[str, Any]) -> str:
    source = config["source"]
    applied = "input of the layer (folded)" if fitted.folded else "output of the layer"
    agreement = ""
    if fitted.agreement_ is not None:
        agreement = f"| source predictions kept at gains of 1 | {100 * fitted.agreement_:.1f} % |\n"
    return f"""\
# Spectral filter for `{fitted.layer}`

Principal components of the output of layer `{fitted.layer}` on source data, for test-time
adaptation with the Python package `ttapca`. It belongs to the network that it was fitted on.

| | |
|---|---|
| components | {fitted.n_components_:,} of {math.prod(fitted.output_shape):,} outputs |
| variance kept | {100 * source["explained_variance"]:.2f} % |
{agreement}| fitted on | {fitted.n_samples_:,} samples |
| shape of a layer's output | {fitted.output_shape} |
| applied to | the {applied}, shape {fitted.shape} |
| computed by | the {fitted.route} route, ttapca {fitted.versions["ttapca"]}, \
torch {fitted.versions["torch"]} |
| accuracy | {fitted.accuracy_} |
| stored as | {config["storage"]} |

```python
import ttapca

fitted = ttapca.load("path/to/this/folder")
adapted = ttapca.adapt(model, "ttapca-relu", filter=fitted)
logits = adapted(batch)
```

`config.json` describes the filter, `filter.safetensors` holds its tensors; both carry checksums.
"""
