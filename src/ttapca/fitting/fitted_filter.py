"""A fitted filter: what `ttapca.fit` returns, what is saved, and what is put on a model."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ttapca import __version__
from ttapca._checks import OneOf, check_option
from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.fitting.store import GROUP_NORM, check_filter, read_folder, write_folder
from ttapca.fitting.store import Storage as Storage
from ttapca.spectral.bands import band_edges
from ttapca.spectral.basis import BASES, Basis
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import GainName, SourceComponents, make_gain
from ttapca.spectral.randomised import singular_value_error

# A filter that changes more source predictions than this is warned of. Variance is a poor guide: at
# the stem of a CIFAR-100 ResNet-20, dropping 0.005 % of it changes 2 % of the predictions, 0.06 %
# changes 14 %, and 0.45 % changes 30 % (2,000, 1,500 and 1,000 components; 500 test images).
LEAST_AGREEMENT = 0.95
MOST_DROPPED = 1e-4


@dataclass(frozen=True, eq=False, repr=False)
class FittedFilter:
    """The PCA of a layer's output on source data, ready to filter with.

    It is a layer, a basis, and what calibrates the gains. Names that end in an underscore were
    learned from the data, as in scikit-learn.

    Attributes:
        layer: Dotted path of the layer.
        basis: From samples to components and back; `basis.at_input` says whether samples are the
            layer's input or its output.
        shape: Of one sample that is filtered.
        output_shape: Of one sample of the layer's output.
        mean_: Mean of the layer's output, flattened, float64, shape (p,).
        center_: Mean of the samples that are filtered, float64, shape (d,).
        singular_values_: Of the centred output, falling, float64, shape (components,).
        n_samples_: Number of samples it was fitted on.
        total_variance_: Variance of the output over all components, kept or not.
        route: How it was computed, for display: `folded`, `exact`, `gram`, `randomised` or `dct`.
        error_bound_: For each component a bound on the relative error of its squared singular
            value, shape (components,); None where the result is exact.
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
    basis: Basis
    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    mean_: Tensor
    center_: Tensor
    singular_values_: Tensor
    n_samples_: int
    total_variance_: float
    route: str
    error_bound_: Tensor | None = None
    energies_: Tensor | None = None
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
        where = f"folded {self.shape} -> {self.output_shape}" if self.basis.at_input else self.shape
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
        if self.singular_value_error_ is None:
            return self.basis.accuracy
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
        """What dropping the variance outside of the basis does to source samples, for people."""
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
            basis=self.basis.truncated(n_components),
            error_bound_=None if self.error_bound_ is None else self.error_bound_[:n_components],
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
        """Build the module that filters, to compute in some precision.

        Args:
            gain: Which gains it has; without, it only drops what lies outside its basis.
            dtype: Precision that it computes in.
            **options: Of the gain, see `ttapca.spectral.gains`.
        """
        source = SourceComponents(
            self.singular_values_.to(dtype),
            self.explained_variance_.sqrt().to(dtype),
            self.energies_,
            self.basis.noise,
        )
        return SpectralFilter(
            self.center_.to(dtype, copy=True),
            self.basis.prepared(dtype),
            shape=self.shape,
            gain=make_gain(gain, source, **options) if gain else None,
        )

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
            "input_mean": self.center_ if self.basis.at_input else None,
            "error_bound": self.error_bound_,
            "energies": self.energies_,
            **{name: _rounded(each, stored) for name, each in self.basis.tensors().items()},
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
    shape, source = tuple(config["shape"]), config["source"]
    at_input = "input_mean" in tensors
    return FittedFilter(
        layer=config["layer"],
        basis=BASES[config["route"]].from_tensors(tensors, shape, at_input=at_input),
        shape=shape,
        output_shape=tuple(config["output_shape"]),
        mean_=tensors["output_mean"],
        center_=tensors["input_mean" if at_input else "output_mean"],
        singular_values_=tensors["singular_values"],
        n_samples_=source["n_samples"],
        total_variance_=source["total_variance"],
        route=config["route"],
        error_bound_=tensors.get("error_bound"),
        energies_=tensors.get("energies"),
        agreement_=source.get("agreement"),
        group_norm_={
            name.removeprefix(GROUP_NORM): tensor
            for name, tensor in tensors.items()
            if name.startswith(GROUP_NORM)
        },
        versions=config["versions"],
    )


def stored_dtype(name: str) -> torch.dtype:
    """The precision of that name, or `OptionError`."""
    check_option("dtype", name, OneOf(get_args(Storage)))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in the precision that it is stored in; whole numbers as they are."""
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.to(dtype)
    if not torch.isfinite(rounded).all():
        raise OptionError(
            f"{str(dtype).removeprefix('torch.')} cannot hold numbers as large as those of this "
            f"filter ({float(tensor.abs().max()):.3g}). Store it as bfloat16, which has their "
            "range."
        )
    return rounded


def _card(fitted: FittedFilter, config: dict[str, Any]) -> str:
    source = config["source"]
    applied = "input of the layer (folded)" if fitted.basis.at_input else "output of the layer"
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
