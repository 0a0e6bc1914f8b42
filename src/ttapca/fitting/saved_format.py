"""The format of a saved filter: the names of its tensors, how they are packed, and their rules.

Checksums show that a folder was damaged, not that it is right: anybody who changes a filter can
compute them anew. So each tensor is compared with the config, with the others and with the meaning
of its numbers, before a filter is made of them. `ttapca.spectral.basis` has the tensors of a basis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ttapca._checks import ListOf, Number, OneOf, Record, Rule, Such, Text, Whole, conform
from ttapca.errors import SavedFilterError
from ttapca.fitting.fingerprint import COLUMNS
from ttapca.spectral.basis import Basis, TensorForm
from ttapca.spectral.basis_choice import ROUTE_NAMES, basis_kind
from ttapca.spectral.calibration import band_edges
from ttapca.spectral.image_statistics import TEXTURES, floor_of, is_image

Storage = Literal["float64", "float32", "bfloat16", "float16"]
GROUP_NORM = "group_norm:"  # before the path of a GroupNorm layer, in the file
LAYER_NORM = "layer_norm:"
CLASS_SHARES, CLASS_LOADINGS = "class_shares", "class_loadings"
CLASS_LIKENESS = "class_likeness"
CLASS_MOMENTS = "class_moments:"  # before the path of a normalisation layer
FINGERPRINT = "fingerprint:"  # before the path of a layer
PAIR_NUMBERS = "pair_numbers"
PAIRS = "pairs:"  # before the path of a layer

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


def check_config(config: object, path: Path) -> None:
    """Raise unless a config has what a filter needs, each value possible by itself.

    Raises:
        SavedFilterError: Something is missing, unknown or out of range.
    """
    conform(config, _CONFIG_RULE, _config_of(path), SavedFilterError)


def check_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless the tensors are those of a filter with this config.

    Args:
        config: One that `check_config` let pass.
        tensors: What was read, unpacked.
        path: The folder that they come from, for the message.

    Raises:
        SavedFilterError: One is missing, unknown, of another shape or type, not finite, out of
            range or out of order, or the config contradicts them.
    """
    _check_shapes(config, tensors, path)
    required, optional = _forms(config, tensors)
    for name in required:
        if name not in tensors:
            raise SavedFilterError(
                f"`{path}` is not a whole saved filter: the tensor `{name}` is missing. Save the "
                "filter again."
            )
    known = required | optional
    unknown = sorted(tensors.keys() - known.keys())
    if unknown:
        raise SavedFilterError(
            f"A saved filter of the {config['route']} route has the tensors "
            f"{', '.join(known)}; `{path}` has `{unknown[0][:100]}` as well. If a later ttapca "
            "wrote it, update; otherwise save the filter again."
        )
    for name, tensor in tensors.items():
        fault = _fault_of(tensor, known[name], getattr(torch, config["storage"]))
        if fault is not None:
            raise SavedFilterError(f"`{name}` of the filter in `{path}` must {fault}")
    _check_source(config["source"], tensors["singular_values"], _config_of(path))


def _config_of(path: Path) -> str:
    return f"The config of the filter in `{path}`"


def _check_shapes(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless the shapes in a config are possible for its kind of basis, and fit together."""
    shape = config["shape"]
    rules: dict[str, Rule] = {
        "shape": kind_of(config, tensors).shape_rule,
        "n_components": Whole(1, math.prod(shape)),
    }
    if "input_mean" not in tensors:  # then the filter acts on the layer's output
        rules["output_shape"] = Such(_SHAPE, lambda sides: sides == shape, f"{shape}, as `shape`")
    for name, rule in rules.items():
        conform(config[name], rule, _config_of(path), SavedFilterError, at=name)


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
    channels = _rows_and_columns(tensors.get("inputs"))[1]
    words = "a lowest and a highest value, a mean between them and a deviation, by channel"
    optional = {
        "energies": TensorForm((samples, bands), torch.float32, "not below 0", _not_negative),
        "variances": TensorForm((components,), torch.float64, "above 0", _positive),
        "error_bound": TensorForm((components,), torch.float64, "not below 0", _not_negative),
        "class_reach": TensorForm((components,), torch.float32, "not below 0", _not_negative),
        "inputs": TensorForm((4, channels), torch.float32, words, _is_range),
    }
    if "energies" in tensors:
        words = "two numbers above 0, a correlation up to 1, and a correlation or -1"
        optional["resemblance"] = TensorForm((4,), torch.float64, words, _is_resemblance)
        watched = bands + ("rest" in tensors)
        optional["resemblance_covariances"] = TensorForm(
            (2, watched, watched), torch.float64, "two covariances", _are_covariances
        )
        optional["rest"] = TensorForm((samples,), torch.float32, "not below 0", _not_negative)
    if True in kind.sides:
        side = required if kind.sides == (True,) else optional
        side["input_mean"] = TensorForm((math.prod(shape),), torch.float64)
        if "input_mean" in tensors and is_image(shape):
            optional |= _image_forms(tensors, samples)
    optional |= _norm_forms(tensors)
    rows = (name for name in tensors if name.startswith(FINGERPRINT))
    optional |= dict.fromkeys(rows, TensorForm((COLUMNS,), torch.float32))
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
    words = "correlations from 0 to 1, one for each layer"
    alike = TensorForm((len(of_layers),), torch.float32, words, _are_correlations)
    return together, of_layers | {CLASS_LIKENESS: alike} | _pair_forms(tensors, classes)


def _pair_forms(tensors: Mapping[str, Tensor], classes: int) -> dict[str, TensorForm]:
    """Return the forms of what tells whether two images have one class."""
    if PAIR_NUMBERS not in tensors:
        return {}
    widths = [_rows_and_columns(tensors[name])[1] for name in tensors if name.startswith(PAIRS)]
    features = max(widths, default=0)
    found = {
        name: TensorForm((_rows_and_columns(tensor)[0], features), torch.float32)
        for name, tensor in tensors.items()
        if name.startswith(PAIRS)
    }

    def sound(numbers: Tensor) -> bool:
        stride, directions, _, _, deviation = numbers.tolist()
        whole = stride == int(stride) and directions == int(directions)
        possible = stride >= 1 and 1 <= directions < min(classes, features) and deviation > 0
        return bool(whole and possible)

    words = "a stride, a number of directions, two means and a deviation above 0"
    return found | {PAIR_NUMBERS: TensorForm((5,), torch.float64, words, sound)}


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


def _is_range(values: Tensor) -> bool:
    low, high, mean, deviation = values
    return bool((low <= mean).all() and (mean <= high).all() and (deviation >= 0).all())


def _are_shares(values: Tensor) -> bool:
    return bool((values > 0).all()) and abs(float(values.sum()) - 1) < ROUNDING


def _are_correlations(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _is_resemblance(values: Tensor) -> bool:
    independent, average, correlation, classmates = values.tolist()
    known = classmates == -1 or 0 <= classmates <= 1
    return bool(min(independent, average) > 0 and 0 <= correlation <= 1 and known)


def _are_covariances(values: Tensor) -> bool:
    least = -ROUNDING * float(values.abs().max())
    symmetric = bool(((values - values.mT).abs() <= -least).all())
    return symmetric and bool((torch.linalg.eigvalsh(values) >= least).all())


def _has_shares(measured: Tensor) -> bool:
    fits = bool((measured >= 0).all()) and bool((measured[:, 1:] <= 1).all())
    return fits and floor_of(measured[:, 0]) > 0


def _falls(values: Tensor) -> bool:
    return bool(values[-1] > 0) and bool((values.diff() <= 0).all())


def _positive(values: Tensor) -> bool:
    return bool((values > 0).all())


def _not_negative(values: Tensor) -> bool:
    return bool((values >= 0).all())


LEVELS, LARGEST_VALUE = "levels", "largest_singular_value"
STEPS = 1024  # an octave
NOT_KEPT = -1
DEEPEST = 2**15 - 1  # 32 octaves: less is rounding
MEAN_STEPS, MEAN_SCALE = "mean_steps", "mean_scale"
MOST_STEPS = 2**16 - 1
STEP_ROUNDING = 1e-9  # of a step: what was packed once must not be rounded up again
FINEST = 2.0**-40  # of the largest number: finer steps would lose digits of float64


def packed(tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the tensors of a filter of cosines in the small form.

    Args:
        tensors: As `unpacked` returns them.
        size: Numbers in a sample.
    """
    kept = dict(tensors)
    order, values = kept.pop("order"), kept.pop("singular_values")
    octaves = (values[0] / values).log2()
    # Rounded up, so that no variance becomes larger and all of them together stay below the total.
    below = (octaves * STEPS - STEP_ROUNDING).ceil().clamp(0, DEEPEST).to(torch.int16)
    levels = torch.full((size,), NOT_KEPT, dtype=torch.int16)
    levels[order] = below
    kept[LEVELS], kept[LARGEST_VALUE] = levels, values[:1].clone()
    if "input_mean" in kept:
        kept.pop("output_mean", None)
        kept[MEAN_STEPS], kept[MEAN_SCALE] = _steps_of(kept.pop("input_mean"))
    if "class_reach" in kept:  # components of one level change places
        reach = torch.zeros(size, dtype=torch.float32)
        reach[order] = kept["class_reach"]
        largest = torch.finfo(torch.float16).max
        kept["class_reach"] = reach[_order_of(levels)].clamp(max=largest).half()
    return kept


def unpacked(
    tensors: Mapping[str, Tensor], shape: Sequence[int], components: int, where: str
) -> dict[str, Tensor]:
    """Return the tensors as if they had never been packed; others are returned as they are.

    Raises:
        SavedFilterError: They cannot be what `packed` returns.
    """
    found = dict(tensors)
    if LEVELS not in found:
        return found
    levels, largest = found.pop(LEVELS), found.pop(LARGEST_VALUE, None)
    size = math.prod(shape)
    _check_whole_numbers(LEVELS, levels, size, where)
    kept = int((levels != NOT_KEPT).sum())
    if int(levels.min()) < NOT_KEPT or kept != components:
        raise SavedFilterError(
            f"`{LEVELS}` of the filter in {where} must be {NOT_KEPT} but for its {components:,} "
            f"components, by its config; found {kept:,}. Save the filter again."
        )
    if largest is None or tuple(largest.shape) != (1,) or largest.dtype != torch.float64:
        raise SavedFilterError(
            f"`{LARGEST_VALUE}` of the filter in {where} must be one number of 64 bits; found "
            "something else, or nothing. Save the filter again."
        )
    order = _order_of(levels)
    found["order"] = order
    found["singular_values"] = largest * torch.exp2(-levels[order].double() / STEPS)
    if MEAN_STEPS in found:
        steps, scale = found.pop(MEAN_STEPS), found.pop(MEAN_SCALE, None)
        found["input_mean"] = _mean_of(steps, scale, size, where)
    elif "input_mean" in found:  # as it was stored before
        found["input_mean"] = found["input_mean"].double()
    if "class_reach" in found:
        found["class_reach"] = found["class_reach"].float()
    return found


def _steps_of(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean as whole numbers of 16 bits, and the step and the offset that they count from.

    A step is a power of two and the offset is whole, so that nothing is lost on the way back.
    """
    low, high = float(mean.min()), float(mean.max())
    finest = max(FINEST * max(abs(low), abs(high)), torch.finfo(torch.float32).tiny)
    step = 2.0 ** math.ceil(math.log2(max((high - low) / (MOST_STEPS - 1), finest)))
    offset = math.floor(low / step) + 2**15
    steps = (mean / step).round() - offset
    return steps.to(torch.int16), torch.tensor([step, offset], dtype=torch.float64)


def _mean_of(steps: Tensor, scale: Tensor | None, size: int, where: str) -> Tensor:
    _check_whole_numbers(MEAN_STEPS, steps, size, where)
    if scale is None or tuple(scale.shape) != (2,) or scale.dtype != torch.float64:
        raise SavedFilterError(
            f"`{MEAN_SCALE}` of the filter in {where} must be two numbers of 64 bits; found "
            "something else, or nothing. Save the filter again."
        )
    step, offset = map(float, scale)
    return (steps.double() + offset) * step


def _check_whole_numbers(name: str, tensor: Tensor, size: int, where: str) -> None:
    if tuple(tensor.shape) != (size,) or tensor.dtype != torch.int16:
        raise SavedFilterError(
            f"`{name}` of the filter in {where} must be {size:,} whole numbers of 16 bits, by its "
            f"config; found {tuple(tensor.shape)} of {tensor.dtype}. Save the filter again."
        )


def _order_of(levels: Tensor) -> Tensor:
    """Return the places of the components, the first ones highest; by place within a level."""
    places = (levels != NOT_KEPT).nonzero()[:, 0]
    return places[levels[places].sort(stable=True).indices]
