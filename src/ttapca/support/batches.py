"""What a model takes of a batch: of a tuple the first part, of a dict the arguments by name.

Arrays become tensors here, and float64, which numpy makes unasked, becomes what the model computes
in.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca.errors import InputTypeError, OptionError
from ttapca.support.modules import device_and_dtype

# Names in a dict, in the order to look for them, for models whose arguments have other names.
SAMPLES = ("pixel_values", "image", "images", "img", "inputs", "input", "x", "data")
# A model may take these to compute a loss; a filter is fitted without them.
LABELS = frozenset({"label", "labels", "target", "targets", "y"})

# Unlabelled source data, as methods take them: one tensor or array, or batches of any kind.
SourceData = Iterable[Any] | Tensor
SOURCE_BATCH = 64  # into which one tensor is split


def arguments_in(batch: Any, model: nn.Module) -> tuple[Any, ...] | dict[str, Any] | None:
    """Return what a model is called with for a batch; None if nobody could tell.

    Args:
        batch: What a loader yields. Of a tuple or a list the first element is taken, as the others
            are labels. Of a dict those entries are taken that the model has arguments for, without
            labels; or else the one that is called `pixel_values`, `image`, ...
        model: The model.

    Example:
        >>> arguments_in({"input": 1, "labels": 2}, nn.Linear(2, 2))
        {'input': 1}
        >>> arguments_in([{"image": 1, "label": 2}, 3], nn.Linear(2, 2))
        (1,)
        >>> arguments_in((1, 2), nn.Linear(2, 2))
        (1,)
    """
    if isinstance(batch, (tuple, list)):
        if not batch or not isinstance(batch[0], Mapping):
            return tuple(batch[:1])
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return (batch,)
    return _named(batch, model) or _samples(batch)


def samples_in(batch: Any) -> Any:
    """Return the samples of a batch: its first part, or what a dict has under a known name.

    Example:
        >>> samples_in({"image": 1, "label": 2}), samples_in((3, 4)), samples_in(5)
        (1, 3, 5)
    """
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Mapping):
        found = _samples(batch)
        return batch if found is None else found[0]
    return batch


def _named(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any] | None:
    """Return the entries that are arguments of the model, if all that it needs are there."""
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


def as_tensor(value: Any, precision: torch.dtype | None = None) -> Any:
    """Return an array as a tensor; other values as they are.

    Args:
        value: Anything.
        precision: What the model computes in. Where either is float64, floating-point values are
            converted to it: a model takes no other. None converts nothing.

    Raises:
        InputTypeError: The array holds neither numbers nor truth values.

    Example:
        >>> as_tensor(np.zeros(2), torch.float32)
        tensor([0., 0.])
    """
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
    """Cut an array into batches, without copying it.

    Example:
        >>> [len(batch) for batch in array_batches(np.zeros((5, 3)), 2)]
        [2, 2, 1]
    """
    return [data[start : start + size] for start in range(0, len(data) if data.ndim else 0, size)]


def precision_of(model: nn.Module) -> torch.dtype | None:
    """Return what a model computes in, by its first parameter or buffer; None if it has neither.

    Example:
        >>> precision_of(nn.Linear(2, 2).double()), precision_of(nn.ReLU())
        (torch.float64, None)
    """
    tensors = (*model.parameters(), *model.buffers())
    return next((each.dtype for each in tensors if each.is_floating_point()), None)


def source_batches(source: SourceData, model: nn.Module) -> Iterator[Tensor]:
    """Yield batches of unlabelled source data, on the device of a model and in its precision.

    Args:
        source: One tensor or array of samples, or batches of any kind.
        model: The model.

    Raises:
        OptionError: The source yields something that holds no batch.

    Example:
        >>> [len(batch) for batch in source_batches(torch.zeros(100, 3), nn.Linear(3, 2))]
        [64, 36]
    """
    device, dtype = device_and_dtype(model, model)
    batches: Iterable[Any] = source
    if isinstance(source, np.ndarray):
        batches = array_batches(source, SOURCE_BATCH)
    elif isinstance(source, Tensor):
        batches = torch.split(source, SOURCE_BATCH)
    for number, batch in enumerate(batches):
        samples = as_tensor(samples_in(batch))
        if not isinstance(samples, Tensor):
            raise OptionError(
                "`source` yields tensors, pairs that start with one, or dicts with an `image`; "
                f"batch {number} (counting from 0) is a {type(batch).__name__}."
            )
        yield samples.to(device, dtype) if samples.is_floating_point() else samples.to(device)
