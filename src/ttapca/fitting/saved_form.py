"""What a saved filter must hold: the form of its config, and every tensor's shape, type and values.

Checksums tell that a folder was damaged, not that it is right: whoever changes a filter can compute
them anew. So each tensor is compared with the config, with the others and with what its numbers
mean, before a filter is made of them; nothing that is refused here could be noticed at use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttapca._checks import ListOf, Number, OneOf, Record, Rule, Such, Text, Whole, conform
from ttapca.errors import SavedFilterError
from ttapca.spectral.bands import band_edges
from ttapca.spectral.basis import BASES, TensorForm

# Before the path of a GroupNorm layer, in the file.
GROUP_NORM = "group_norm:"

STORAGES = ("float64", "float32", "bfloat16", "float16")

# Numbers of a filter beyond these overflow or vanish when float32 squares them.
LARGEST = 1e15
SMALLEST_VARIANCE = 1e-36

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
        "route": OneOf(tuple(BASES)),
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
    shape = config["shape"]
    rules: dict[str, Rule] = {
        "shape": BASES[config["route"]].shape_rule(),
        "n_components": Whole(1, math.prod(shape)),
    }
    if "input_mean" not in tensors:  # then it is the layer's output that is filtered
        rules["output_shape"] = Such(_SHAPE, lambda sides: sides == shape, f"{shape}, as `shape`")
    for name, rule in rules.items():
        conform(config[name], rule, where, SavedFilterError, at=name)
    required, optional = _forms(config, tensors)
    for name in required:
        if name not in tensors:
            raise SavedFilterError(
                f"`{path}` is not a whole saved filter: the tensor `{name}` is missing. Save the "
                "filter again."
            )
    known = required | optional
    for name in tensors:
        if name not in known:
            raise SavedFilterError(
                f"A saved filter of the {config['route']} route has the tensors "
                f"{', '.join(known)}; `{path}` has `{name[:100]}` as well. If a later ttapca wrote "
                "it, update; otherwise save the filter again."
            )
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, known[name], getattr(torch, config["storage"]), path)
    _check_source(config["source"], tensors["singular_values"], where)


def _forms(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, TensorForm], dict[str, TensorForm]]:
    """Of the tensors that must be there, and of those that may be."""
    kind, shape, components = BASES[config["route"]], config["shape"], config["n_components"]
    output_size, bands = math.prod(config["output_shape"]), len(band_edges(components)) - 1
    required = {
        "output_mean": TensorForm((output_size,), torch.float64),
        "singular_values": TensorForm((components,), torch.float64, "above 0 and falling", _falls),
        **kind.forms(tuple(shape), components),
    }
    samples = _rows_and_columns(tensors.get("energies"))[0]
    optional = {
        "energies": TensorForm((samples, bands), torch.float32, "not below 0", _not_negative),
        "error_bound": TensorForm((components,), torch.float64, "not below 0", _not_negative),
    }
    if True in kind.sides:
        side = required if kind.sides == (True,) else optional
        side["input_mean"] = TensorForm((math.prod(shape),), torch.float64)
    for name, tensor in tensors.items():
        if name.startswith(GROUP_NORM):
            channels = _rows_and_columns(tensor)[1]
            words = "a mean and a variance for each channel"
            optional[name] = TensorForm((2, channels), torch.float32, words, _has_variances)
    return required, optional


def _rows_and_columns(tensor: Tensor | None) -> tuple[int, int]:
    """Where one of them may be any number, but not zero."""
    rows, columns = tensor.shape if tensor is not None and tensor.dim() == 2 else (1, 1)
    return max(1, rows), max(1, columns)


def _check_tensor(
    name: str, tensor: Tensor, form: TensorForm, storage: torch.dtype, path: Path
) -> None:
    dtype = form.dtype or storage
    of = f"`{name}` of the filter in `{path}`"
    if tuple(tensor.shape) != form.shape:
        raise SavedFilterError(
            f"{of} must have shape {form.shape}, by its config; found {tuple(tensor.shape)}. Save "
            "the filter again."
        )
    if tensor.dtype != dtype:
        raise SavedFilterError(
            f"{of} must be of type {dtype}, by its config; found {tensor.dtype}. Save the "
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


def _has_variances(statistics: Tensor) -> bool:
    # A difference of two rounded numbers: a channel that is constant may be a little below zero.
    return bool((statistics[1] >= -ROUNDING).all())


def _falls(values: Tensor) -> bool:
    return bool(values[-1] > 0) and bool((values.diff() <= 0).all())


def _not_negative(values: Tensor) -> bool:
    return bool((values >= 0).all())
