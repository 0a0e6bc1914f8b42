"""See what goes through a layer during one forward pass.

The hooks live for that pass alone: nothing of them is left on the model, in a copy or a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ttapca.errors import AttachError
from ttapca.support.modules import find_layer


@contextmanager
def caught_inputs(layer: nn.Module) -> Iterator[list[Any]]:
    """Collect the first input of every call of a layer."""
    caught: list[Any] = []
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: caught.append(_first(args, kwargs)), with_kwargs=True
    )
    try:
        yield caught
    finally:
        handle.remove()


class _Reached(Exception):  # noqa: N818 - a signal, not an error
    """The layer was reached: the rest of the forward pass is not needed."""


@contextmanager
def stopped_at(layer: nn.Module, *, before: bool = False) -> Iterator[list[Any]]:
    """Collect a layer's output and leave the block: what comes after the layer is not computed.

    Args:
        layer: The layer.
        before: Collect its first input instead, and do not compute the layer either.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        >>> with stopped_at(model[0]) as caught:
        ...     output = model(torch.zeros(5, 3))
        >>> [value.shape for value in caught]
        [torch.Size([5, 2])]
    """
    caught: list[Any] = []

    def catch(value: Any) -> None:
        caught.append(value)
        raise _Reached

    if before:
        handle = layer.register_forward_pre_hook(
            lambda _, args, kwargs: catch(_first(args, kwargs)), with_kwargs=True
        )
    else:
        handle = layer.register_forward_hook(lambda _module, _args, output: catch(output))
    try:
        yield caught
    except _Reached:
        pass
    finally:
        handle.remove()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def find_classifier(model: nn.Module, path: str | None) -> nn.Module:
    """The layer that turns features into logits: by its dotted path, else the last `nn.Linear`.

    Raises:
        LayerNotFoundError: When no layer has this path.
        AttachError: When there is no path and no linear layer.

    Example:
        >>> find_classifier(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), None)
        Linear(in_features=3, out_features=2, bias=True)
    """
    if path is not None:
        return find_layer(model, path)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise AttachError(
            "The classifier is the last `nn.Linear` of a model; this one has none. Name the layer "
            'that makes the logits: `classifier="head"`.'
        )
    return linear[-1]
