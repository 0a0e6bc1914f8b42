"""Do these weights fit this network? If not: what is wrong, and which architecture would fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ttapca.errors import CheckpointError
from ttapca.models.architectures import ARCHITECTURES, shapes_of

COUNTER = "num_batches_tracked"  # BatchNorm's; older files lack it, and nothing depends on it
NAMES_SHOWN = 4

Shapes = Mapping[str, tuple[int, ...]]


def guess_architecture(tensors: Mapping[str, Tensor]) -> str | None:
    """Find the architecture whose state dict has exactly these names and shapes.

    Args:
        tensors: A state dict; its number of classes and of input channels may be any.

    Returns:
        A name of `ARCHITECTURES`, or None.

    Example:
        >>> from ttapca.models import build
        >>> guess_architecture(build("resnet20", classes=7).state_dict())
        'resnet20'
    """
    classes, channels = classes_of(tensors), channels_of(tensors)
    if classes is None or channels is None:
        return None
    found = _without_counters(_shapes(tensors))
    for name in ARCHITECTURES:
        if _without_counters(shapes_of(name, classes, channels)) == found:
            return name
    return None


def classes_of(tensors: Mapping[str, Tensor]) -> int | None:
    """How many classes weights of one of our architectures are for."""
    last = tensors.get("fc.weight")
    return last.shape[0] if last is not None and last.dim() == 2 else None


def channels_of(tensors: Mapping[str, Tensor]) -> int | None:
    """How many channels an image has for weights of one of our architectures."""
    first = tensors.get("conv1.weight")
    return first.shape[1] if first is not None and first.dim() == 4 else None


def load_into(network: nn.Module, tensors: Mapping[str, Tensor], name: str, path: Path) -> None:
    """Copy weights into a network, all of them or none.

    Args:
        network: Changed in place; keeps its own precision.
        tensors: By name.
        name: What the network is called in an error.
        path: Where the weights come from.

    Raises:
        CheckpointError: Names or shapes differ, or a weight is not finite.

    Example:
        >>> network = nn.Linear(2, 1)
        >>> load_into(network, nn.Linear(2, 1).state_dict(), "mine", Path("mine.pth"))
    """
    own = network.state_dict()
    complete = {
        **{key: torch.zeros_like(value) for key, value in own.items() if key.endswith(COUNTER)},
        **tensors,
    }
    wrong = differences(_shapes(own), _shapes(complete))
    if wrong:
        fitting = guess_architecture(tensors)
        advice = (
            f"They are those of the architecture `{fitting}` with {classes_of(tensors)} classes."
            if fitting
            else "No architecture of ttapca has these names and shapes; for a network of your own "
            "name its factory: `--model package.module:factory --weights FILE`."
        )
        raise CheckpointError(f"The weights in {path} do not fit `{name}`: {wrong}. {advice}")
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"Weights are finite numbers; `{key}` in {path} holds others.")
    network.load_state_dict(complete)


def differences(wanted: Shapes, found: Shapes) -> str:
    """Say which names are missing, unexpected or wrongly shaped; nothing when all is well.

    Example:
        >>> differences({"a": (1,), "b": (2,)}, {"a": (3,), "c": (2,)})
        'missing `b`; unexpected `c`; wrong shape `a` (3,) for (1,)'
    """
    parts = {
        "missing": [f"`{key}`" for key in wanted if key not in found],
        "unexpected": [f"`{key}`" for key in found if key not in wanted],
        "wrong shape": [
            f"`{key}` {found[key]} for {shape}"
            for key, shape in wanted.items()
            if key in found and found[key] != shape
        ],
    }
    return "; ".join(f"{what} {_shortened(keys)}" for what, keys in parts.items() if keys)


def _shortened(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _without_counters(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    kept: Iterable[str] = (name for name in shapes if not name.endswith(COUNTER))
    return {name: shapes[name] for name in kept}
