"""The format of a saved filter: the names of its tensors, how they are packed, and their rules.

Checksums show that a folder was damaged, not that it is right: anybody who changes a filter can
compute them anew. So each tensor is compared with the config, with the others and with the meaning
of its numbers, before a filter is made of them. `ttapca.spectral.basis` has the tensors of a basis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
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
# Before the path of a layer, in the names of tensors.
GROUP_NORM, LAYER_NORM, FINGERPRINT = "group_norm:", "layer_norm:", "fingerprint:"
CLASS_SHARES, CLASS_LOADINGS = "class_shares", "class_loadings"
CLASS_LIKENESS, CLASS_MOMENTS = "class_likeness", "class_moments:"
PAIR_NUMBERS, PAIRS = "pair_numbers", "pairs:"

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
            },
            {
                "agreement": Number(0, 1),
                "mirror_agreement": Number(0, 1),
                "temperature": Number(above=0, high=100),
            },
            others=Number(0),  # earlier versions repeated facts that follow from the tensors
        ),
        "versions": Record({"ttapca": Text(), "torch": Text()}, others=Text()),
        "tensors_sha256": Text(64),
        "checksum": Text(64),
    }
)


def _is_resemblance(values: Tensor) -> bool:
    independent, average, classmates, *pairs = values.tolist()
    lengths, correlations = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    known = classmates == -1 or 0 <= classmates <= 1
    rising = all(one < two for one, two in itertools.pairwise([0, *lengths]))
    possible = all(0 <= each <= 1 for each in correlations)
    return bool(min(independent, average) > 0 and known and rising and possible)


def _are_covariances(values: Tensor) -> bool:
    least = -ROUNDING * float(values.abs().max())
    symmetric = bool(((values - values.mT).abs() <= -least).all())
    return symmetric and bool((torch.linalg.eigvalsh(values) >= least).all())


def _has_outliers(measured: Tensor) -> bool:
    fits = bool((measured >= 0).all()) and bool((measured[:, 1:] <= 1).all())
    return fits and floor_of(measured[:, 0]) > 0


# What numbers must be, in words, and whether they are.
_Meaning = tuple[str, Callable[[Tensor], bool]]
POSITIVE: _Meaning = "above 0", lambda x: bool((x > 0).all())
NOT_NEGATIVE: _Meaning = "not below 0", lambda x: bool((x >= 0).all())
FALLING: _Meaning = "above 0 and falling", lambda x: bool(x[-1] > 0 and (x.diff() <= 0).all())
CORRELATIONS: _Meaning = "correlations from 0 to 1", lambda x: bool(((x >= 0) & (x <= 1)).all())
SHARES: _Meaning = (
    "above 0, with a sum of 1",
    lambda x: bool((x > 0).all()) and abs(float(x.sum()) - 1) < ROUNDING,
)
MOMENTS: _Meaning = (  # the difference of rounded numbers may be negative for a constant channel
    "a mean and a variance for each channel",
    lambda x: bool((x[1] >= -ROUNDING).all()),
)
INPUT_RANGE: _Meaning = (
    "a lowest and a highest value, a mean between them and a deviation, by channel",
    lambda x: bool(((x[0] <= x[2]) & (x[2] <= x[1]) & (x[3] >= 0)).all()),
)
OUTLIERS: _Meaning = "distances and, up to 1, shares", _has_outliers
RESEMBLANCE: _Meaning = (
    "two numbers above 0, a correlation or -1, rising lengths and a correlation for each",
    _is_resemblance,
)
COVARIANCES: _Meaning = "covariances", _are_covariances


def check_config(config: object, path: Path) -> None:
    """Raise `SavedFilterError` unless a config has what a filter needs, each value possible."""
    conform(config, _CONFIG_RULE, _config_of(path), SavedFilterError)


def check_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise `SavedFilterError` unless unpacked tensors are those of a filter with this config."""
    _check_shapes(config, tensors, path)
    required, optional = _forms(config, tensors)
    known = required | optional
    unknown = sorted(tensors.keys() - known.keys())
    for name in required:
        _check_there(name, tensors, path)
    if unknown:
        raise SavedFilterError(
            f"A saved filter of the {config['route']} route has the tensors "
            f"{', '.join(known)}; `{path}` has `{unknown[0][:100]}` as well. If a later ttapca "
            "wrote it, update; otherwise save the filter again."
        )
    for name, tensor in tensors.items():
        _check_form(name, tensor, known[name], getattr(torch, config["storage"]), path)
    _check_source(config["source"], tensors["singular_values"], _config_of(path))


def _config_of(path: Path) -> str:
    return f"The config of the filter in `{path}`"


def _check_there(name: str, tensors: Mapping[str, Tensor], path: Path) -> None:
    if name not in tensors:
        raise SavedFilterError(
            f"`{path}` is not a whole saved filter: the tensor `{name}` is missing. Save the "
            "filter again."
        )


def _check_shapes(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
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
        "singular_values": TensorForm((components,), torch.float64, *FALLING),
        **kind.forms(tuple(shape), components),
    }
    if False in kind.sides and "input_mean" in tensors and "output_mean" not in tensors:
        del required["output_mean"]  # it follows from the mean of the input
    samples = _rows_and_columns(tensors.get("energies"))[0]
    channels = _rows_and_columns(tensors.get("inputs"))[1]
    optional = {
        "energies": TensorForm((samples, bands), torch.float32, *NOT_NEGATIVE),
        "variances": TensorForm((components,), torch.float64, *POSITIVE),
        "error_bound": TensorForm((components,), torch.float64, *NOT_NEGATIVE),
        "class_reach": TensorForm((components,), torch.float32, *NOT_NEGATIVE),
        "inputs": TensorForm((4, channels), torch.float32, *INPUT_RANGE),
    }
    if "energies" in tensors:
        watched = bands + ("rest" in tensors)
        lengths = max(0, tensors["resemblance"].numel() - 3) // 2 if "resemblance" in tensors else 0
        optional |= {
            "resemblance": TensorForm((3 + 2 * lengths,), torch.float64, *RESEMBLANCE),
            "resemblance_covariances": TensorForm(
                (lengths + 1, watched, watched), torch.float64, *COVARIANCES
            ),
            "rest": TensorForm((samples,), torch.float32, *NOT_NEGATIVE),
        }
    if True in kind.sides:
        side = required if kind.sides == (True,) else optional
        side["input_mean"] = TensorForm((math.prod(shape),), torch.float64)
        if "input_mean" in tensors and is_image(shape):
            images = max(2, _rows_and_columns(tensors.get("outliers"))[0])
            optional |= {
                "outliers": TensorForm((images, 3), torch.float32, *OUTLIERS),
                "textures": TensorForm((samples, TEXTURES), torch.float32, *NOT_NEGATIVE),
            }
    if CLASS_SHARES in tensors or CLASS_LOADINGS in tensors:
        classes, rank = _rows_and_columns(tensors.get(CLASS_LOADINGS))
        required[CLASS_SHARES] = TensorForm((classes,), torch.float32, *SHARES)
        required[CLASS_LOADINGS] = TensorForm((classes, rank), torch.float32)
        layers = [name for name in tensors if name.startswith(CLASS_MOMENTS)]
        optional[CLASS_LIKENESS] = TensorForm((len(layers),), torch.float32, *CORRELATIONS)
        for name in layers:
            size = tensors[name].shape[-1] if tensors[name].dim() else 1
            optional[name] = TensorForm((1 + rank, 2, size), torch.float32)
        optional |= _pair_forms(tensors, classes)
    for name, tensor in tensors.items():
        if name.startswith((GROUP_NORM, LAYER_NORM)):
            form = TensorForm((2, _rows_and_columns(tensor)[1]), torch.float32, *MOMENTS)
            optional[name] = form
        elif name.startswith(FINGERPRINT):
            optional[name] = TensorForm((COLUMNS,), torch.float32)
    return required, optional


def _pair_forms(tensors: Mapping[str, Tensor], classes: int) -> dict[str, TensorForm]:
    if PAIR_NUMBERS not in tensors:
        return {}
    layers = [name for name in tensors if name.startswith(PAIRS)]
    sizes = {name: _rows_and_columns(tensors[name]) for name in layers}
    features = max((width for _, width in sizes.values()), default=0)

    def sound(numbers: Tensor) -> bool:
        stride, directions, _, _, deviation = numbers.tolist()
        whole = stride == int(stride) and directions == int(directions)
        possible = stride >= 1 and 1 <= directions < min(classes, features) and deviation > 0
        return bool(whole and possible)

    words = "a stride, a number of directions, two means and a deviation above 0"
    found = {name: TensorForm((rows, features), torch.float32) for name, (rows, _) in sizes.items()}
    return found | {PAIR_NUMBERS: TensorForm((5,), torch.float64, words, sound)}


def _rows_and_columns(tensor: Tensor | None) -> tuple[int, int]:
    """Return the sizes of a matrix, at least 1, and 1 for anything else, which then has no form."""
    rows, columns = tensor.shape if tensor is not None and tensor.dim() == 2 else (1, 1)
    return max(1, rows), max(1, columns)


def _check_form(
    name: str, tensor: Tensor, form: TensorForm, storage: torch.dtype, path: Path
) -> None:
    shape, dtype = tuple(tensor.shape), form.dtype or storage
    if shape != form.shape:
        fault = f"have shape {form.shape}, by its config; found {shape}. Save the filter again."
    elif tensor.dtype != dtype:
        fault = f"be of type {dtype}, by its config; found {tensor.dtype}. Save the filter again."
    # The maximum as a Python float: float16 would turn the limit into infinity.
    elif not bool(torch.isfinite(tensor).all()) or float(tensor.abs().max()) > LARGEST:
        fault = (
            f"hold finite numbers, at most {LARGEST:g}; found NaN, infinity or a larger one. Fit "
            "the filter again."
        )
    elif not form.holds(tensor):
        fault = f"hold numbers that are {form.words}; found others. Fit the filter again."
    else:
        return
    raise SavedFilterError(f"`{name}` of the filter in `{path}` must {fault}")


def _check_source(source: Mapping[str, float], values: Tensor, where: str) -> None:
    """Compare the variances in a config with those of the singular values."""
    freedom = source["n_samples"] - 1
    least, kept = float(values[-1]) ** 2 / freedom, float(values.square().sum()) / freedom
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


# Filters of cosines are stored in a small form. Each coefficient has a level of 16 bits: how far
# its singular value is below the largest one. The mean has steps of 16 bits, and the reach of
# classes is in float16.
LEVELS, LARGEST_VALUE = "levels", "largest_singular_value"
STEPS = 1024  # an octave
NOT_KEPT = -1
DEEPEST = 2**15 - 1  # 32 octaves: less is rounding
MEAN_STEPS, MEAN_SCALE = "mean_steps", "mean_scale"
MOST_STEPS = 2**16 - 1
STEP_ROUNDING = 1e-9  # of a step: what was packed once must not be rounded up again
FINEST = 2.0**-40  # of the largest number: finer steps would lose digits of float64


def packed(tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the tensors of a filter of cosines in the small form; a sample has `size` numbers."""
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
    tensors: Mapping[str, Tensor], shape: Sequence[int], components: int, path: Path
) -> dict[str, Tensor]:
    """Return the tensors as if they had never been packed; others are returned as they are."""
    found = dict(tensors)
    if LEVELS not in found:
        return found
    size = math.prod(shape)
    forms = {
        LEVELS: TensorForm((size,), torch.int16),
        LARGEST_VALUE: TensorForm((1,), torch.float64),
    }
    if MEAN_STEPS in found:
        forms[MEAN_STEPS] = TensorForm((size,), torch.int16)
        forms[MEAN_SCALE] = TensorForm((2,), torch.float64)
    for name, form in forms.items():
        _check_there(name, found, path)
        _check_form(name, found[name], form, torch.float64, path)
    levels, largest = found.pop(LEVELS), found.pop(LARGEST_VALUE)
    kept = int((levels != NOT_KEPT).sum())
    if int(levels.min()) < NOT_KEPT or kept != components:
        raise SavedFilterError(
            f"`{LEVELS}` of the filter in `{path}` must be {NOT_KEPT} but for its {components:,} "
            f"components, by its config; found {kept:,}. Save the filter again."
        )
    order = _order_of(levels)
    found["order"] = order
    found["singular_values"] = largest * torch.exp2(-levels[order].double() / STEPS)
    if MEAN_STEPS in found:
        step, offset = found.pop(MEAN_SCALE).tolist()
        found["input_mean"] = (found.pop(MEAN_STEPS).double() + offset) * step
    elif "input_mean" in found:  # as it was stored before
        found["input_mean"] = found["input_mean"].double()
    if "class_reach" in found:
        found["class_reach"] = found["class_reach"].float()
    return found


def _steps_of(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean as whole numbers of 16 bits, and their step and offset."""
    low, high = float(mean.min()), float(mean.max())
    finest = max(FINEST * max(abs(low), abs(high)), torch.finfo(torch.float32).tiny)
    # A power of two and a whole offset: nothing is lost on the way back.
    step = 2.0 ** math.ceil(math.log2(max((high - low) / (MOST_STEPS - 1), finest)))
    offset = math.floor(low / step) + 2**15
    steps = (mean / step).round() - offset
    return steps.to(torch.int16), torch.tensor([step, offset], dtype=torch.float64)


def _order_of(levels: Tensor) -> Tensor:
    """Return the places of the components, the first ones highest; by place within a level."""
    places = (levels != NOT_KEPT).nonzero()[:, 0]
    return places[levels[places].sort(stable=True).indices]
