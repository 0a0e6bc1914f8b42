"""A saved filter: a folder with `config.json`, `filter.safetensors` and a `README.md` card.

There is no pickle: what is read is JSON and raw tensors. The folder appears whole or not at all,
and every byte is covered by a checksum, so that a truncated or altered filter is refused.

Checksums show that a folder was damaged, not that it is right: whoever changes a filter can compute
them anew. So each tensor is compared with the config, with the others and with what its numbers
mean, before a filter is made of them. `ttapca.spectral.basis` says which tensors a basis has, and
what they must be.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import safetensors.torch
import torch
from torch import Tensor

from ttapca._checks import (
    ListOf,
    Number,
    OneOf,
    Record,
    Rule,
    Such,
    Text,
    Whole,
    check_option,
    conform,
    shown,
)
from ttapca.errors import FilterExistsError, OptionError, SavedFilterError
from ttapca.fitting.packing import packed, unpacked
from ttapca.spectral.basis import ROUTE_NAMES, Basis, Cosine, TensorForm, basis_kind
from ttapca.spectral.calibration import band_edges
from ttapca.spectral.outliers import floor_of, is_image
from ttapca.spectral.textures import TEXTURES
from ttapca.support.disk import make_folder, recover, staged_folder, writing
from ttapca.support.parsing import parse_json, read_bounded

if TYPE_CHECKING:
    from ttapca.fitting.fitted_filter import FittedFilter

FORMAT = "ttapca.filter"
FORMAT_VERSION = 1
CONFIG = "config.json"
TENSORS = "filter.safetensors"
CARD = "README.md"

Storage = Literal["float64", "float32", "bfloat16", "float16"]
GROUP_NORM = "group_norm:"  # before the path of a GroupNorm layer, in the file
LAYER_NORM = "layer_norm:"
CLASS_SHARES, CLASS_LOADINGS = "class_shares", "class_loadings"
CLASS_MOMENTS = "class_moments:"  # before the path of a normalisation layer

# Numbers beyond these overflow or vanish when float32 squares them.
LARGEST = 1e15
SMALLEST_VARIANCE = 1e-36

ROUNDING = 1e-4  # tolerance for a share or a variance that was computed, relative or absolute

_SHAPE = Such(
    ListOf(Whole(1, 2**31), 1, 8),
    lambda sides: math.prod(sides) <= 2**31,
    f"of at most {2**31:,} numbers",
)
_CONFIG_RULE = Record(
    {
        "format": Text(),
        "format_version": Whole(),
        "layer": Text(),
        "route": OneOf(ROUTE_NAMES),
        "shape": _SHAPE,
        "output_shape": _SHAPE,
        "n_components": Whole(1, 2**31),
        "storage": OneOf(get_args(Storage)),
        "source": Record(
            {
                "n_samples": Whole(2),
                "total_variance": Number(0),
                "explained_variance": Number(0, 1 + ROUNDING),
                "largest_singular_value": Number(0),
                "smallest_singular_value": Number(0),
            },
            {
                "agreement": Number(0, 1),
                "mirror_agreement": Number(0, 1),
                "singular_value_error": Number(0),
            },
        ),
        "versions": Record({"ttapca": Text(), "torch": Text()}, others=Text()),
        "tensors_sha256": Text(64),
        "checksum": Text(64),
    }
)


def save_filter(fitted: FittedFilter, path: Path, *, dtype: Storage, overwrite: bool) -> None:
    """Write a filter to a folder; see `FittedFilter.save`."""
    tensors = filter_tensors(fitted, stored_dtype(dtype))
    config = filter_config(fitted, dtype)
    if "order" in tensors:
        tensors = packed(tensors, math.prod(fitted.shape))
        # What will be read differs from what was packed by rounding.
        again = unpacked(tensors, fitted.shape, fitted.n_components_, "memory")
        config["source"] |= _ends(again["singular_values"])
    write_folder(path, config, tensors, _card(fitted, dtype), overwrite=overwrite)


def filter_config(fitted: FittedFilter, dtype: Storage) -> dict[str, Any]:
    """Return what describes a filter, as JSON has it; `dtype` is that of its matrices."""
    source = {
        "n_samples": fitted.n_samples_,
        "total_variance": fitted.total_variance_,
        "explained_variance": float(fitted.explained_variance_ratio_.sum()),
        **_ends(fitted.singular_values_),
        "agreement": fitted.agreement_,
        "mirror_agreement": fitted.mirror_agreement_,
        "singular_value_error": fitted.singular_value_error_,
    }
    return {
        "layer": fitted.layer,
        "route": fitted.route,
        "shape": list(fitted.shape),
        "output_shape": list(fitted.output_shape),
        "n_components": fitted.n_components_,
        "storage": dtype,
        "source": {name: fact for name, fact in source.items() if fact is not None},
        "versions": fitted.versions,
    }


def _ends(values: Tensor) -> dict[str, float]:
    return {
        "largest_singular_value": float(values[0]),
        "smallest_singular_value": float(values[-1]),
    }


def filter_tensors(fitted: FittedFilter, stored: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a filter by name, its matrices in the given precision."""
    tensors = {
        "output_mean": fitted.mean_,
        "singular_values": fitted.singular_values_,
        "input_mean": fitted.center_ if fitted.basis.at_input else None,
        "error_bound": fitted.error_bound_,
        "energies": fitted.energies_,
        "rest": fitted.rest_,
        "class_reach": fitted.class_reach_,
        "outliers": fitted.outliers_,
        "textures": fitted.textures_,
        **{name: _rounded(each, stored) for name, each in fitted.basis.tensors().items()},
        **{GROUP_NORM + name: found for name, found in fitted.group_norm_.items()},
        **{LAYER_NORM + name: found for name, found in fitted.layer_norm_.items()},
        **_class_tensors(fitted),
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _class_tensors(fitted: FittedFilter) -> dict[str, Tensor]:
    found = fitted.class_moments_
    if found is None:
        return {}
    layers = {CLASS_MOMENTS + path: each for path, each in found.layers.items()}
    return {CLASS_SHARES: found.shares, CLASS_LOADINGS: found.loadings, **layers}


def stored_dtype(name: str) -> torch.dtype:
    """Return the precision of that name, or raise `OptionError`."""
    check_option("dtype", name, OneOf(get_args(Storage)))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in the precision it is stored in; whole numbers stay as they are."""
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


def _card(fitted: FittedFilter, storage: str) -> str:
    side = "input" if fitted.basis.of_input else "output"
    folded = fitted.basis.at_input and not fitted.basis.of_input
    applied = "input of the layer (folded)" if folded else f"{side} of the layer"
    kept = 100 * float(fitted.explained_variance_ratio_.sum())
    agreement = ""
    if fitted.agreement_ is not None:
        agreement = f"| source predictions kept at gains of 1 | {100 * fitted.agreement_:.1f} % |\n"
    return f"""\
# Spectral filter for `{fitted.layer}`

{fitted.basis.kind} of the {side} of layer `{fitted.layer}` on source data, for test-time
adaptation with the Python package `ttapca`. It belongs to the network that it was fitted on.

| | |
|---|---|
| components | {fitted.n_components_:,} of {fitted.space_in_words()} |
| variance kept | {kept:.2f} % |
{agreement}| fitted on | {fitted.n_samples_:,} samples |
| shape of a layer's output | {fitted.output_shape} |
| applied to | the {applied}, shape {fitted.shape} |
| computed by | the {fitted.route} route, ttapca {fitted.versions["ttapca"]}, \
torch {fitted.versions["torch"]} |
| accuracy | {fitted.accuracy_} |
| stored as | {storage} |

```python
import ttapca

fitted = ttapca.load("path/to/this/folder")
adapted = ttapca.adapt(model, "wiener", filter=fitted)
logits = adapted(batch)
```

`config.json` describes the filter, `filter.safetensors` holds its tensors; both carry checksums.
"""


def write_folder(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    card: str,
    *,
    overwrite: bool = True,
) -> None:
    """Write a folder, and add format and checksums to its config.

    Raises:
        FilterExistsError: There is a filter that is not to be replaced, or something else.
        StorageError: The disk is full or the folder cannot be written.
    """
    check_target(path, overwrite=overwrite)
    payload = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()})
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **config,
        "tensors_sha256": hashlib.sha256(payload).hexdigest(),
    }
    config["checksum"] = _checksum(config)
    make_folder(path.parent)
    with staged_folder(path, keep_old=False) as folder:
        (folder / TENSORS).write_bytes(payload)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise unless a filter may be saved to this folder, before the work on it begins.

    Raises:
        FilterExistsError: Something is there.
        StorageError: Nobody may write there.
    """
    if (path / CONFIG).is_file():
        if not overwrite:
            raise FilterExistsError(
                f"`{path}` holds a saved filter already, which would be lost. Choose another path, "
                "or replace it with `overwrite=True`."
            )
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FilterExistsError(
            f"A filter is saved to a new or empty folder, or over another saved filter; `{path}` "
            "holds something else. Choose another path."
        )
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(above, os.W_OK):
        with writing(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _checksum(config: dict[str, Any]) -> str:
    content = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_filter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and the tensors of a saved filter, and check that they make a filter.

    Raises:
        SavedFilterError: The folder is missing, foreign, truncated or altered, or something in it
            is missing, unknown, of another shape or type, not finite, out of range or out of order.
    """
    config, tensors = read_folder(path)
    where = f"The config of the filter in `{path}`"
    conform(config, _CONFIG_RULE, where, SavedFilterError)
    if config["route"] in Cosine.routes:
        tensors = unpacked(tensors, config["shape"], config["n_components"], f"`{path}`")
    _check_filter(config, tensors, path)
    return config, tensors


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_folder` wrote, and compare it with its checksums.

    A folder that a killed process left beside its place is put back first.

    Raises:
        SavedFilterError: The folder is missing, foreign, truncated or altered.
    """
    with contextlib.suppress(OSError):  # if it cannot be put back, it is reported as missing
        recover(path)
    config = _read_config(path)
    try:
        payload = (path / TENSORS).read_bytes()
    except OSError as error:
        raise SavedFilterError(
            f"A saved filter holds `{TENSORS}`; `{path}` has none that can be read "
            f"({error.strerror}). Save the filter again."
        ) from error
    if hashlib.sha256(payload).hexdigest() != config.get("tensors_sha256"):
        raise SavedFilterError(
            f"`{path / TENSORS}` is not the file that was saved: its checksum differs from the one "
            f"in `{CONFIG}`, so it was cut short or altered. Copy the folder again, or save the "
            "filter again."
        )
    try:
        return config, safetensors.torch.load(payload)
    except Exception as error:  # hostile bytes make the parser, or torch, raise anything
        raise SavedFilterError(f"`{path / TENSORS}` is not a safetensors file: {error}.") from error


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        text = read_bounded(file, SavedFilterError)
    except OSError as error:
        raise SavedFilterError(
            f"A saved filter is a folder with a `{CONFIG}`; `{path}` has none that can be read "
            f"({error.strerror}). `fitted.save(path)` writes one."
        ) from error
    config = parse_json(text, f"`{file}`", SavedFilterError)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise SavedFilterError(
            f"`{file}` does not describe a saved filter: its `format` is not `{FORMAT}`."
        )
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise SavedFilterError(
            f"This ttapca reads saved filters of format version {FORMAT_VERSION}; `{file}` has "
            f"version {shown(version)}. Install the ttapca that wrote it, or fit again."
        )
    if config.get("checksum") != _checksum(config):
        raise SavedFilterError(
            f"`{file}` was altered after it was saved: its checksum does not match. Copy the "
            "folder again, or save the filter again."
        )
    return config


def _check_filter(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    where = f"The config of the filter in `{path}`"
    shape = config["shape"]
    rules: dict[str, Rule] = {
        "shape": kind_of(config, tensors).shape_rule,
        "n_components": Whole(1, math.prod(shape)),
    }
    if "input_mean" not in tensors:  # then the filter acts on the layer's output
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
        fault = _fault_of(tensor, known[name], getattr(torch, config["storage"]))
        if fault is not None:
            raise SavedFilterError(f"`{name}` of the filter in `{path}` must {fault}")
    _check_source(config["source"], tensors["singular_values"], where)


def kind_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> type[Basis]:
    """Return what kind of basis a saved filter has."""
    return basis_kind(config["route"], at_input="input_mean" in tensors)


def _forms(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, TensorForm], dict[str, TensorForm]]:
    """Return the forms of the tensors that must be there, and of those that may be."""
    kind, shape, components = kind_of(config, tensors), config["shape"], config["n_components"]
    output_size, bands = math.prod(config["output_shape"]), len(band_edges(components)) - 1
    required = {
        "output_mean": TensorForm((output_size,), torch.float64),
        "singular_values": TensorForm((components,), torch.float64, "above 0 and falling", _falls),
        **kind.forms(tuple(shape), components),
    }
    if False in kind.sides and "input_mean" in tensors and "output_mean" not in tensors:
        del required["output_mean"]  # it follows from the mean of the input
    samples = _rows_and_columns(tensors.get("energies"))[0]
    optional = {
        "energies": TensorForm((samples, bands), torch.float32, "not below 0", _not_negative),
        "error_bound": TensorForm((components,), torch.float64, "not below 0", _not_negative),
        "class_reach": TensorForm((components,), torch.float32, "not below 0", _not_negative),
    }
    if "energies" in tensors:
        optional["rest"] = TensorForm((samples,), torch.float32, "not below 0", _not_negative)
    if True in kind.sides:
        side = required if kind.sides == (True,) else optional
        side["input_mean"] = TensorForm((math.prod(shape),), torch.float64)
        if "input_mean" in tensors and is_image(shape):
            optional |= _image_forms(tensors, samples)
    optional |= _norm_forms(tensors)
    of_classes, of_layers = _class_forms(tensors)
    return required | of_classes, optional | of_layers


def _image_forms(tensors: Mapping[str, Tensor], samples: int) -> dict[str, TensorForm]:
    """Return the forms of what is measured where a filter acts on the model's input images."""
    images = max(2, _rows_and_columns(tensors.get("outliers"))[0])
    words = "distances and, up to 1, shares"
    return {
        "outliers": TensorForm((images, 3), torch.float32, words, _has_shares),
        "textures": TensorForm((samples, TEXTURES), torch.float32, "not below 0", _not_negative),
    }


def _norm_forms(tensors: Mapping[str, Tensor]) -> dict[str, TensorForm]:
    """Return the forms of the channel statistics of GroupNorm and LayerNorm layers."""
    words = "a mean and a variance for each channel"
    return {
        name: TensorForm((2, _rows_and_columns(tensor)[1]), torch.float32, words, _has_variances)
        for name, tensor in tensors.items()
        if name.startswith((GROUP_NORM, LAYER_NORM))
    }


def _class_forms(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, TensorForm], dict[str, TensorForm]]:
    """Return the forms of what is known of classes: what goes together, and what layers have."""
    if CLASS_SHARES not in tensors and CLASS_LOADINGS not in tensors:
        return {}, {}
    classes, rank = _rows_and_columns(tensors.get(CLASS_LOADINGS))
    words = "above 0, with a sum of 1"
    together = {
        CLASS_SHARES: TensorForm((classes,), torch.float32, words, _are_shares),
        CLASS_LOADINGS: TensorForm((classes, rank), torch.float32),
    }
    of_layers = {
        name: TensorForm((1 + rank, 2, tensor.shape[-1] if tensor.dim() else 1), torch.float32)
        for name, tensor in tensors.items()
        if name.startswith(CLASS_MOMENTS)
    }
    return together, of_layers


def _rows_and_columns(tensor: Tensor | None) -> tuple[int, int]:
    """Return the sizes of a matrix, at least 1, for a form that leaves one of them open.

    What is no matrix has the sizes 1 and 1, and so fails the comparison with its form.
    """
    rows, columns = tensor.shape if tensor is not None and tensor.dim() == 2 else (1, 1)
    return max(1, rows), max(1, columns)


def _fault_of(tensor: Tensor, form: TensorForm, storage: torch.dtype) -> str | None:
    """Return what a tensor must be and is not, to follow "must"; None if it is all right."""
    shape, dtype = tuple(tensor.shape), form.dtype or storage
    if shape != form.shape:
        return f"have shape {form.shape}, by its config; found {shape}. Save the filter again."
    if tensor.dtype != dtype:
        return f"be of type {dtype}, by its config; found {tensor.dtype}. Save the filter again."
    # The maximum as a Python float: float16 would turn the limit into infinity.
    if not bool(torch.isfinite(tensor).all()) or float(tensor.abs().max()) > LARGEST:
        return (
            f"hold finite numbers, at most {LARGEST:g}; found NaN, infinity or a larger one. Fit "
            "the filter again."
        )
    if not form.holds(tensor):
        return f"hold numbers that are {form.words}; found others. Fit the filter again."
    return None


def _check_source(source: Mapping[str, float], values: Tensor, where: str) -> None:
    """Compare what a config says about the source with the singular values."""
    largest, smallest = float(values[0]), float(values[-1])
    for name, value in (("largest", largest), ("smallest", smallest)):
        said = source[f"{name}_singular_value"]
        if not math.isclose(said, value, rel_tol=ROUNDING):
            raise SavedFilterError(
                f"{where}: `source.{name}_singular_value` must be that of the tensors, {value:g}; "
                f"found {said:g}. Save the filter again."
            )
    freedom = source["n_samples"] - 1
    least, kept = smallest**2 / freedom, float(values.square().sum()) / freedom
    if least < SMALLEST_VARIANCE:
        raise SavedFilterError(
            f"{where}: a component must have a variance of at least {SMALLEST_VARIANCE:g}; found "
            f"{least:g}. Fit the filter again."
        )
    if not kept <= source["total_variance"] * (1 + ROUNDING) < math.inf:
        raise SavedFilterError(
            f"{where}: `source.total_variance` must be at least that of its components, {kept:g}; "
            f"found {source['total_variance']:g}. Save the filter again."
        )


def _has_variances(statistics: Tensor) -> bool:
    # The difference of two rounded numbers may be slightly negative for a constant channel.
    return bool((statistics[1] >= -ROUNDING).all())


def _are_shares(values: Tensor) -> bool:
    return bool((values > 0).all()) and abs(float(values.sum()) - 1) < ROUNDING


def _has_shares(measured: Tensor) -> bool:
    fits = bool((measured >= 0).all()) and bool((measured[:, 1:] <= 1).all())
    return fits and floor_of(measured[:, 0]) > 0


def _falls(values: Tensor) -> bool:
    return bool(values[-1] > 0) and bool((values.diff() <= 0).all())


def _not_negative(values: Tensor) -> bool:
    return bool((values >= 0).all())
