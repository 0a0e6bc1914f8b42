"""Every architecture by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from ttapca.errors import OptionError, did_you_mean
from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3, initialise
from ttapca.networks.residual import GroupNormResNet, ResNet, WideResNet

DEFAULT_SEED = 0
DIGITS_SHAPE = (1, 8, 8)


class SmallCNN(ImageNetwork):
    """Three 3x3 convolutions with BatchNorm, an average, a linear classifier.

    Small enough to train in seconds: for the digits demo, tests and first steps.

    Example:
        >>> SmallCNN()(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = DIGITS_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        self.conv1 = conv3x3(self.input_shape[0], 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = conv3x3(16, 32, stride=2)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = conv3x3(32, 64)
        self.bn3 = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = torch.relu(self.bn1(self.conv1(self.normalise(images))))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


# Makes a network from the number of classes, the normalisation and the shape of an image.
Maker = Callable[[int, str | Normalisation, Sequence[int]], ImageNetwork]

_WIDE = (
    *((10, 1), (16, 1), (16, 2), (16, 4), (16, 8), (22, 2), (28, 2), (28, 4), (28, 10)),
    *((34, 10), (40, 1), (40, 2), (40, 4), (70, 16)),
)
_RESIDUAL = (20, 32, 44, 56, 110)

ARCHITECTURES: dict[str, Maker] = {
    **{f"wrn-{depth}-{width}": partial(WideResNet, depth, width) for depth, width in _WIDE},
    **{f"resnet{depth}": partial(ResNet, depth) for depth in _RESIDUAL},
    **{f"resnet{depth}-zeros": partial(ResNet, depth, shortcut="zeros") for depth in _RESIDUAL},
    "resnet26-gn": partial(GroupNormResNet, 26),
    "small-cnn": SmallCNN,
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
    make = _find(architecture)
    with torch.random.fork_rng(devices=[]):  # constructors draw weights that nobody keeps
        network = make(classes, normalisation, input_shape)
    initialise(network, generator or torch.Generator().manual_seed(DEFAULT_SEED))
    return network


@lru_cache(maxsize=256)  # a few files of all architectures
def shapes_of(architecture: str, classes: int, channels: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an architecture's state dict, without making its weights.

    Raises:
        OptionError: There is no such architecture.
    """
    with torch.device("meta"):
        network = _find(architecture)(classes, "half", (channels, *CIFAR_SHAPE[1:]))
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def _find(architecture: str) -> Maker:
    if architecture not in ARCHITECTURES:
        raise OptionError(
            f"There is no architecture `{architecture}`."
            f"{did_you_mean(architecture, ARCHITECTURES)} There are: {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[architecture]
