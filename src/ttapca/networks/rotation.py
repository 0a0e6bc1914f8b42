"""A second task for test-time training: tell by how much an image was turned (Sun, 2020).

The head shares the network up to a split layer and has its own weights after it. The network does
not change: a hook takes the output of the split layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ttapca.errors import LayerOutputError, ShapeError
from ttapca.networks.network import CIFAR_SHAPE, conv3x3, initialise
from ttapca.support.modules import evaluation_mode, find_layer, stopped_at
from ttapca.support.norm_layers import with_running_statistics

TURNS = 4  # 0, 90, 180 and 270 degrees
HEAD_CHANNELS = 64
HEAD_GROUPS = 8
HEAD_PREFIX = "rotation_head."


class RotationHead(nn.Module):
    """Map features of the split layer to four logits.

    It has GroupNorm, because test-time training often sees one image at a time.

    Example:
        >>> RotationHead(32)(torch.rand(2, 32, 8, 8)).shape
        torch.Size([2, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, HEAD_CHANNELS, stride=2)
        self.norm1 = nn.GroupNorm(HEAD_GROUPS, HEAD_CHANNELS)
        self.conv2 = conv3x3(HEAD_CHANNELS, HEAD_CHANNELS)
        self.norm2 = nn.GroupNorm(HEAD_GROUPS, HEAD_CHANNELS)
        self.fc = nn.Linear(HEAD_CHANNELS, TURNS)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits of shape (batch, 4) for features of shape (batch, channels, h, w)."""
        x = torch.relu(self.norm1(self.conv1(features)))
        x = torch.relu(self.norm2(self.conv2(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class RotationNetwork(nn.Module):
    """A network and its rotation head, which takes the output of the layer `split`.

    Calling it returns the network's logits; `rotation_logits` returns those of the head.

    Example:
        >>> from ttapca.networks import build
        >>> twofold = add_rotation_head(build("resnet20"), "layer2", torch.Generator())
        >>> twofold.rotation_logits(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """

    def __init__(self, network: nn.Module, split: str, head: RotationHead) -> None:
        super().__init__()
        find_layer(network, split)
        self.network = network
        self.split = split
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's logits."""
        logits: Tensor = self.network(images)
        return logits

    def rotation_logits(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, 4); only the shared part of the network runs."""
        logits: Tensor = self.head(_features_at(self.network, self.split, images))
        return logits


def add_rotation_head(
    network: nn.Module,
    split: str,
    generator: torch.Generator,
    input_shape: tuple[int, ...] = CIFAR_SHAPE,
) -> RotationNetwork:
    """Put an untrained rotation head on a network, which is not changed.

    `split` is the dotted path of the last shared layer; its output has shape (batch, channels, h,
    w) for images of `input_shape`.

    Example:
        >>> from ttapca.networks import build
        >>> head = add_rotation_head(build("resnet20"), "layer2", torch.Generator()).head
        >>> head.conv1.in_channels
        32
    """
    with torch.no_grad(), evaluation_mode(network):
        channels = _features_at(network, split, torch.zeros(1, *input_shape)).shape[1]
    with torch.random.fork_rng(devices=[]):
        head = RotationHead(channels)
    initialise(head, generator)
    return RotationNetwork(network, split, head)


def _features_at(network: nn.Module, split: str, images: Tensor) -> Tensor:
    """Return the output of a layer without running the rest of the network."""
    with stopped_at(find_layer(network, split)) as caught:
        network(images)
    if not caught or not isinstance(caught[0], Tensor) or caught[0].dim() != 4:
        raise LayerOutputError(
            "A rotation head needs a layer that is called and returns a tensor of shape (batch, "
            f"channels, height, width); `{split}` does not. Choose another layer."
        )
    features: Tensor = caught[0]
    return features


def published_name(name: str) -> str:
    """Return the name in a checkpoint of a tensor of a `RotationNetwork`."""
    part, _, rest = name.partition(".")
    return rest if part == "network" else HEAD_PREFIX + rest


def turn(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Turn each square image, (batch, channels, side, side), by random quarter turns.

    Also return the numbers of quarter turns, shape (batch,).

    Example:
        >>> images = torch.arange(4).reshape(1, 1, 2, 2)
        >>> turned, quarters = turn(images, torch.Generator().manual_seed(0))
        >>> bool((turned == torch.rot90(images, int(quarters), (2, 3))).all())
        True
    """
    height, width = images.shape[2:]
    if height != width:
        raise ShapeError(
            f"Images that are turned by quarters must be square; found {height} x {width} pixels. "
            "Cut out a square (pictures: `size=`), or leave out the rotation head."
        )
    quarters = torch.randint(0, TURNS, (len(images),), generator=generator)
    turned = images.clone()
    for number in range(1, TURNS):
        chosen = quarters == number
        turned[chosen] = torch.rot90(images[chosen], number, (2, 3))
    return turned, quarters


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Keep BatchNorm's running statistics as they are while turned images run in training mode."""
    layers = with_running_statistics(model).values()
    before = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    for layer, (_, count) in zip(layers, before, strict=True):
        layer.momentum = 0.0
        layer.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for layer, (momentum, count) in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.num_batches_tracked = count
