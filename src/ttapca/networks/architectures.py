"""The architectures by name, with layers named as in published weights (docs/networks.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import Number, OneOf, check_option
from ttapca.networks.network import (
    CIFAR_SHAPE,
    NORMS,
    ImageNetwork,
    Normalisation,
    Recipe,
    conv3x3,
    initialise,
)
from ttapca.networks.resnets import IMAGENET_RESNETS, SMALL_RESNETS

DEFAULT_SEED = 0
DIGITS_SHAPE = (1, 8, 8)
CIFAR_CLASSES = 10
IMAGENET_CLASSES = 1000
IMAGENET_SHAPE = (3, 224, 224)
CLASSIFIERS = ("fc", "classifier")  # take the average over all pixels
# Widening, channels, blocks and first stride of MobileNetV2's stages: table 2 of its paper.
MOBILENET_STAGES = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
MOBILENET_STEM, MOBILENET_HEAD, DROPOUT = 32, 1280, 0.2
CCT_STEM, CCT_WIDTH, CCT_HEADS, CCT_BLOCKS = 32, 128, 2, 2  # of the compact transformer


class LayeredNetwork(ImageNetwork):
    """A network that runs its layers one after the other, and averages over pixels at the end."""

    def __init__(
        self, recipe: Recipe, classes: int, scale: str | Normalisation, input_shape: Sequence[int]
    ) -> None:
        super().__init__(classes, scale, input_shape)
        self.normalise.any_size = False
        for name, layer in recipe(self.input_shape[0], classes).items():
            self.add_module(name, layer)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images in [0, 1]."""
        x = images
        for name, layer in self.named_children():  # the first one normalises
            x = layer(x.mean((2, 3)) if name in CLASSIFIERS else x)
        return x


def small_cnn(channels: int, classes: int) -> dict[str, nn.Module]:
    """Make the layers of a network that trains in seconds: for the digits and for tests."""
    layers: dict[str, nn.Module] = {}
    for number, (width, stride) in enumerate(((16, 1), (32, 2), (64, 1)), 1):
        layers[f"conv{number}"] = conv3x3(channels, width, stride)
        layers[f"bn{number}"] = nn.BatchNorm2d(width)
        layers[f"relu{number}"] = nn.ReLU()
        channels = width
    return {**layers, "fc": nn.Linear(channels, classes)}


class Attention(nn.Module):
    """Every token looks at all tokens, in several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, count, width = tokens.shape
        parts = self.qkv(tokens).reshape(batch, count, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, ...)
        heads = F.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = self.proj(heads.transpose(1, 2).reshape(batch, count, width))
        return mixed


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each after LayerNorm and with a shortcut around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.linear2 = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        more: Tensor = self.linear2(self.gelu(self.linear1(self.norm2(tokens))))
        return tokens + more


class CompactTransformer(ImageNetwork):
    """CCT-2/3x2 of Hassani and others (2021): convolutions make tokens, without a class token."""

    def __init__(
        self, classes: int, normalisation: str | Normalisation, input_shape: Sequence[int]
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        channels, height, width = self.input_shape
        self.conv1 = conv3x3(channels, CCT_STEM)
        self.conv2 = conv3x3(CCT_STEM, CCT_WIDTH)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)  # halves a side, and rounds up
        tokens = -(-height // 4) * -(-width // 4)
        self.position = nn.Parameter(torch.zeros(1, tokens, CCT_WIDTH))
        blocks = (TransformerBlock(CCT_WIDTH, CCT_HEADS) for _ in range(CCT_BLOCKS))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(CCT_WIDTH)
        self.importance = nn.Linear(CCT_WIDTH, 1)
        self.fc = nn.Linear(CCT_WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images in [0, 1]."""
        x = self.pool(self.relu(self.conv1(self.normalise(images))))
        x = self.pool(self.relu(self.conv2(x)))
        tokens = self.norm(self.blocks(x.flatten(2).transpose(1, 2) + self.position))
        weights = self.importance(tokens).softmax(1)  # (batch, tokens, 1)
        logits: Tensor = self.fc((weights * tokens).sum(1))
        return logits


def convolved(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Make a padded convolution with BatchNorm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """A block of MobileNetV2; it has a shortcut if input and output have the same shape."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int) -> None:
        super().__init__()
        width = inputs * widening
        self.conv = nn.Sequential(
            *([convolved(inputs, width, 1)] if widening != 1 else []),
            convolved(width, width, 3, stride, groups=width),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self._shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        out: Tensor = self.conv(x)
        return x + out if self._shortcut else out


def mobilenet_v2(channels: int, classes: int) -> dict[str, nn.Module]:
    """Make the layers of MobileNetV2 (Sandler and others, 2018) with torchvision's names."""
    blocks, inputs = list[nn.Module](), MOBILENET_STEM
    for widening, outputs, count, stride in MOBILENET_STAGES:
        for number in range(count):
            blocks.append(InvertedResidual(inputs, outputs, 1 if number else stride, widening))
            inputs = outputs
    stem = convolved(channels, MOBILENET_STEM, 3, 2)
    features = nn.Sequential(stem, *blocks, convolved(inputs, MOBILENET_HEAD, 1))
    classifier = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(MOBILENET_HEAD, classes))
    return {"features": features, "classifier": classifier}


_FOR_SMALL_IMAGES = {**SMALL_RESNETS, "small-cnn": small_cnn}
_FOR_PHOTOGRAPHS: dict[str, Recipe] = {**IMAGENET_RESNETS, "mobilenet-v2": mobilenet_v2}
# Makes a network from the number of classes, the normalisation and the shape of an image.
Maker = Callable[[int, str | Normalisation, Sequence[int]], ImageNetwork]
ARCHITECTURES: dict[str, Maker] = {
    **{
        name: partial(LayeredNetwork, recipe)
        for name, recipe in {**_FOR_SMALL_IMAGES, **_FOR_PHOTOGRAPHS}.items()
    },
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
        classes: The number of logits for an image; by default 10, and 1,000 for networks of
            photographs.
        normalisation: Of images in [0, 1]: one of `NORMALISATIONS`, or numbers.
        input_shape: The shape of one image: channels, height, width; by default 3 x 32 x 32, and
            3 x 224 x 224 for networks of photographs.
        eps: Number that norms add to a variance; by default the architecture's own, mostly 1e-5.
        generator: Draws the weights; by default one with a fixed seed.

    Example:
        >>> network = build("wrn-16-2", classes=100, normalisation="cifar100")
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    make = _find(architecture)
    if classes is None:
        classes = IMAGENET_CLASSES if architecture in _FOR_PHOTOGRAPHS else CIFAR_CLASSES
    input_shape = default_shape(architecture) if input_shape is None else input_shape
    with torch.random.fork_rng(devices=[]):  # constructors draw weights that are drawn again
        network = make(classes, normalisation, input_shape)
    initialise(network, generator or torch.Generator().manual_seed(DEFAULT_SEED))
    if eps is not None:
        check_option("eps", eps, Number(above=0, below=1))
        for module in network.modules():
            if isinstance(module, NORMS):
                module.eps = eps
    return network


def default_shape(architecture: str) -> tuple[int, int, int]:
    """Return the shape of the images that an architecture is mostly used with."""
    return IMAGENET_SHAPE if architecture in _FOR_PHOTOGRAPHS else CIFAR_SHAPE


@lru_cache(maxsize=256)  # enough for all architectures and a few files
def shapes_of(architecture: str, classes: int, channels: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of an architecture's state dict, without making its weights."""
    with torch.device("meta"):
        network = _find(architecture)(classes, "half", (channels, *CIFAR_SHAPE[1:]))
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def _find(architecture: str) -> Maker:
    check_option("architecture", architecture, OneOf(tuple(ARCHITECTURES)))
    return ARCHITECTURES[architecture]
