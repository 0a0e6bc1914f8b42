"""Pre-activated residual networks with GroupNorm, as test-time training and MEMO use them.

GroupNorm keeps no statistics of the training data: these are networks that methods built on
BatchNorm have nothing to say about. Shortcuts have no parameters: an average, and zero channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3
from ttapca.networks.resnet import CHANNELS, blocks_of_depth

GROUPS = 8


class AverageShortcut(nn.Module):
    """Average over squares of two by two pixels, and add channels of zeros at the end."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._added = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / 2, w / 2)."""
        return F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self._added))


class GroupNormBlock(nn.Module):
    """Two pre-activated 3x3 convolutions and a shortcut from before the first norm.

    The norms are called `bn` as in the published weights, although they are GroupNorm.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out; where they differ, the resolution is halved.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bn1 = nn.GroupNorm(GROUPS, inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(inputs, outputs, stride=1 if inputs == outputs else 2)
        self.bn2 = nn.GroupNorm(GROUPS, outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs)
        self.downsample = None if inputs == outputs else AverageShortcut(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(self.relu1(self.bn1(x))))))
        return out + (x if self.downsample is None else self.downsample(x))


class GroupNormResNet(ImageNetwork):
    """A pre-activated residual network with GroupNorm for small images.

    Args:
        depth: 6 n + 2, with n blocks in each of the three stages.
        classes: Length of the logits.
        normalisation: By name or as numbers.
        input_shape: Of one image.

    Raises:
        OptionError: There is no network of that depth.

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
        blocks = blocks_of_depth(depth)
        first, second, third = CHANNELS
        self.conv1 = conv3x3(self.input_shape[0], first)
        self.layer1 = _stage(blocks, first, first)
        self.layer2 = _stage(blocks, first, second)
        self.layer3 = _stage(blocks, second, third)
        self.bn = nn.GroupNorm(GROUPS, third)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(third, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(self.normalise(images)))))
        logits: Tensor = self.fc(self.relu(self.bn(x)).mean((2, 3)))
        return logits


def _stage(blocks: int, inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        GroupNormBlock(inputs, outputs),
        *[GroupNormBlock(outputs, outputs) for _ in range(blocks - 1)],
    )
