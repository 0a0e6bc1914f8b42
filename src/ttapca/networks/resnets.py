"""ResNets: blocks with a shortcut, in three or four stages, with the names of published weights.

Three stages are for small images (He and others, 2016; Zagoruyko and Komodakis, 2016), four for
photographs; with a stem of 3x3 and no pooling these are for small images as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.networks.network import Recipe, conv3x3

GROUPS = 8
SMALL_WIDTHS = (16, 16, 32, 64)  # channels of the stem and the three stages
WIDTHS = (64, 64, 128, 256, 512)  # of the stem and the four stages
EXPANSION = 4  # a bottleneck returns this many times as many channels
BOTTLENECK_WIDTHS = (WIDTHS[0], *(EXPANSION * each for each in WIDTHS[1:]))
EARLY_STRIDE = "-early-stride"
BLOCKS = {  # in each of the four stages
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
SHALLOW = (18, 34)  # these have basic blocks, the others bottlenecks

Block = Callable[[int, int, int], nn.Module]  # made from inputs, outputs and stride


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
    """Two 3x3 convolutions with BatchNorm, and a shortcut, which adds zeros or has weights."""

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
    """Convolutions of 1x1, 3x3 and 1x1, the `early_stride` (He, 2016) on the first; a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, early_stride: bool = False) -> None:
        super().__init__()
        width = outputs // EXPANSION
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
    """GroupNorm (`bn` in the published weights), ReLU and 3x3 convolution, twice; a shortcut."""

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
    """BatchNorm, ReLU and 3x3 convolution, twice; wider ones begin the shortcut after the ReLU."""

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
    name: str, block: Block, blocks: Sequence[int], widths: Sequence[int]
) -> dict[str, nn.Module]:
    """Make stages of these numbers of blocks; all but the first stage halve the resolution."""
    made: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        first = block(inputs, outputs, 1 if number == 0 else 2)
        others = [block(outputs, outputs, 1) for _ in range(blocks[number] - 1)]
        made[f"{name}{number + 1}"] = nn.Sequential(first, *others)
    return made


def resnet(
    channels: int,
    classes: int,
    *,
    blocks: Sequence[int],
    widths: Sequence[int],
    block: Block = BasicBlock,
    for_photographs: bool = False,
) -> dict[str, nn.Module]:
    """Make the layers of a ResNet; one for photographs halves them twice before its stages."""
    first, pool = conv3x3(channels, widths[0]), dict[str, nn.Module]()
    if for_photographs:
        first = nn.Conv2d(channels, widths[0], 7, stride=2, padding=3, bias=False)
        pool = {"maxpool": nn.MaxPool2d(3, stride=2, padding=1)}
    return {
        "conv1": first,
        "bn1": nn.BatchNorm2d(widths[0]),
        "relu": nn.ReLU(),
        **pool,
        **stages("layer", block, blocks, widths),
        "fc": nn.Linear(widths[-1], classes),
    }


def group_norm_resnet(channels: int, classes: int, *, depth: int) -> dict[str, nn.Module]:
    """Make the layers of a ResNet with GroupNorm, of depth 6 n + 2."""
    return {
        "conv1": conv3x3(channels, SMALL_WIDTHS[0]),
        **stages("layer", GroupNormBlock, _blocks(depth, 2), SMALL_WIDTHS),
        "bn": nn.GroupNorm(GROUPS, SMALL_WIDTHS[-1]),
        "relu": nn.ReLU(),
        "fc": nn.Linear(SMALL_WIDTHS[-1], classes),
    }


def wide_resnet(channels: int, classes: int, *, depth: int, width: int) -> dict[str, nn.Module]:
    """Make the layers of a WideResNet of depth 6 n + 4, with stages `width` times as wide."""
    widths = (SMALL_WIDTHS[0], *(width * each for each in SMALL_WIDTHS[1:]))
    wide = stages("block", WideBlock, _blocks(depth, 4), widths)
    return {
        "conv1": conv3x3(channels, SMALL_WIDTHS[0]),
        # RobustBench wraps each stage once more, under the name `layer`.
        **{name: nn.Sequential(OrderedDict(layer=stage)) for name, stage in wide.items()},
        "bn1": nn.BatchNorm2d(widths[-1]),
        "relu": nn.ReLU(),
        "fc": nn.Linear(widths[-1], classes),
    }


def _blocks(depth: int, others: int) -> tuple[int, int, int]:
    """Return the blocks of each of the three stages; `others` layers lie outside of them."""
    blocks = (depth - others) // 6  # two layers in a block of each stage
    return blocks, blocks, blocks


_WIDE = (
    *((10, 1), (16, 1), (16, 2), (16, 4), (16, 8), (22, 2), (28, 2), (28, 4), (28, 10)),
    *((34, 10), (40, 1), (40, 2), (40, 4), (70, 16)),
)
_DEPTHS = (20, 32, 44, 56, 110)
_ZEROS = partial(BasicBlock, zero_shortcut=True)


def _small(depth: int, block: Block = BasicBlock) -> Recipe:
    return partial(resnet, blocks=_blocks(depth, 2), widths=SMALL_WIDTHS, block=block)


def _large(depth: int, early_stride: bool = False) -> Recipe:
    block: Block = partial(Bottleneck, early_stride=early_stride)
    block, widths = (BasicBlock, WIDTHS) if depth in SHALLOW else (block, BOTTLENECK_WIDTHS)
    blocks = BLOCKS[depth]
    return partial(resnet, blocks=blocks, widths=widths, block=block, for_photographs=True)


SMALL_RESNETS: dict[str, Recipe] = {
    **{
        f"wrn-{depth}-{width}": partial(wide_resnet, depth=depth, width=width)
        for depth, width in _WIDE
    },
    **{f"resnet{depth}": _small(depth) for depth in _DEPTHS},
    **{f"resnet{depth}-zeros": _small(depth, _ZEROS) for depth in _DEPTHS},
    "resnet26-gn": partial(group_norm_resnet, depth=26),
    "resnet18-cifar": partial(resnet, blocks=BLOCKS[18], widths=WIDTHS),
    "resnet34-cifar": partial(resnet, blocks=BLOCKS[34], widths=WIDTHS),
    "resnet18-cifar-32": partial(resnet, blocks=BLOCKS[18], widths=(32, 32, 64, 128, 256)),
}
# Those with an early stride come last: names and shapes are the same, and the first one is found.
IMAGENET_RESNETS: dict[str, Recipe] = {
    **{f"resnet{depth}": _large(depth) for depth in BLOCKS},
    **{f"resnet{d}{EARLY_STRIDE}": _large(d, True) for d in BLOCKS if d not in SHALLOW},
}
