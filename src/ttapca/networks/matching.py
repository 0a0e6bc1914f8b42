"""Do these weights fit this network? If not: what is wrong, and which architecture would fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ttapca._checks import shown
from ttapca.errors import CheckpointError
from ttapca.networks.architectures import ARCHITECTURES, shapes_of
from ttapca.networks.descriptions import MOST_CHANNELS, MOST_CLASSES

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
        >>> from ttapca.networks import build
        >>> guess_architecture(build("resnet20", classes=7).state_dict())
        'resnet20'
    """
    classes, channels = classes_of(tensors), channels_of(tensors)
    if classes is None or channels is None:
        return None
    found = _without_counters(shapes_in(tensors))
    for name in ARCHITECTURES:
        if _without_counters(shapes_of(name, classes, channels)) == found:
            return name
    return None


def classes_of(tensors: Mapping[str, Tensor]) -> int | None:
    """How many classes weights of one of our architectures are for."""
    last = tensors.get("fc.weight")
    return last.shape[0] if _holds(last, dimensions=2, of=0, most=MOST_CLASSES) else None


def channels_of(tensors: Mapping[str, Tensor]) -> int | None:
    """How many channels an image has for weights of one of our architectures."""
    first = tensors.get("conv1.weight")
    return first.shape[1] if _holds(first, dimensions=4, of=1, most=MOST_CHANNELS) else None


def _holds(tensor: Tensor | None, *, dimensions: int, of: int, most: int) -> TypeGuard[Tensor]:
    """Whether a tensor has so many dimensions, and a believable size in one of them."""
    return tensor is not None and tensor.dim() == dimensions and 1 <= tensor.shape[of] <= most


def load_into(network: nn.Module, tensors: Mapping[str, Tensor], name: str, path: Path) -> None:
    """Copy weights into a network, all of them or none.

    Args:
        network: Changed in place; keeps its own precision.
        tensors: By name.
        name: What the network is called in an error.
        path: Where the weights come from.

    Raises:
        CheckpointError: Names or shapes differ, or a real weight is given as a complex one.

    Example:
        >>> network = nn.Linear(2, 1)
        >>> load_into(network, nn.Linear(2, 1).state_dict(), "mine", Path("mine.pth"))
    """
    own = network.state_dict()
    check_shapes(shapes_in(own), tensors, name, path)
    counters = {key: torch.zeros_like(own[key]) for key in own if key.endswith(COUNTER)}
    complete = {**counters, **tensors}
    for key, value in tensors.items():
        if value.is_complex() and not own[key].is_complex():
            raise CheckpointError(
                f"`{key}` of `{name}` is real, and complex in {path}: the weights are of another "
                "network."
            )
    network.load_state_dict(complete)


def check_shapes(wanted: Shapes, tensors: Mapping[str, Tensor], name: str, path: Path) -> None:
    """Compare names and shapes, before a network is made of them.

    Args:
        wanted: Of the network, by name.
        tensors: Of the file; counters of batches may be missing.
        name: What the network is called in an error.
        path: Where the weights come from.

    Raises:
        CheckpointError: They differ; where they are those of another architecture, it is named.

    Example:
        >>> check_shapes({"fc.bias": (3,)}, {"fc.bias": torch.zeros(3)}, "mine", Path("mine.pth"))
    """
    counters = {key: shape for key, shape in wanted.items() if key.endswith(COUNTER)}
    wrong = differences(wanted, {**counters, **shapes_in(tensors)})
    if not wrong:
        return
    fitting = guess_architecture(tensors)
    advice = (
        f"They are those of the architecture `{fitting}` with {classes_of(tensors)} classes."
        if fitting
        else "No architecture of ttapca has these names and shapes; for a network of your own "
        "name its factory: `--model package.module:factory --weights FILE`."
    )
    raise CheckpointError(f"The weights in {path} do not fit `{name}`: {wrong}. {advice}")


def differences(wanted: Shapes, found: Shapes) -> str:
    """Say which names are missing, unexpected or wrongly shaped; nothing when all is well.

    Example:
        >>> differences({"a": (1,), "b": (2,)}, {"a": (3,), "c": (2,)})
        'missing `b`; unexpected `c`; wrong shape `a` (3,) for (1,)'
    """
    parts = {
        "missing": [f"`{key}`" for key in wanted if key not in found],
        "unexpected": [f"`{shown(key)[1:-1]}`" for key in found if key not in wanted],
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


def shapes_in(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _without_counters(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    kept: Iterable[str] = (name for name in shapes if not name.endswith(COUNTER))
    return {name: shapes[name] for name in kept}
