"""What the benchmarks work on: images, the paper's stem, and filters for networks.

Benchmarks that need a trained network take it from the command line, with its training images and
their corrupted test images; without, they leave that part out.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ttapca
from ttapca import datasets, networks
from ttapca.spectral.basis import Dense
from ttapca.spectral.folded import LinearPart

SIDE = 32


def natural_images(n: int, seed: int = 0, side: int = SIDE) -> Tensor:
    """Random uint8 colour images whose spectrum falls as that of photographs does."""
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    amplitude = 1 / np.maximum(frequency, 1 / side)
    out = np.empty((n, 3, side, side), np.uint8)
    colours = np.array([[1, 1, 1], [0.3, 0, -0.3], [0.1, -0.2, 0.1]])
    chunk = max(1, 3_000_000 // (3 * side * side))
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        noise = generator.standard_normal((stop - start, 3, side, side))
        smooth = np.fft.irfft2(np.fft.rfft2(noise) * amplitude, s=(side, side))
        mixed = np.einsum("nchw,cd->ndhw", smooth, colours)
        out[start:stop] = np.clip(128 + 20 * mixed, 0, 255)
    return torch.from_numpy(out)


def stem(outputs: int = 16) -> nn.Module:
    """The first layer of the CIFAR networks: 3x3, stride 1, padded, without bias."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(3, outputs, 3, padding=1, bias=False))
    with torch.no_grad():
        model.conv1.weight.copy_(torch.randn(outputs, 3, 3, 3, generator=generator) / 5)
    return model


@dataclass(frozen=True)
class Loader:
    """Float batches of uint8 images, made as they are read."""

    images: Tensor
    batch: int = 250

    def __iter__(self) -> Iterator[Tensor]:
        return (part.float() / 255 for part in self.images.split(self.batch))


def unfolded(fitted: ttapca.FittedFilter, layer: nn.Module) -> ttapca.FittedFilter:
    """The same filter in the space of the layer's output: V = W B."""
    linear = LinearPart(layer, fitted.shape)
    parts = fitted.basis.from_components.double().T.split(250)
    return dataclasses.replace(
        fitted,
        route="exact",
        shape=fitted.output_shape,
        basis=Dense(torch.cat([linear.apply(part).float() for part in parts]).T),
        center_=fitted.mean_,
    )


def fitted_stem(network: nn.Module, components: int, images: int = 4000) -> ttapca.FittedFilter:
    """A filter at the first layer of a network, fitted on some images."""
    return ttapca.fit(network, "conv1", Loader(natural_images(images)), components)


# A noise, a blur, one that shrinks the spectrum, one that is neither.
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
SEVERITY = 5


def add_trained_options(parser: argparse.ArgumentParser) -> None:
    """A trained network and its data; all three or none."""
    parser.add_argument("--network", help="weights of a CIFAR-10 network")
    parser.add_argument("--normalise", default="cifar10", help="what the network expects")
    parser.add_argument("--train", type=Path, help="a folder of CIFAR-10")
    parser.add_argument("--corrupted", type=Path, help="a folder of CIFAR-10-C")
    parser.add_argument("--images", type=int, default=2000, help="test images a corruption")
    parser.add_argument("--fit-images", type=int, default=10_000, help="training images")


def is_trained(options: argparse.Namespace) -> bool:
    """Whether there is all that the trained part needs."""
    return bool(options.network and options.train and options.corrupted)


def trained_network(options: argparse.Namespace) -> nn.Module:
    """The network, in evaluation mode."""
    return networks.load(options.network, normalisation=options.normalise).eval()


def training_batches(options: argparse.Namespace) -> datasets.TensorBatches:
    """The first training images."""
    images = datasets.load(str(options.train), "train")[: options.fit_images]
    return datasets.TensorBatches(images, 250)


def errors_of(
    options: argparse.Namespace, fitted: ttapca.FittedFilter, method: str, **chosen: object
) -> dict[str, float]:
    """Error in percent of a method with this filter, episodic, by corruption."""
    out = {}
    network = trained_network(options)
    for corruption in CORRUPTIONS:
        images = datasets.read_cifar_c(options.corrupted, corruption, SEVERITY)[: options.images]
        adapted = ttapca.adapt(network, method, filter=fitted, **chosen)
        out[corruption] = networks.evaluate(adapted, images).error
        adapted.detach()
    return out
