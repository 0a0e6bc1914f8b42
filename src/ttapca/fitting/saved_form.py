"""What a saved filter must hold: the form of its config, and every tensor's shape, type and values.

Checksums tell that a folder was damaged, not that it is right: whoever changes a filter can compute
them anew. So each tensor is compared with the config, with the others and with what its numbers
mean, before a filter is made of them; nothing that is refused here could be noticed at use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttapca._checks import ListOf, Number, OneOf, Record, Rule, Such, Text, Whole, conform
from ttapca.errors import SavedFilterError
from ttapca.spectral.bands import band_edges

# Before the path of a GroupNorm layer, in the file.
GROUP_NORM = "group_norm:"

# Tensors of each route: those that must be there, and those that may be.
_ALL = ("output_mean", "singular_values", "project")
TENSORS_OF = {
    "folded": ((*_ALL, "rebuild", "input_mean"), ("energies",)),
    "exact": (_ALL, ("energies",)),
    "gram": (_ALL, ("energies",)),
    "randomised": (_ALL, ("energies", "error_bound")),
    "dct": ((*_ALL, "order"), ("energies", "input_mean")),
}
STORAGES = ("float64", "float32", "bfloat16", "float16")

# A DCT of this length is a matrix of 128 MB.
LONGEST_DCT = 4096

# Numbers of a filter beyond these overflow or vanish when float32 squares them.
LARGEST = 1e15
SMALLEST_VARIANCE = 1e-36

UNIT = 0.05  # how far from 1 half precision may leave the length of a basis vector
ROUNDING = 1e-4  # of a share or a variance that was computed, relative or absolute

_SHAPE = Such(
    ListOf(Whole(1, 2**31), 1, 8),
    lambda sides: math.prod(sides) <= 2**31,
    f"of at most {2**31:,} numbers",
)
CONFIG = Record(
    {
        "format": Text(),
        "format_version": Whole(),
        "layer": Text(),
        "route": OneOf(tuple(TENSORS_OF)),
        "shape": _SHAPE,
        "output_shape": _SHAPE,
        "n_components": Whole(1, 2**31),
        "storage": OneOf(STORAGES),
        "source": Record(
            {
                "n_samples": Whole(2),
                "total_variance": Number(0),
                "explained_variance": Number(0, 1 + ROUNDING),
                "largest_singular_value": Number(0),
                "smallest_singular_value": Number(0),
            },
            {"agreement": Number(0, 1), "singular_value_error": Number(0)},
        ),
        "versions": Record({"ttapca": Text(), "torch": Text()}, others=Text()),
        "tensors_sha256": Text(64),
        "checksum": Text(64),
    }
)


@dataclass(frozen=True)
class _Form:
    """What one tensor must be; the values are `words`, in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    words: str = "finite"
    holds: Callable[[Tensor], bool] = lambda _: True


def check_filter(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Compare a config and its tensors with what a saved filter is.

    Args:
        config: As it was parsed.
        tensors: By name.
        path: The folder, for messages.

    Raises:
        SavedFilterError: Something is missing, unknown, of another shape or type, not finite, out
            of range or out of order.
    """
    where = f"The config of the filter in `{path}`"
    conform(config, CONFIG, where, SavedFilterError)
    for name, rule in _consistent(config, tensors).items():
        conform(config[name], rule, where, SavedFilterError, at=name)
    _check_names(config["route"], tensors, path)
    for name, form in _forms(config, tensors).items():
        _check_tensor(name, tensors[name], form, path)
    _check_source(config["source"], tensors["singular_values"], where)


def _consistent(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Rule]:
    """Rules of single fields that follow from the others."""
    shape = config["shape"]
    rules: dict[str, Rule] = {"n_components": Whole(1, math.prod(shape))}
    if config["route"] == "dct":
        rules["shape"] = ListOf(Whole(1, LONGEST_DCT), 3, 3)
    if "input_mean" not in tensors:  # then it is the layer's output that is filtered
        rules["output_shape"] = Such(_SHAPE, lambda sides: sides == shape, f"{shape}, as `shape`")
    return rules


def _check_names(route: str, tensors: Mapping[str, Tensor], path: Path) -> None:
    required, optional = TENSORS_OF[route]
    for name in required:
        if name not in tensors:
            raise SavedFilterError(
                f"`{path}` is not a whole saved filter: the tensor `{name}` is missing. Save the "
                "filter again."
            )
    for name in tensors:
        if name not in (*required, *optional) and not name.startswith(GROUP_NORM):
            raise SavedFilterError(
                f"A saved filter of the {route} route has the tensors "
                f"{', '.join((*required, *optional))}; `{path}` has `{name[:100]}` as well. If a "
                "later ttapca wrote it, update; otherwise save the filter again."
            )


def _forms(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, _Form]:
    shape, components = config["shape"], config["n_components"]
    size, storage = math.prod(shape), getattr(torch, config["storage"])
    dct = config["route"] == "dct"
    matrix = _Form((size, components), storage)
    basis = _Form((shape[0],) * 2 if dct else (size, components), storage, _UNIT_WORDS, _has_units)
    forms = {
        "output_mean": _Form((math.prod(config["output_shape"]),), torch.float64),
        "input_mean": _Form((size,), torch.float64),
        "singular_values": _Form((components,), torch.float64, "above 0 and falling", _falls),
        "error_bound": _Form((components,), torch.float64, "not below 0", _not_negative),
        "project": matrix if config["route"] == "folded" else basis,
        "rebuild": matrix,
        "order": _Form(
            (components,),
            torch.int64,
            f"different places from 0 to {size - 1:,}",
            lambda order: _different_places(order, size),
        ),
    }
    found = {name: form for name, form in forms.items() if name in tensors}
    for name, tensor in tensors.items():
        rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
        if name == "energies":
            bands = len(band_edges(components)) - 1
            found[name] = _Form((max(1, rows), bands), torch.float32, "not below 0", _not_negative)
        elif name.startswith(GROUP_NORM):
            found[name] = _Form((2, max(1, columns)), torch.float32, _VARIANCES, _has_variances)
    return found


def _check_tensor(name: str, tensor: Tensor, form: _Form, path: Path) -> None:
    of = f"`{name}` of the filter in `{path}`"
    if tuple(tensor.shape) != form.shape:
        raise SavedFilterError(
            f"{of} must have shape {form.shape}, by its config; found {tuple(tensor.shape)}. Save "
            "the filter again."
        )
    if tensor.dtype != form.dtype:
        raise SavedFilterError(
            f"{of} must be of type {form.dtype}, by its config; found {tensor.dtype}. Save the "
            "filter again."
        )
    # In float16 the largest number would be compared with infinity: so the maximum, as a float.
    if not bool(torch.isfinite(tensor).all()) or float(tensor.abs().max()) > LARGEST:
        raise SavedFilterError(
            f"{of} must hold finite numbers, at most {LARGEST:g}; found NaN, infinity or a larger "
            "one. Fit the filter again."
        )
    if not form.holds(tensor):
        raise SavedFilterError(
            f"The numbers of {of} must be {form.words}; found others. Fit the filter again."
        )


def _check_source(source: Mapping[str, float], values: Tensor, where: str) -> None:
    ends = {
        "largest_singular_value": float(values[0]),
        "smallest_singular_value": float(values[-1]),
    }
    for name, value in ends.items():
        if not math.isclose(source[name], value, rel_tol=ROUNDING):
            raise SavedFilterError(
                f"{where}: `source.{name}` must be that of the tensors, {value:g}; found "
                f"{source[name]:g}. Save the filter again."
            )
    least = float(values[-1]) ** 2 / (source["n_samples"] - 1)
    if least < SMALLEST_VARIANCE:
        raise SavedFilterError(
            f"{where}: a component must have a variance of at least {SMALLEST_VARIANCE:g}; found "
            f"{least:g}. Fit the filter again."
        )
    kept = float(values.square().sum()) / (source["n_samples"] - 1)
    if not kept <= source["total_variance"] * (1 + ROUNDING) < math.inf:
        raise SavedFilterError(
            f"{where}: `source.total_variance` must be at least that of its components, {kept:g}; "
            f"found {source['total_variance']:g}. Save the filter again."
        )


_UNIT_WORDS = "columns of length 1"
_VARIANCES = "a mean and a variance for each channel"


def _has_variances(statistics: Tensor) -> bool:
    # A difference of two rounded numbers: a channel that is constant may be a little below zero.
    return bool((statistics[1] >= -ROUNDING).all())


def _has_units(basis: Tensor) -> bool:
    lengths = basis.float().square().sum(0)
    return bool(((lengths - 1).abs() <= UNIT).all())


def _falls(values: Tensor) -> bool:
    return bool(values[-1] > 0) and bool((values.diff() <= 0).all())


def _not_negative(values: Tensor) -> bool:
    return bool((values >= 0).all())


def _different_places(order: Tensor, size: int) -> bool:
    inside = bool((order >= 0).all()) and bool((order < size).all())
    return inside and len(set(order.tolist())) == len(order)
