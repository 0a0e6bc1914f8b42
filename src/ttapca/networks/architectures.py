"""The architectures by name, with layers named as in published weights.

| layers | blocks | weights of |
|---|---|---|
| `resnet` (He and others, 2016) | convolution, norm, ReLU | chenyaofo |
| `wide_resnet` (Zagoruyko and Komodakis, 2016) | norm and ReLU first | RobustBench |
| `group_norm_resnet`, as in test-time training and MEMO | the same with GroupNorm | memo |
| `small_cnn` | three convolutions | the digits that ship with this package |
| `CompactTransformer` (after Hassani and others, 2021) | attention and LayerNorm | this package |
| those of `imagenet.py`: ResNets of four stages | as `resnet`, and bottlenecks | torchvision |
| those of `mobile.py` | inverted residuals | torchvision, and a package of EfficientNet-Lite0 |

GroupNorm keeps no statistics of the training data, so methods that correct the statistics of
BatchNorm have nothing to correct in such a network.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from ttapca.errors import OptionError, did_you_mean
from ttapca.networks.blocks import GROUPS, BasicBlock, GroupNormBlock, WideBlock, stages
from ttapca.networks.imagenet import (
    IMAGENET_CLASSES,
    IMAGENET_RESNETS,
    IMAGENET_SHAPE,
    SMALL_IMAGE_RESNETS,
)
from ttapca.networks.mobile import efficientnet_lite0, mobilenet_v2
from ttapca.networks.network import (
    CIFAR_SHAPE,
    ImageNetwork,
    Normalisation,
    conv3x3,
    initialise,
)
from ttapca.networks.settings import set_eps
from ttapca.networks.transformer import CompactTransformer

DEFAULT_SEED = 0
DIGITS_SHAPE = (1, 8, 8)
CIFAR_CLASSES = 10
CHANNELS = (16, 16, 32, 64)  # of the stem and the three stages
CLASSIFIERS = ("fc", "classifier", "_fc")  # take the average over all pixels

# Makes the layers of a network by name, from the channels of an image and the number of classes.
Recipe = Callable[[int, int], dict[str, nn.Module]]


class LayeredNetwork(ImageNetwork):
    """A network that runs its layers one after the other, and averages over pixels at the end."""

    def __init__(
        self,
        recipe: Recipe,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = CIFAR_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        self.normalise.any_size = False
        for name, layer in recipe(self.input_shape[0], classes).items():
            self.add_module(name, layer)

    def take_any_size(self) -> None:
        """Take images of any height and width from now on, instead of those of `input_shape`.

        Example:
            >>> network = build("resnet20").eval()
            >>> network.take_any_size()
            >>> network(torch.zeros(1, 3, 40, 24)).shape
            torch.Size([1, 10])
        """
        self.normalise.any_size = True

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images in [0, 1]."""
        x = images
        for name, layer in self.named_children():  # the first one normalises
            x = layer(x.mean((2, 3)) if name in CLASSIFIERS else x)
        return x


def resnet(
    channels: int, classes: int, *, depth: int, zero_shortcut: bool = False
) -> dict[str, nn.Module]:
    """Make the layers of a ResNet of depth 6 n + 2.

    With `zero_shortcut`, shortcuts add channels of zeros, as in the paper; otherwise they are
    1x1 convolutions with BatchNorm.
    """
    block = partial(BasicBlock, zero_shortcut=zero_shortcut)
    return {
        "conv1": conv3x3(channels, CHANNELS[0]),
        "bn1": nn.BatchNorm2d(CHANNELS[0]),
        "relu": nn.ReLU(),
        **stages("layer", block, _blocks(depth, 2), CHANNELS),
        "fc": nn.Linear(CHANNELS[-1], classes),
    }


def group_norm_resnet(channels: int, classes: int, *, depth: int) -> dict[str, nn.Module]:
    """Make the layers of a ResNet with GroupNorm, of depth 6 n + 2."""
    return {
        "conv1": conv3x3(channels, CHANNELS[0]),
        **stages("layer", GroupNormBlock, _blocks(depth, 2), CHANNELS),
        "bn": nn.GroupNorm(GROUPS, CHANNELS[-1]),
        "relu": nn.ReLU(),
        "fc": nn.Linear(CHANNELS[-1], classes),
    }


def wide_resnet(channels: int, classes: int, *, depth: int, width: int) -> dict[str, nn.Module]:
    """Make the layers of a WideResNet of depth 6 n + 4, with stages `width` times as wide."""
    widths = (CHANNELS[0], *(width * each for each in CHANNELS[1:]))
    wide = stages("block", WideBlock, _blocks(depth, 4), widths)
    return {
        "conv1": conv3x3(channels, CHANNELS[0]),
        # RobustBench wraps each stage once more, under the name `layer`.
        **{name: nn.Sequential(OrderedDict(layer=stage)) for name, stage in wide.items()},
        "bn1": nn.BatchNorm2d(widths[-1]),
        "relu": nn.ReLU(),
        "fc": nn.Linear(widths[-1], classes),
    }


def small_cnn(channels: int, classes: int) -> dict[str, nn.Module]:
    """Make the layers of a network that trains in seconds: for the digits and for tests."""
    return {
        "conv1": conv3x3(channels, 16),
        "bn1": nn.BatchNorm2d(16),
        "relu1": nn.ReLU(),
        "conv2": conv3x3(16, 32, stride=2),
        "bn2": nn.BatchNorm2d(32),
        "relu2": nn.ReLU(),
        "conv3": conv3x3(32, 64),
        "bn3": nn.BatchNorm2d(64),
        "relu3": nn.ReLU(),
        "fc": nn.Linear(64, classes),
    }


def _blocks(depth: int, others: int) -> tuple[int, int, int]:
    """Return the blocks of each of the three stages; `others` layers lie outside of them."""
    blocks, rest = divmod(depth - others, 6)  # two layers in a block of each stage
    if rest or blocks < 1:
        raise OptionError(
            f"The depth of this network must be 6 n + {others}, with n blocks in each of three "
            f"stages; found {depth}."
        )
    return blocks, blocks, blocks


_WIDE = (
    *((10, 1), (16, 1), (16, 2), (16, 4), (16, 8), (22, 2), (28, 2), (28, 4), (28, 10)),
    *((34, 10), (40, 1), (40, 2), (40, 4), (70, 16)),
)
_DEPTHS = (20, 32, 44, 56, 110)
_RECIPES: dict[str, Recipe] = {
    **{
        f"wrn-{depth}-{width}": partial(wide_resnet, depth=depth, width=width)
        for depth, width in _WIDE
    },
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in _DEPTHS},
    **{
        f"resnet{depth}-zeros": partial(resnet, depth=depth, zero_shortcut=True)
        for depth in _DEPTHS
    },
    "resnet26-gn": partial(group_norm_resnet, depth=26),
    "small-cnn": small_cnn,
    **SMALL_IMAGE_RESNETS,
    **IMAGENET_RESNETS,
    "mobilenet-v2": mobilenet_v2,
    "efficientnet-lite0": efficientnet_lite0,
}
_FOR_PHOTOGRAPHS = (*IMAGENET_RESNETS, "mobilenet-v2", "efficientnet-lite0")

# Makes a network from the number of classes, the normalisation and the shape of an image.
Maker = Callable[[int, str | Normalisation, Sequence[int]], ImageNetwork]
ARCHITECTURES: dict[str, Maker] = {
    **{name: partial(LayeredNetwork, recipe) for name, recipe in _RECIPES.items()},
    "cct-2": CompactTransformer,
}


def build(
    architecture: str,
    *,
    classes: int | None = None,
    normalisation: str | Normalisation = "none",
    input_shape: Sequence[int] | None = None,
    eps: float | None = None,
    generator: torch.Generator | None = None,
) -> ImageNetwork:
    """Make an untrained network in training mode. Torch's global random state is not touched.

    Args:
        architecture: One of `ARCHITECTURES`.
        classes: How many logits the network returns for an image; by default 10, and 1,000 for
            networks of photographs.
        normalisation: What the network does to images in [0, 1]: one of `NORMALISATIONS`, or
            numbers.
        input_shape: The shape of one image: channels, height, width; by default 3 x 32 x 32, and
            3 x 224 x 224 for networks of photographs.
        eps: What norms add to a variance before they divide by its root; by default what the
            architecture is known for, mostly 1e-5.
        generator: Draws the weights; by default one with a fixed seed.

    Raises:
        OptionError: There is no such architecture, or an option is impossible.

    Example:
        >>> network = build("wrn-16-2", classes=100, normalisation="cifar100")
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    make = _find(architecture)
    usual = IMAGENET_CLASSES if architecture in _FOR_PHOTOGRAPHS else CIFAR_CLASSES
    classes = usual if classes is None else classes
    input_shape = usual_shape(architecture) if input_shape is None else input_shape
    with torch.random.fork_rng(devices=[]):  # constructors draw weights that nobody keeps
        network = make(classes, normalisation, input_shape)
    initialise(network, generator or torch.Generator().manual_seed(DEFAULT_SEED))
    if eps is not None:
        set_eps(network, eps)
    return network


def usual_shape(architecture: str) -> tuple[int, int, int]:
    """Return the shape of the images that an architecture is mostly used with.

    Example:
        >>> usual_shape("resnet20"), usual_shape("resnet50")
        ((3, 32, 32), (3, 224, 224))
    """
    return IMAGENET_SHAPE if architecture in _FOR_PHOTOGRAPHS else CIFAR_SHAPE


@lru_cache(maxsize=256)  # enough for all architectures and a few files
def shapes_of(architecture: str, classes: int, channels: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of an architecture's state dict, without making its weights."""
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
