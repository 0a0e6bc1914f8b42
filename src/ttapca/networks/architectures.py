"""Every architecture by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ttapca.errors import OptionError, did_you_mean
from ttapca.networks.group_norm_resnet import GroupNormResNet
from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, initialise
from ttapca.networks.resnet import ResNet
from ttapca.networks.small_cnn import SmallCNN
from ttapca.networks.wide_resnet import WideResNet

DEFAULT_SEED = 0


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        summary: One line for a person.
        make: Makes it from the number of classes, the normalisation and the shape of an image.
    """

    summary: str
    make: Callable[[int, str | Normalisation, Sequence[int]], ImageNetwork]


def _wide(depth: int, width: int) -> Architecture:
    return Architecture(
        f"WideResNet, depth {depth}, width {width}", functools.partial(WideResNet, depth, width)
    )


def _residual(depth: int) -> Architecture:
    return Architecture(
        f"ResNet, {depth} layers, 1x1-convolution shortcuts", functools.partial(ResNet, depth)
    )


def _zero_padded(depth: int) -> Architecture:
    return Architecture(
        f"ResNet, {depth} layers, zero-padded shortcuts",
        functools.partial(ResNet, depth, shortcut="zeros"),
    )


_WIDE = ((10, 1), (16, 1), (16, 2), (16, 4), (16, 8), (22, 2), (28, 2), (28, 4), (28, 10))
_WIDER = ((34, 10), (40, 1), (40, 2), (40, 4), (70, 16))
_RESIDUAL = (20, 32, 44, 56, 110)

ARCHITECTURES: dict[str, Architecture] = {
    **{f"wrn-{depth}-{width}": _wide(depth, width) for depth, width in (*_WIDE, *_WIDER)},
    **{f"resnet{depth}": _residual(depth) for depth in _RESIDUAL},
    **{f"resnet{depth}-zeros": _zero_padded(depth) for depth in _RESIDUAL},
    "resnet26-gn": Architecture(
        "pre-activated ResNet, 26 layers, GroupNorm", functools.partial(GroupNormResNet, 26)
    ),
    "small-cnn": Architecture("three convolutions with BatchNorm, for digits", SmallCNN),
}


def build(
    architecture: str,
    *,
    classes: int = 10,
    normalisation: str | Normalisation = "none",
    input_shape: Sequence[int] = CIFAR_SHAPE,
    generator: torch.Generator | None = None,
) -> ImageNetwork:
    """Make an untrained network. The caller's random state is not touched.

    Args:
        architecture: One of `ARCHITECTURES`.
        classes: Length of the logits.
        normalisation: What the network does to images in [0, 1]: one of `NORMALISATIONS`, or
            numbers.
        input_shape: Of one image: channels, height, width.
        generator: Draws the weights; a fixed seed by default.

    Returns:
        The network, in training mode.

    Raises:
        OptionError: There is no such architecture, or an option makes no sense.

    Example:
        >>> network = build("wrn-16-2", classes=100, normalisation="cifar100")
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    make = _find(architecture).make
    with torch.random.fork_rng(devices=[]):  # constructors draw weights that nobody keeps
        network = make(classes, normalisation, input_shape)
    initialise(network, generator or torch.Generator().manual_seed(DEFAULT_SEED))
    return network


@functools.lru_cache(maxsize=256)  # a few files of all architectures
def shapes_of(architecture: str, classes: int, channels: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an architecture's state dict, without making its weights.

    Raises:
        OptionError: There is no such architecture.

    Example:
        >>> shapes_of("resnet20", 10, 3)["fc.weight"]
        (10, 64)
    """
    with torch.device("meta"):
        network = _find(architecture).make(classes, "half", (channels, *CIFAR_SHAPE[1:]))
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def _find(architecture: str) -> Architecture:
    if architecture not in ARCHITECTURES:
        raise OptionError(
            f"There is no architecture `{architecture}`."
            f"{did_you_mean(architecture, ARCHITECTURES)} There are: {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[architecture]
