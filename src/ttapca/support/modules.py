"""Small tools for other people's modules: find a layer, leave every flag as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ttapca.errors import (
    InputTypeError,
    LayerNotFoundError,
    ShapeError,
    TtapcaError,
    did_you_mean,
)


def find_layer(model: nn.Module, path: str) -> nn.Module:
    """Look a layer up by its dotted path.

    Args:
        model: Any module.
        path: As in `model.named_modules()`, for example `layer1.0.conv1`.

    Raises:
        LayerNotFoundError: When there is none; near names are offered.

    Example:
        >>> find_layer(nn.Sequential(nn.Linear(2, 3)), "0")
        Linear(in_features=2, out_features=3, bias=True)
    """
    layers: dict[str, nn.Module] = {name: module for name, module in model.named_modules() if name}
    if path not in layers:
        offer = did_you_mean(path, layers) or f" There are: {_first_names(list(layers))}."
        raise LayerNotFoundError(f"The model has no layer `{path}`.{offer}")
    return layers[path]


def _first_names(names: list[str], most: int = 8) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:most]) or "none"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and every module's own flag back afterwards."""
    flags = training_flags(model)
    model.eval()
    try:
        yield
    finally:
        restore_training_flags(flags)


def training_flags(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """The training flag of every module: frozen parts may differ from the rest."""
    return [(module, module.training) for module in model.modules()]


def restore_training_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    """Set the flags that `training_flags` returned."""
    for module, training in flags:
        module.training = training


def device_and_dtype(layer: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a layer computes, and in which precision: its own tensors tell, else the model's."""
    for module in (layer, model):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()


def map_first_tensor(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the first tensor among the arguments of a model: its images, as a rule.

    Args:
        change: What to do with it; returns another tensor.
        args: Of the model; left as they were.
        kwargs: Likewise.

    Raises:
        ShapeError: When there is no tensor among them.

    Example:
        >>> map_first_tensor(torch.neg, ("x", torch.tensor(1), torch.tensor(2)), {})
        (('x', tensor(-1), tensor(2)), {})
    """
    for number, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:number], change(value), *args[number + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(value)}
    raise ShapeError("This method changes the images given to a model; it was given no tensor.")


@contextmanager
def explained_inputs(inputs: Iterable[Any]) -> Iterator[None]:
    """Say what is wrong with the inputs of a model, where it fails on what is rarely meant.

    A model may take anything, so nothing is refused beforehand: lists, arrays and whole numbers are
    named only when the model has failed on them.

    Args:
        inputs: All that the model is given.

    Yields:
        Nothing; run the model inside.

    Raises:
        InputTypeError: The model failed, and an input is a list, an array, or not floating point.

    Example:
        >>> with explained_inputs([[1.0, 2.0]]):
        ...     nn.Linear(2, 1)([1.0, 2.0])
        Traceback (most recent call last):
        ttapca.errors.InputTypeError: A model takes tensors; found a list...
    """
    given = list(inputs)
    try:
        yield
    except TtapcaError:
        raise
    except (RuntimeError, TypeError, AttributeError) as error:
        advice = next(filter(None, map(_advice_on, given)), None)
        if advice is None:
            raise
        raise InputTypeError(f"{advice} The model said: {error}") from error


def _advice_on(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        kind = type(value).__name__
        return f"A model takes tensors; found a {kind}. Make one of it with torch.stack({kind})."
    if isinstance(value, np.ndarray):
        return "A model takes tensors; found a numpy array. Make one with torch.from_numpy(array)."
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        kind = str(value.dtype).removeprefix("torch.")
        return (
            f"The model cannot take whole numbers; found a tensor of {kind}. Prepare the images as "
            "in training, for example batch.float() / 255 for pixels from 0 to 255."
        )
    return None
