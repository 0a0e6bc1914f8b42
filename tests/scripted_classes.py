"""A network that was not trained, and images of five classes that it tells apart.

It is five times a mixture of channels with BatchNorm, and a linear classifier of their means: the
one that is best for normal images of equal covariance, calculated from the classes themselves.
"""

from __future__ import annotations

import functools
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn

import ttapca

CLASSES, CHANNELS, SIDE = 5, 8, 4
# Of the means of channels over an image, within a class; most of it all places have in common.
NOISE = 0.8


def centres() -> Tensor:
    """The mean of each class, shape (classes, channels)."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(CLASSES, CHANNELS, generator=generator, dtype=torch.float64)


def pictures(labels: Tensor, seed: int) -> Tensor:
    """Images of these classes, shape (images, channels, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    whole = NOISE * normal(len(labels), CHANNELS, 1, 1)
    places = normal(len(labels), CHANNELS, SIDE, SIDE)
    places = places - places.mean((2, 3), keepdim=True)
    return centres()[labels][..., None, None] + whole + 0.5 * places


def shuffled_labels(images: int, seed: int) -> Tensor:
    """Classes in no order."""
    return torch.randint(CLASSES, (images,), generator=torch.Generator().manual_seed(seed))


def labels_in_runs(images: int, length: int) -> Tensor:
    """Classes in runs of so many images."""
    return torch.arange(images) // length * 3 % CLASSES


@functools.cache
def source() -> Tensor:
    """Images to fit a filter on; not more than are measured."""
    return pictures(shuffled_labels(1000, 1), 2)


def network() -> nn.Sequential:
    """The network, in float64 and evaluation mode."""
    generator = torch.Generator().manual_seed(5)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    mixed, data = torch.eye(CHANNELS, dtype=torch.float64), source()
    shift = torch.zeros(CHANNELS, dtype=torch.float64)
    with torch.no_grad():
        for number in range(1, 6):
            drawn = torch.randn(CHANNELS, CHANNELS, generator=generator, dtype=torch.float64)
            turned = torch.linalg.qr(drawn).Q
            conv = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False).double()
            conv.weight.copy_(turned[..., None, None])
            norm = nn.BatchNorm2d(CHANNELS).double()
            data = conv(data)
            norm.running_mean.copy_(data.mean((0, 2, 3)))
            norm.running_var.copy_(data.var((0, 2, 3)))
            data = norm.eval()(data)
            scale = (norm.running_var + norm.eps).rsqrt()
            mixed = scale[:, None] * turned @ mixed
            shift = scale * (turned @ shift - norm.running_mean)
            layers |= {f"conv{number}": conv, f"bn{number}": norm}
        means = centres() @ mixed.T + shift  # of the classes, after the last layer
        inverse = torch.linalg.inv(NOISE**2 * mixed @ mixed.T)
        last = nn.Linear(CHANNELS, CLASSES).double()
        last.weight.copy_(means @ inverse)
        last.bias.copy_(-((means @ inverse) * means).sum(1) / 2)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "fc": last}
    return nn.Sequential(layers).eval()


@functools.cache
def fitted() -> ttapca.FittedFilter:
    """A filter of this network."""
    return ttapca.fit(network(), "conv1", source(), 40)


def error(logits: Tensor, labels: Tensor) -> float:
    """Share of wrong predictions in percent."""
    return float(100 * np.mean((logits.argmax(1) != labels).numpy()))
