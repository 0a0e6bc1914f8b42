"""Wide residual networks (Zagoruyko and Komodakis, 2016), with RobustBench's names.

WRN-28-10 is the paper's network. Blocks are pre-activated: BatchNorm and ReLU come before each
convolution, and where a block changes the number of channels, its shortcut starts after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ttapca.errors import OptionError
from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3

STEM_CHANNELS = 16
STAGE_CHANNELS = (16, 32, 64)  # times the width
CONVOLUTIONS_OUTSIDE = 4  # the stem and one shortcut in each stage count towards the depth
CONVOLUTIONS_A_ROUND = 6  # two in a block of each stage


class WideBlock(nn.Module):
    """Two pre-activated 3x3 convolutions and a shortcut.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Of the first convolution.
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
            *[
                WideBlock(outputs if number else inputs, outputs, 1 if number else stride)
                for number in range(blocks)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks one after the other."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(ImageNetwork):
    """A wide residual network for small images.

    Args:
        depth: 6 n + 4, with n blocks in each of the three stages.
        width: Stages have 16, 32 and 64 channels times this.
        classes: Length of the logits.
        normalisation: By name or as numbers.
        input_shape: Of one image.

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
        blocks, rest = divmod(depth - CONVOLUTIONS_OUTSIDE, CONVOLUTIONS_A_ROUND)
        if rest or blocks < 1 or width < 1:
            raise OptionError(
                "A WideResNet has a depth of 6 n + 4 (10, 16, 22, 28, ...) and a width of at least "
                f"1; found depth {depth} and width {width}."
            )
        first, second, third = (channels * width for channels in STAGE_CHANNELS)
        self.conv1 = conv3x3(self.input_shape[0], STEM_CHANNELS)
        self.block1 = WideStage(blocks, STEM_CHANNELS, first, stride=1)
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
