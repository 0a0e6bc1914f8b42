"""Residual networks for small images, with the names of published weights.

| class | blocks | weights of |
|---|---|---|
| `ResNet` (He and others, 2016) | convolution, norm, ReLU | chenyaofo |
| `WideResNet` (Zagoruyko and Komodakis, 2016) | norm and ReLU come first | RobustBench |
| `GroupNormResNet`, as test-time training and MEMO use it | the same with GroupNorm | memo |

GroupNorm keeps no statistics of the training data: methods built on BatchNorm have nothing to say
about such networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import OneOf, check_option
from ttapca.errors import OptionError
from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3

Shortcut = Literal["convolution", "zeros"]

CHANNELS = (16, 32, 64)  # of the three stages; the stem has as many as the first
GROUPS = 8
LAYERS_A_ROUND = 6  # two in a block of each stage


class ZeroShortcut(nn.Module):
    """Halve the resolution, by every second pixel or by means of four; add channels of zeros."""

    def __init__(self, square: int, before: int, after: int) -> None:
        super().__init__()
        self._square, self._before, self._after = square, before, after

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / 2, w / 2)."""
        halved = F.avg_pool2d(x, self._square, stride=2)
        return F.pad(halved, (0, 0, 0, 0, self._before, self._after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm, and a shortcut.

    Where it changes the number of channels, it halves the resolution.
    """

    def __init__(self, inputs: int, outputs: int, shortcut: Shortcut) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 and shortcut == "zeros":
            before = (outputs - inputs) // 2
            self.downsample = ZeroShortcut(1, before, outputs - inputs - before)
        elif stride != 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        activated: Tensor = self.relu2(out + (x if self.downsample is None else self.downsample(x)))
        return activated


class ResNet(ImageNetwork):
    """A residual network.

    Args:
        depth: 6 n + 2, with n blocks in each of the three stages.
        classes: As for `build`, like normalisation and input shape.
        shortcut: Where channels change: a 1x1 `convolution` with BatchNorm, or `zeros`, as in the
            paper, which has no parameters.

    Raises:
        OptionError: There is no network of that depth, or no such shortcut.

    Example:
        >>> network = ResNet(20)
        >>> sum(parameter.numel() for parameter in network.parameters())
        272474
    """

    def __init__(
        self,
        depth: int,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = CIFAR_SHAPE,
        *,
        shortcut: Shortcut = "convolution",
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        check_option("shortcut", shortcut, OneOf(get_args(Shortcut)))
        blocks = _blocks_of_depth(depth)
        first, second, third = CHANNELS

        def block(inputs: int, outputs: int) -> BasicBlock:
            return BasicBlock(inputs, outputs, shortcut)

        self.conv1 = conv3x3(self.input_shape[0], first)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU()
        self.layer1 = _stage(block, blocks, first, first)
        self.layer2 = _stage(block, blocks, first, second)
        self.layer3 = _stage(block, blocks, second, third)
        self.fc = nn.Linear(third, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = self.relu(self.bn1(self.conv1(self.normalise(images))))
        logits: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
        return logits


class GroupNormBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm and ReLU before each, and a shortcut around all.

    The norms are called `bn` as in the published weights, although they are GroupNorm. Where the
    block changes the number of channels, it halves the resolution.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bn1 = nn.GroupNorm(GROUPS, inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(inputs, outputs, stride=1 if inputs == outputs else 2)
        self.bn2 = nn.GroupNorm(GROUPS, outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        self.downsample = None if inputs == outputs else ZeroShortcut(2, 0, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(self.relu1(self.bn1(x))))))
        return out + (x if self.downsample is None else self.downsample(x))


class GroupNormResNet(ImageNetwork):
    """A residual network with GroupNorm; depth and the rest as for `ResNet`.

    Example:
        >>> network = GroupNormResNet(26)
        >>> any("running_mean" in name for name in network.state_dict())
        False
    """

    def __init__(
        self,
        depth: int,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = CIFAR_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        blocks = _blocks_of_depth(depth)
        first, second, third = CHANNELS
        self.conv1 = conv3x3(self.input_shape[0], first)
        self.layer1 = _stage(GroupNormBlock, blocks, first, first)
        self.layer2 = _stage(GroupNormBlock, blocks, first, second)
        self.layer3 = _stage(GroupNormBlock, blocks, second, third)
        self.bn = nn.GroupNorm(GROUPS, third)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(third, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(self.normalise(images)))))
        logits: Tensor = self.fc(self.relu(self.bn(x)).mean((2, 3)))
        return logits


def _blocks_of_depth(depth: int) -> int:
    blocks, rest = divmod(depth - 2, LAYERS_A_ROUND)  # the stem and the classifier
    if rest or blocks < 1:
        raise OptionError(
            f"A CIFAR ResNet has a depth of 6 n + 2 (8, 14, 20, 26, ...); found {depth}."
        )
    return blocks


def _stage(
    block: Callable[[int, int], nn.Module], blocks: int, inputs: int, outputs: int
) -> nn.Sequential:
    return nn.Sequential(
        block(inputs, outputs), *[block(outputs, outputs) for _ in range(blocks - 1)]
    )


class WideBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and ReLU before each, and a shortcut.

    Where the block changes the number of channels, its shortcut starts after the first of them.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        # The name is RobustBench's: published weights carry it.
        self.convShortcut = (
            None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        activated = self.relu1(self.bn1(x))
        out: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(activated))))
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        return shortcut + out


class WideStage(nn.Module):
    """Blocks of one resolution, under the name `layer`."""

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            WideBlock(inputs, outputs, stride),
            *[WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)],
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks one after the other."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(ImageNetwork):
    """A wide residual network. WRN-28-10 is the paper's.

    Args:
        depth: 6 n + 4, with n blocks in each of the three stages.
        width: Stages have 16, 32 and 64 channels times this.
        classes: As for `build`, like normalisation and input shape.

    Raises:
        OptionError: There is no network of that depth or width.

    Example:
        >>> network = WideResNet(10, 1)
        >>> sum(parameter.numel() for parameter in network.parameters())
        77850
    """

    def __init__(
        self,
        depth: int,
        width: int,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = CIFAR_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        # The stem and one shortcut in each stage count towards the depth.
        blocks, rest = divmod(depth - 4, LAYERS_A_ROUND)
        if rest or blocks < 1 or width < 1:
            raise OptionError(
                "A WideResNet has a depth of 6 n + 4 (10, 16, 22, 28, ...) and a width of at least "
                f"1; found depth {depth} and width {width}."
            )
        first, second, third = (channels * width for channels in CHANNELS)
        self.conv1 = conv3x3(self.input_shape[0], CHANNELS[0])
        self.block1 = WideStage(blocks, CHANNELS[0], first, stride=1)
        self.block2 = WideStage(blocks, first, second, stride=2)
        self.block3 = WideStage(blocks, second, third, stride=2)
        self.bn1 = nn.BatchNorm2d(third)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(third, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = self.block3(self.block2(self.block1(self.conv1(self.normalise(images)))))
        logits: Tensor = self.fc(self.relu(self.bn1(x)).mean((2, 3)))
        return logits
