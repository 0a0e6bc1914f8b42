"""The residual networks for CIFAR (He and others, 2016): 20, 32, 44, 56 or 110 layers.

Shortcuts that change the number of channels are 1x1 convolutions with BatchNorm, as in
chenyaofo's published weights, or, as in the paper, subsampling and zero channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.errors import OptionError
from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3

Shortcut = Literal["convolution", "zeros"]

CHANNELS = (16, 32, 64)
LAYERS_OUTSIDE = 2  # the stem and the classifier
LAYERS_A_ROUND = 6  # two in a block of each stage


class ZeroShortcut(nn.Module):
    """Take every second pixel, and add channels of zeros, half on each side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._before = (outputs - inputs) // 2
        self._after = outputs - inputs - self._before

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / 2, w / 2)."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self._before, self._after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm, and a shortcut.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out; where they differ, the resolution is halved.
        shortcut: What the shortcut is where channels differ.
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
            self.downsample = ZeroShortcut(inputs, outputs)
        elif stride != 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        activated: Tensor = self.relu2(out + (x if self.downsample is None else self.downsample(x)))
        return activated


class ResNet(ImageNetwork):
    """A residual network for small images.

    Args:
        depth: 6 n + 2, with n blocks in each of the three stages.
        classes: Length of the logits.
        normalisation: By name or as numbers.
        input_shape: Of one image.
        shortcut: `convolution`, or `zeros` for the shortcut without parameters.

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
        if shortcut not in get_args(Shortcut):
            raise OptionError(f"A shortcut is {' or '.join(get_args(Shortcut))}; found {shortcut}.")
        blocks = blocks_of_depth(depth)
        first, second, third = CHANNELS
        self.conv1 = conv3x3(self.input_shape[0], first)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU()
        self.layer1 = _stage(blocks, first, first, shortcut)
        self.layer2 = _stage(blocks, first, second, shortcut)
        self.layer3 = _stage(blocks, second, third, shortcut)
        self.fc = nn.Linear(third, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = self.relu(self.bn1(self.conv1(self.normalise(images))))
        logits: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
        return logits


def blocks_of_depth(depth: int) -> int:
    """Blocks in each stage of a residual network of 6 n + 2 layers.

    Raises:
        OptionError: There is no network of that depth.
    """
    blocks, rest = divmod(depth - LAYERS_OUTSIDE, LAYERS_A_ROUND)
    if rest or blocks < 1:
        raise OptionError(
            f"A CIFAR ResNet has a depth of 6 n + 2 (8, 14, 20, 26, ...); found {depth}."
        )
    return blocks


def _stage(blocks: int, inputs: int, outputs: int, shortcut: Shortcut) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(inputs, outputs, shortcut),
        *[BasicBlock(outputs, outputs, shortcut) for _ in range(blocks - 1)],
    )
