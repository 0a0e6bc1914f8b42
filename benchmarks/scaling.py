"""The cost model of docs/scaling.md: rates of this machine, predictions, and what was measured.

The rates are measured first, on products of the shapes that the library uses; then the model
predicts fits and filters of several sizes, which are measured in their turn.

    python benchmarks/scaling.py [--quick]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import measuring
import ttapca
from common import Loader, natural_images, stem
from measuring import Goal, Result, Spread, Table
from ttapca.folding import LinearPart
from ttapca.pca import Moments
from ttapca.structured import dct_coefficients, dct_matrix

CHANNELS = 16
ROUNDS = 5
MATRICES = 9  # q x q in float64 that a folded fit holds at its peak


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second; multiply-adds unless said otherwise."""

    moments: float  # float64, the lower half of a scatter matrix
    product: float  # float64, square matrices
    eigh: float  # n^3 of a symmetric eigendecomposition
    narrow: float  # float32, a batch of 200 times a basis
    stream: float  # bytes read by a batch of one times a basis
    layer: float  # float64, forward and backward of a small convolution
    dct: float  # float32, small products along the axes of images


def seconds_of(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median, after one call that does not count."""
    return Spread.of(measuring.interleaved({"it": function}, rounds)["it"]).median


def measured_rates() -> Rates:
    """A few seconds of products."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    size = 1536
    moments, batch = Moments(size), random(250, size)
    square = random(size, size)
    symmetric = square + square.T
    basis, samples = random(2000, 3072, dtype=torch.float32), random(200, 3072, dtype=torch.float32)
    linear = LinearPart(stem(CHANNELS).conv1, (3, 16, 16))
    unit = torch.eye(linear.input_size, dtype=torch.float64)
    images, cosines = random(32, 3, 224, 224, dtype=torch.float32), dct_matrix(224).float()
    return Rates(
        moments=250 * size**2 / 2 / seconds_of(lambda: moments.update(batch)),
        product=size**3 / seconds_of(lambda: square @ square),
        eigh=size**3 / seconds_of(lambda: torch.linalg.eigh(symmetric), 3),
        narrow=200 * basis.numel() / seconds_of(lambda: samples @ basis.T),
        stream=4 * basis.numel() / seconds_of(lambda: samples[:1] @ basis.T, 4 * ROUNDS),
        layer=linear.input_size * _layer_work(linear) / seconds_of(lambda: linear.gram_rows(unit)),
        dct=images.numel() * 448 / seconds_of(lambda: dct_coefficients(images, cosines, cosines)),
    )


def _layer_work(linear: LinearPart) -> int:
    """Multiply-adds of a 3x3 convolution of one image, there and back."""
    return 2 * linear.output_size * 27


def fit_folded(rates: Rates, n: int, side: int, kept: int) -> float:
    """Seconds of a folded fit."""
    q, p = 3 * side**2, CHANNELS * side**2
    reading = n * q**2 / 2 / rates.moments
    gram = q * 2 * p * 27 / rates.layer
    decomposing = q**3 / rates.eigh
    # R^T S R, R U, R^-T U (half), and the Cholesky factor.
    products = (2 * q**3 + 1.5 * q**2 * kept + q**3 / 6) / rates.product
    signs = kept * p * 27 / rates.layer
    return reading + gram + decomposing + products + signs


def fit_exact(rates: Rates, n: int, side: int, kept: int) -> float:
    """Seconds of a fit by a p x p matrix."""
    del kept
    p = CHANNELS * side**2
    return n * p**2 / 2 / rates.moments + p**3 / rates.eigh


def fit_memory(side: int) -> float:
    """Bytes that a folded fit adds at its peak."""
    return MATRICES * 8 * (3 * side**2) ** 2


def filter_seconds(rates: Rates, batch: int, q: int, kept: int) -> float:
    """Project and rebuild: bound by arithmetic, or for small batches by reading two matrices."""
    return max(2 * batch * q * kept / rates.narrow, 2 * 4 * q * kept / rates.stream)


def dct_seconds(rates: Rates, batch: int, shape: tuple[int, int, int]) -> float:
    """Transform, scale, transform back."""
    _, height, width = shape
    return 2 * batch * math.prod(shape) * (height + width) / rates.dct


def timed_fit(route: str, n: int, side: int, kept: int) -> tuple[float, Any]:
    """In a process of its own; the memory that the fit added."""
    model, loader = stem(CHANNELS), Loader(natural_images(n, side=side))
    ttapca.fit(model, "conv1", Loader(natural_images(60, side=8)), 8, route=route)
    before = measuring.peak_memory()
    seconds, _ = measuring.timed(lambda: ttapca.fit(model, "conv1", loader, kept, route=route))
    return seconds, measuring.peak_memory() - before


def timed_filter(batch: int, side: int, kept: int) -> float:
    """Of the filter alone, unit gains."""
    fitted = ttapca.fit(stem(CHANNELS), "conv1", Loader(natural_images(kept + 50, side=side)), kept)
    spectral = fitted.spectral_filter()
    samples = natural_images(batch, side=side, seed=1).float() / 255
    with torch.no_grad():
        return seconds_of(lambda: spectral(samples), 3 * ROUNDS)


FITS = (
    ("folded", 4_000, 16, 500),
    ("folded", 20_000, 16, 500),
    ("folded", 4_000, 24, 1000),
    ("folded", 4_000, 32, 2000),
    ("folded", 12_000, 32, 2000),
    ("exact", 4_000, 8, 128),
    ("exact", 4_000, 12, 128),
)
FILTERS = ((200, 32, 2000), (200, 32, 500), (200, 16, 500), (1, 32, 2000))


def checked(rates: Rates, quick: bool) -> list[tuple[str, float, float, str]]:
    """What, predicted, measured, unit."""
    out = []
    predictions = {"folded": fit_folded, "exact": fit_exact}
    for route, n, side, kept in FITS[:1] if quick else FITS:
        q, p = 3 * side**2, CHANNELS * side**2
        what = f"{route} fit, N = {n:,}, q = {q:,}, p = {p:,}, L = {kept:,}"
        run = measuring.in_own_process(timed_fit, route, n, side, kept)
        out.append((what, predictions[route](rates, n, side, kept), run.seconds, "s"))
        if route == "folded" and side == 32:
            out.append((f"{what}: memory", fit_memory(side) / 1e9, run.result, "GB"))
    for batch, side, kept in FILTERS[2:3] if quick else FILTERS:
        q = 3 * side**2
        predicted = 1000 * filter_seconds(rates, batch, q, kept)
        what = f"folded filter, batch {batch}, q = {q:,}, L = {kept:,}"
        out.append((what, predicted, 1000 * timed_filter(batch, side, kept), "ms"))
    return out


def check_table(rows: list[tuple[str, float, float, str]]) -> Table:
    shown = [
        [what, f"{predicted:,.2f} {unit}", f"{found:,.2f} {unit}", f"{predicted / found:.2f}"]
        for what, predicted, found, unit in rows
    ]
    return Table("Predicted and measured", ["what", "predicted", "measured", "ratio"], shown)


def imagenet_table(rates: Rates) -> Table:
    """A 7x7 convolution with stride 2 from 3 x 224 x 224 to 64 x 112 x 112, and L = 2,000."""
    q, p, kept, samples, batch = 150_528, 802_816, 2000, 50_000, 64
    exact = (samples * q**2 / 2 / rates.moments + q**3 / rates.eigh) / 86_400
    passes = 2 * 2 * samples * p * (kept + 64) / rates.product / 86_400
    dct_fit = samples * q * 448 / rates.dct
    rows = [
        [
            "folded",
            f"{MATRICES * 8 * q**2 / 1e12:.1f} TB",
            f"{exact:.0f} days",
            f"{2 * 4 * q * kept / 1e9:.1f} GB",
            f"{filter_seconds(rates, batch, q, kept):.1f} s",
        ],
        [
            "randomised",
            f"{3 * 8 * p * (kept + 64) / 1e9:.0f} GB",
            f"{passes:.1f} days",
            f"{4 * p * kept / 1e9:.1f} GB",
            f"{filter_seconds(rates, batch, p, kept):.1f} s",
        ],
        [
            "DCT",
            f"{8 * 9 * 224**2 / 1e6:.0f} MB",
            f"{dct_fit:.0f} s",
            f"{4 * 2 * 224**2 / 1e6 + 4 * q / 1e6 + 8 * q / 1e6:.1f} MB",
            f"{dct_seconds(rates, batch, (3, 224, 224)):.2f} s",
        ],
    ]
    columns = [
        "basis",
        "memory of the fit",
        f"fit of {samples:,} images",
        "size of the filter",
        f"filter a batch of {batch}",
    ]
    return Table("Predicted for an ImageNet stem, 3 x 224 x 224 -> 64 x 112 x 112", columns, rows)


def run(options: argparse.Namespace) -> Result:
    rates = measured_rates()
    rows = checked(rates, options.quick)
    again = measured_rates()  # the machine may have changed its mind
    names = {
        "moments": "float64 scatter, 1e9 multiply-adds/s",
        "product": "float64 product, 1e9 multiply-adds/s",
        "eigh": "symmetric eigendecomposition, 1e9 n^3/s",
        "narrow": "float32 product, batch 200, 1e9 multiply-adds/s",
        "stream": "float32 product, batch 1, GB/s read",
        "layer": "float64 convolution there and back, 1e9 multiply-adds/s",
        "dct": "float32 DCT of 224 x 224, 1e9 multiply-adds/s",
    }
    rate_rows = [
        [text, f"{getattr(rates, name) / 1e9:.2f}", f"{getattr(again, name) / 1e9:.2f}"]
        for name, text in names.items()
    ]
    worst = max(abs(math.log(predicted / found)) for _, predicted, found, _ in rows)
    return Result(
        title="Cost model",
        text=(
            "The rates were measured before and after what they predict; where the two differ, the "
            "machine was busy and no model can be held to it."
        ),
        tables=[
            Table("Rates of this machine", ["what", "before", "after"], rate_rows),
            check_table(rows),
            imagenet_table(rates),
        ],
        goals=[
            Goal(
                "cost model, worst ratio of predicted and measured",
                math.exp(worst),
                f"{math.exp(worst):.2f}",
                1.2,
            )
        ],
        numbers={"rates": vars(rates), "rates_after": vars(again), "rows": rows},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small sizes, to see it run")
    measuring.command("scaling", run, parser)


if __name__ == "__main__":
    main()
