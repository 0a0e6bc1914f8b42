"""What ResNets are built of: blocks with a shortcut, and stages of blocks.

Layers have the names that they have in published weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.networks.network import conv3x3

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


def convolved_shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Make a shortcut of a 1x1 convolution and BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each followed by BatchNorm, and a shortcut around both."""

    def __init__(self, inputs: int, outputs: int, stride: int, zero_shortcut: bool = False) -> None:
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
            self.downsample = convolved_shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        activated: Tensor = self.relu2(out + (x if self.downsample is None else self.downsample(x)))
        return activated


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 at a quarter of the channels, with BatchNorm; a shortcut.

    The stride is on the 3x3 convolution; with `early_stride` on the first 1x1 convolution, as in
    the first ResNets (He and others, 2016). Weights do not tell which one they were trained with.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, early_stride: bool = False) -> None:
        super().__init__()
        width = outputs // 4
        self.early_stride = early_stride and stride != 1
        first, second = (stride, 1) if early_stride else (1, stride)
        self.conv1 = nn.Conv2d(inputs, width, 1, stride=first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(width, width, second)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu3 = nn.ReLU()
        changes = stride != 1 or inputs != outputs
        self.downsample = convolved_shortcut(inputs, outputs, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu2(self.bn2(self.conv2(out)))))
        activated: Tensor = self.relu3(out + (x if self.downsample is None else self.downsample(x)))
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


def stages(
    name: str,
    block: Callable[[int, int, int], nn.Module],
    blocks: Sequence[int],
    channels: Sequence[int],
) -> dict[str, nn.Module]:
    """Make stages of that many blocks each; all stages but the first halve the resolution."""
    made: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(channels)):
        first = block(inputs, outputs, 1 if number == 0 else 2)
        others = [block(outputs, outputs, 1) for _ in range(blocks[number] - 1)]
        made[f"{name}{number + 1}"] = nn.Sequential(first, *others)
    return made
