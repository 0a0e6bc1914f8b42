"""The architectures by name, with layers named as in published weights.

| layers | blocks | weights of |
|---|---|---|
| `resnet` (He and others, 2016) | convolution, norm, ReLU | chenyaofo |
| `wide_resnet` (Zagoruyko and Komodakis, 2016) | norm and ReLU first | RobustBench |
| `group_norm_resnet`, as in test-time training and MEMO | the same with GroupNorm | memo |
| `small_cnn` | three convolutions | the digits that ship with this package |
| `CompactTransformer` (after Hassani and others, 2021) | attention and LayerNorm | this package |

GroupNorm keeps no statistics of the training data, so methods that correct the statistics of
BatchNorm have nothing to correct in such a network.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.errors import OptionError, did_you_mean
from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3, initialise
from ttapca.networks.transformer import CompactTransformer

DEFAULT_SEED = 0
DIGITS_SHAPE = (1, 8, 8)
CHANNELS = (16, 16, 32, 64)  # of the stem and the three stages
GROUPS = 8


class ZeroShortcut(nn.Module):
    """Halve the resolution and add channels of zeros before and after the others."""

    def __init__(self, window: int, before: int, after: int) -> None:
        super().__init__()
        self._window = window  # 1 takes every second pixel, 2 averages four
        self._padding = (0, 0, 0, 0, before, after)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / 2, w / 2)."""
        return F.pad(F.avg_pool2d(x, self._window, stride=2), self._padding)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each followed by BatchNorm, and a shortcut around both."""

    def __init__(self, inputs: int, outputs: int, stride: int, zero_shortcut: bool) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 and zero_shortcut:
            before = (outputs - inputs) // 2
            self.downsample = ZeroShortcut(1, before, outputs - inputs - before)
        elif stride != 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        activated: Tensor = self.relu2(out + (x if self.downsample is None else self.downsample(x)))
        return activated


class GroupNormBlock(nn.Module):
    """Two 3x3 convolutions, each after GroupNorm and ReLU, and a shortcut around all.

    The norms are called `bn` because the published weights call them so.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.GroupNorm(GROUPS, inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.GroupNorm(GROUPS, outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        self.downsample = None if stride == 1 else ZeroShortcut(2, 0, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(self.relu1(self.bn1(x))))))
        return out + (x if self.downsample is None else self.downsample(x))


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU, and a shortcut.

    Where the number of channels changes, the shortcut starts after the first norm and ReLU.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        self.convShortcut = (  # RobustBench's name
            None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        activated = self.relu1(self.bn1(x))
        out: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(activated))))
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        return shortcut + out


# Makes the layers of a network by name, from the channels of an image and the number of classes.
Recipe = Callable[[int, int], dict[str, nn.Module]]


class LayeredNetwork(ImageNetwork):
    """A network that runs its layers one after the other, and averages over pixels before `fc`."""

    def __init__(
        self,
        recipe: Recipe,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = CIFAR_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        for name, layer in recipe(self.input_shape[0], classes).items():
            self.add_module(name, layer)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images in [0, 1]."""
        x = images
        for name, layer in self.named_children():  # the first one normalises
            x = layer(x.mean((2, 3)) if name == "fc" else x)
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
        **_stages("layer", block, _blocks(depth, 2), CHANNELS),
        "fc": nn.Linear(CHANNELS[-1], classes),
    }


def group_norm_resnet(channels: int, classes: int, *, depth: int) -> dict[str, nn.Module]:
    """Make the layers of a ResNet with GroupNorm, of depth 6 n + 2."""
    return {
        "conv1": conv3x3(channels, CHANNELS[0]),
        **_stages("layer", GroupNormBlock, _blocks(depth, 2), CHANNELS),
        "bn": nn.GroupNorm(GROUPS, CHANNELS[-1]),
        "relu": nn.ReLU(),
        "fc": nn.Linear(CHANNELS[-1], classes),
    }


def wide_resnet(channels: int, classes: int, *, depth: int, width: int) -> dict[str, nn.Module]:
    """Make the layers of a WideResNet of depth 6 n + 4, with stages `width` times as wide."""
    widths = (CHANNELS[0], *(width * each for each in CHANNELS[1:]))
    stages = _stages("block", WideBlock, _blocks(depth, 4), widths)
    return {
        "conv1": conv3x3(channels, CHANNELS[0]),
        # RobustBench wraps each stage once more, under the name `layer`.
        **{name: nn.Sequential(OrderedDict(layer=stage)) for name, stage in stages.items()},
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


def _blocks(depth: int, others: int) -> int:
    """Return the number of blocks in each stage; `others` layers lie outside the blocks."""
    blocks, rest = divmod(depth - others, 6)  # two layers in a block of each stage
    if rest or blocks < 1:
        raise OptionError(
            f"The depth of this network must be 6 n + {others}, with n blocks in each of three "
            f"stages; found {depth}."
        )
    return blocks


def _stages(
    name: str,
    block: Callable[[int, int, int], nn.Module],
    blocks: int,
    channels: Sequence[int],
) -> dict[str, nn.Module]:
    """Make three stages of blocks; the second and the third halve the resolution."""
    stages: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(channels), 1):
        first = block(inputs, outputs, 1 if number == 1 else 2)
        others = [block(outputs, outputs, 1) for _ in range(blocks - 1)]
        stages[f"{name}{number}"] = nn.Sequential(first, *others)
    return stages


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
}

# Makes a network from the number of classes, the normalisation and the shape of an image.
Maker = Callable[[int, str | Normalisation, Sequence[int]], ImageNetwork]
ARCHITECTURES: dict[str, Maker] = {
    **{name: partial(LayeredNetwork, recipe) for name, recipe in _RECIPES.items()},
    "cct-2": CompactTransformer,
}


def build(
    architecture: str,
    *,
    classes: int = 10,
    normalisation: str | Normalisation = "none",
    input_shape: Sequence[int] = CIFAR_SHAPE,
    generator: torch.Generator | None = None,
) -> ImageNetwork:
    """Make an untrained network in training mode. Torch's global random state is not touched.

    Args:
        architecture: One of `ARCHITECTURES`.
        classes: How many logits the network returns for an image.
        normalisation: What the network does to images in [0, 1]: one of `NORMALISATIONS`, or
            numbers.
        input_shape: The shape of one image: channels, height, width.
        generator: Draws the weights; by default one with a fixed seed.

    Raises:
        OptionError: There is no such architecture, or an option is impossible.

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
