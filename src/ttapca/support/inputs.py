"""What a model takes of a batch, and its arguments with the images among them changed."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca.errors import InputTypeError, OptionError, ShapeError, TtapcaError
from ttapca.support.modules import device_and_dtype

# Names in a dict, in the order to look for them, for models whose arguments have other names.
SAMPLES = ("pixel_values", "image", "images", "img", "inputs", "input", "x", "data")
# A model may take these to compute a loss; a filter is fitted without them.
LABELS = frozenset({"label", "labels", "target", "targets", "y"})

# Unlabelled source data, as methods take them: one tensor or array, or batches of any kind.
SourceData = Iterable[Any] | Tensor
SOURCE_BATCH = 64  # into which one tensor is split

Samples = Tensor | Sequence[Tensor]  # a batch, or a list of samples of any sizes
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_in(batch: Any, model: nn.Module) -> tuple[Any, ...] | dict[str, Any] | None:
    """Return the arguments with which a model is called for a batch; None if they are unknown."""
    # The first element of a tuple or a list is taken, as the others are labels; of a dict, the
    # entries that the model has arguments for, without labels, or else the images.
    if isinstance(batch, (tuple, list)):
        if not batch or not isinstance(batch[0], Mapping):
            return tuple(batch[:1])
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return (batch,)
    return _named(batch, model) or _samples(batch)


def _named(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any] | None:
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # a forward that was written in another language
        return None
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    usable = {name: each for name, each in parameters.items() if each.kind in plain}
    needed = {name for name, each in usable.items() if each.default is inspect.Parameter.empty}
    found = {name: batch[name] for name in usable if name in batch and name not in LABELS}
    return found if found and needed <= found.keys() else None


def _samples(batch: Mapping[str, Any]) -> tuple[Any] | None:
    return next(((batch[name],) for name in SAMPLES if name in batch), None)


def mapped_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all that is in lists, tuples and dicts of it changed, or it itself."""
    if isinstance(value, Mapping):
        found = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)  # its type
        found.update({name: mapped_tensors(each, change) for name, each in value.items()})
        return found
    if type(value) in (list, tuple):
        return type(value)([mapped_tensors(each, change) for each in value])
    return change(value)


def samples_in(value: Any) -> Samples | None:
    """Return the samples in an argument of a model; of a dict the first; None if it has none."""
    if isinstance(value, Tensor):
        return value if value.dim() else None
    if isinstance(value, Mapping):
        return first_samples(value.values())
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return value if value[0].dim() else None
    return None


def first_samples(values: Iterable[Any]) -> Samples | None:
    """Return the samples in the first argument that has any; None if there is none."""
    return next((each for each in map(samples_in, values) if each is not None), None)


def as_tensor(value: Any, precision: torch.dtype | None = None) -> Any:
    """Return an array as a tensor, and float64 in a precision, if any; other values as they are."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise InputTypeError(
                f"A model takes numbers; found an array of {value.dtype}. Make an array of numbers "
                "of it, all samples of one shape."
            )
        native = value.dtype.newbyteorder("=")
        value = torch.from_numpy(np.array(value, native))  # a copy: it may be read-only
    if isinstance(value, Tensor) and value.is_floating_point() and precision is not None:
        return value.to(precision) if torch.float64 in (value.dtype, precision) else value
    return value


def array_batches(data: NDArray[Any], size: int) -> list[NDArray[Any]]:
    """Cut an array into batches, without copying it."""
    return [data[start : start + size] for start in range(0, len(data) if data.ndim else 0, size)]


def precision_of(model: nn.Module) -> torch.dtype | None:
    """Return the precision of a model's first parameter or buffer; None if it has neither."""
    tensors = (*model.parameters(), *model.buffers())
    return next((each.dtype for each in tensors if each.is_floating_point()), None)


def source_batches(source: SourceData, model: nn.Module) -> Iterator[Tensor]:
    """Yield batches of unlabelled source data, on the device of a model and in its precision."""
    device, dtype = device_and_dtype(model, model)
    batches: Iterable[Any] = source
    if isinstance(source, np.ndarray):
        batches = array_batches(source, SOURCE_BATCH)
    elif isinstance(source, Tensor):
        batches = torch.split(source, SOURCE_BATCH)
    for number, batch in enumerate(batches):
        samples = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if isinstance(samples, Mapping):
            (samples,) = _samples(samples) or (samples,)
        samples = as_tensor(samples)
        if not isinstance(samples, Tensor):
            raise OptionError(
                "`source` yields tensors, pairs that start with one, or dicts with an `image`; "
                f"batch {number} (counting from 0) is a {type(batch).__name__}."
            )
        yield samples.to(device, dtype) if samples.is_floating_point() else samples.to(device)


def _map_first(
    change: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], dim: int = 0
) -> Arguments | None:
    """Return arguments with the first tensor changed, or the first images with `dim=4`."""

    def fits(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        return not dim or (value.dim() == dim and value.is_floating_point())

    values = [*args, *kwargs.values()]
    place = next((place for place, value in enumerate(values) if fits(value)), None)
    if place is None:
        return None
    values[place] = change(values[place])
    named = zip(kwargs, values[len(args) :], strict=True)
    return tuple(values[: len(args)]), dict(named)


def map_first_tensor(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Return a model's arguments with the first tensor changed, usually the images."""
    found = _map_first(change, args, kwargs)
    if found is None:
        raise ShapeError("This method changes the images given to a model; it was given no tensor.")
    return found


def mirror_images(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Return arguments with left and right of images, (n, c, h, w), exchanged, if there are any."""
    return _map_first(lambda images: images.flip(-1), args, kwargs, dim=4)


def mirror_back(logits: Tensor) -> Tensor | None:
    """Return the logits of mirrored images as those of the images; None if left is unknown."""
    # Only predictions of every pixel, shape (batch, classes, height, width), have a left and right.
    if logits.dim() == 4:
        return logits.flip(-1)
    return logits if logits.dim() in (1, 2) else None


@contextmanager
def explained_inputs(inputs: Iterable[Any]) -> Iterator[None]:
    """Explain what is wrong with a model's inputs if the model, run inside the block, fails."""
    given = list(inputs)
    try:
        yield
    except TtapcaError:
        raise
    except (RuntimeError, TypeError, AttributeError) as error:
        advice = next(filter(None, map(_advice_on, given)), "") or _precision(given, str(error))
        if not advice:
            raise
        raise InputTypeError(f"{advice} The model said: {error}") from error


def _advice_on(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"A model takes tensors; found a {kind}. Make one of it with torch.stack({kind})."
    if isinstance(value, Mapping):
        names = ", ".join(map(repr, list(value)[:5]))
        return (
            f"A model takes tensors; found a {kind} with the keys {names}. Give its entries by "
            "name, as in adapted(**batch), or one of them."
        )
    if isinstance(value, np.ndarray):
        return "A model takes tensors; found a numpy array. Make one with torch.from_numpy(array)."
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return (
            f"The model cannot take whole numbers; found a tensor of {_name(value.dtype)}. Prepare "
            "the images as in training, for example batch.float() / 255 for pixels from 0 to 255."
        )
    return ""


def _precision(values: list[Any], said: str) -> str:
    kinds = {each.dtype for each in values if isinstance(each, Tensor) and each.is_floating_point()}
    # numpy makes float64 unasked.
    about_types = _ABOUT_TYPES if torch.float64 in kinds else _ABOUT_TWO_TYPES
    if not kinds or not about_types.search(said):
        return ""
    found = " and ".join(sorted(map(_name, kinds)))
    return (
        f"A model takes its own precision; found a tensor of {found}. Convert it as the model is, "
        "with batch.to(next(model.parameters()).dtype)."
    )


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


_ABOUT_TYPES = re.compile(r"dtype|scalar type|[Ii]nput type|Double|double")
_ABOUT_TWO_TYPES = re.compile(r"same dtype|type \(.*should be the same|expected .*scalar type")
