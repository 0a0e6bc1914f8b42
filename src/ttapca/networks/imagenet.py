"""ResNets of four stages (He and others, 2016), with layers named as in torchvision's weights.

For photographs the stem has 7x7 weights and stride 2, and a pooling of 3x3 with stride 2 follows.
For images of 32 x 32 pixels the stem is 3x3 and there is no pooling, as is usual for CIFAR. Blocks
are those of the three-stage ResNets up to depth 34, bottlenecks beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from ttapca.networks.blocks import BasicBlock, Bottleneck, stages
from ttapca.networks.network import conv3x3

IMAGENET_CLASSES = 1000
IMAGENET_SHAPE = (3, 224, 224)
STEM = 64
WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # a bottleneck returns this many times as many channels
EARLY_STRIDE = "-early-stride"

BLOCKS = {  # in each of the four stages
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
SHALLOW = (18, 34)  # these have basic blocks


def imagenet_resnet(
    channels: int, classes: int, *, depth: int, early_stride: bool = False
) -> dict[str, nn.Module]:
    """Make the layers of a ResNet for photographs.

    With `early_stride`, which bottlenecks alone know, a stage halves the resolution in its first
    1x1 convolution instead of its first 3x3.
    """
    block: Callable[[int, int, int], nn.Module] = BasicBlock
    widths: tuple[int, ...] = WIDTHS
    if depth not in SHALLOW:
        block = partial(Bottleneck, early_stride=early_stride)
        widths = tuple(EXPANSION * width for width in WIDTHS)
    return {
        "conv1": nn.Conv2d(channels, STEM, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(STEM),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
        **stages("layer", block, BLOCKS[depth], (STEM, *widths)),
        "fc": nn.Linear(widths[-1], classes),
    }


def small_image_resnet(
    channels: int, classes: int, *, depth: int, width: int = STEM
) -> dict[str, nn.Module]:
    """Make the layers of such a ResNet for small images, with `width` channels in its stem."""
    widths = (width, *(width * each // STEM for each in WIDTHS))
    return {
        "conv1": conv3x3(channels, width),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(),
        **stages("layer", BasicBlock, BLOCKS[depth], widths),
        "fc": nn.Linear(widths[-1], classes),
    }


# The usual ones come first: by names and shapes they cannot be told from those that stride early.
IMAGENET_RESNETS = {
    **{f"resnet{depth}": partial(imagenet_resnet, depth=depth) for depth in BLOCKS},
    **{
        f"resnet{depth}{EARLY_STRIDE}": partial(imagenet_resnet, depth=depth, early_stride=True)
        for depth in BLOCKS
        if depth not in SHALLOW
    },
}

SMALL_IMAGE_RESNETS = {
    **{f"resnet{depth}-cifar": partial(small_image_resnet, depth=depth) for depth in SHALLOW},
    "resnet18-cifar-32": partial(small_image_resnet, depth=18, width=32),
}
