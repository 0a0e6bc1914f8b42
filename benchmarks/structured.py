"""The cosine basis: 224 x 224 images within a gigabyte, and how far it is from the PCA.

The first part needs nothing. With a trained network, its training images and CIFAR-10-C, the second
part is measured on real images and the error of closed-form gains in both bases is compared.

    python benchmarks/structured.py [--network FILE --train DIR --corrupted DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import measuring
import ttapca
from common import (
    CORRUPTIONS,
    add_trained_options,
    errors_of,
    is_trained,
    natural_images,
    trained_network,
    training_batches,
)
from measuring import Goal, Result, Spread, Table
from ttapca import PCA, Moments
from ttapca.spectral.cosine import CoefficientMoments, fit_channel_dct
from ttapca.spectral.cosine_transform import dct_coefficients, dct_matrix

SIDE = 224
BATCH = 16
KEPT = (50, 200, 500, 1000, 2000)
COMPONENTS = 2000


class Stream:
    """Images made as they are read: no more than a batch of them is ever there."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Tensor]:
        """Float batches."""
        for seed in range(self.n // BATCH):
            yield natural_images(BATCH, seed=seed, side=SIDE).float() / 255


def imagenet_stem() -> nn.Module:
    """The first layer of the ImageNet ResNets: 7x7, stride 2, 3 -> 64."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False))
    return model.eval()


def large(n: int) -> tuple[float, Any]:
    """Fit and filter, in a process of its own."""
    reading, _ = measuring.timed(lambda: [batch.sum() for batch in Stream(n)])
    model = imagenet_stem()
    total, fitted = measuring.timed(lambda: ttapca.fit(model, "conv1", Stream(n), route="dct"))
    batch = natural_images(BATCH, seed=10_000, side=SIDE).float() / 255
    batch += 0.2 * torch.randn(batch.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        few = batch[:2]  # outputs are large: all of them would be most of the memory
        plain = model(few)
        seconds = {"plain": lambda: model(batch)}
        rounds = measuring.interleaved(seconds, 7)
        attachment = ttapca.attach(model, fitted, "wiener")
        rounds |= measuring.interleaved({"filtered": lambda: model(batch)}, 7)
        attachment.detach()
        ttapca.attach(model, fitted)
        difference = (model(few) - plain).abs().max() / plain.abs().max()
    return total - reading, {
        "components": fitted.n_components_,
        "filtered": Spread.of(rounds["filtered"]).median,
        "plain": Spread.of(rounds["plain"]).median,
        "identity": float(difference),
    }


def variance_kept(batches: list[Tensor]) -> tuple[list[list[str]], dict[str, Any]]:
    """Share of the variance in the leading components, by both bases, and what is correlated."""
    shape = tuple(batches[0].shape[1:])
    moments, coefficients = Moments(batches[0][0].numel()), CoefficientMoments(shape)
    for batch in batches:
        moments.update(batch)
        coefficients.update(batch)
    pca = PCA.from_moments(moments)
    dct = fit_channel_dct(coefficients, None)
    exact = pca.singular_values.square().cumsum(0) / moments.scatter.trace()
    found = dct.singular_values.square().cumsum(0) / moments.scatter.trace()
    rows = [
        [
            f"{kept:,}",
            f"{100 * float(exact[kept - 1]):.2f} %",
            f"{100 * float(found[kept - 1]):.2f} %",
        ]
        for kept in KEPT
        if kept <= len(exact)
    ]
    # The covariance in the cosine basis: what is not on its diagonal is what the basis misses.
    cosines = dct_matrix(shape[1]), dct_matrix(shape[2])
    turned = _turned(moments.scatter, shape, dct.rotation, *cosines)
    off = 1 - float(turned.diagonal().square().sum() / turned.square().sum())
    numbers = {"exact": [float(exact[k - 1]) for k in KEPT], "off_diagonal": off}
    return rows, numbers


def _turned(
    scatter: Tensor, shape: tuple[int, ...], rotation: Tensor, height: Tensor, width: Tensor
) -> Tensor:
    def columns(matrix: Tensor) -> Tensor:
        images = dct_coefficients(matrix.reshape(-1, *shape), height, width)
        return torch.einsum("nchw,ck->nkhw", images, rotation).flatten(1)

    return columns(columns(scatter).T)


def errors(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Error in percent with the exact basis and with cosines, by corruption."""
    out = {}
    for route in ("folded", "dct"):
        network, batches = trained_network(options), training_batches(options)
        fitted = ttapca.fit(network, "conv1", batches, COMPONENTS, route=route)
        for statistics in ("source", "mixed"):
            name = f"{route}, {statistics} statistics"
            out[name] = errors_of(options, fitted, "wiener", statistics=statistics)
    return out


def run(options: argparse.Namespace) -> Result:
    found = measuring.in_own_process(large, options.large_images)
    facts = found.result
    rows = [
        ["fit", f"{found.seconds:.1f} s for {options.large_images:,} images, reading not counted"],
        ["components", f"{facts['components']:,}"],
        [f"the layer, batch of {BATCH}", f"{1000 * facts['plain']:.0f} ms"],
        [
            f"the layer with closed-form gains, batch of {BATCH}",
            f"{1000 * facts['filtered']:.0f} ms",
        ],
        ["unit gains: largest relative difference", f"{facts['identity']:.1e}"],
        ["peak memory, fit and filter", f"{found.peak_gb:.2f} GB"],
    ]
    tables = [Table("An ImageNet stem, 3 x 224 x 224 -> 64 x 112 x 112", ["", ""], rows)]
    if options.train:
        batches = [images for images, _ in training_batches(options)]
        source = f"{options.fit_images:,} CIFAR-10 training images"
    else:
        batches = [natural_images(4000).float() / 255]
        source = "4,000 random images with the spectrum of photographs"
    kept, numbers = variance_kept(batches)
    title = (
        f"Variance in the leading components, {source}; {100 * numbers['off_diagonal']:.1f} % of "
        "the squared covariance is off the diagonal in the cosine basis"
    )
    tables.append(Table(title, ["components", "PCA", "channel PCA x DCT"], kept))
    if is_trained(options):
        numbers["errors"] = errors(options)
        title = (
            f"Error in percent, wiener, {COMPONENTS:,} components, first {options.images:,} images"
        )
        lines = [
            [name, *(f"{value:.2f}" for value in each.values())]
            for name, each in numbers["errors"].items()
        ]
        tables.append(Table(title, ["basis", *CORRUPTIONS], lines))
    peak = found.peak_gb
    return Result(
        title="Large images",
        text="Channel PCA x two-dimensional DCT, see docs/scaling.md.",
        tables=tables,
        goals=[Goal("fit and filter 224 x 224: memory", peak, f"{peak:.2f} GB", 1.0, unit=" GB")],
        numbers={"large": facts, "peak_gb": peak, "seconds": found.seconds, **numbers},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained_options(parser)
    parser.add_argument("--large-images", type=int, default=640)
    measuring.command("structured", run, parser)


if __name__ == "__main__":
    main()
