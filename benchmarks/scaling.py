"""The cost model of docs/scaling.md: what it predicts, and what was measured.

The model counts operations. How many of them this machine does in a second is measured on single
operations of the same size, right before and right after what is predicted: a neighbour that slows
one slows the other.

    python benchmarks/scaling.py [--quick]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import measuring
import ttapca
from common import Loader, natural_images, stem
from measuring import Goal, Result, Spread, Table
from ttapca.spectral.cosine_transform import dct_coefficients, dct_matrix
from ttapca.spectral.folded import CHUNK_NUMBERS, LinearPart
from ttapca.spectral.pca import Moments
from ttapca.spectral.position_sample import HELD_OUT, SAMPLES
from ttapca.support.process import forget_peak_memory

CHANNELS = 16
ROUNDS = 5
MATRICES = 6  # q x q in float64 that a folded fit holds at its peak, beside its result
WORK = 0.1e9  # bytes: chunks of work space, and buffers of the libraries below
PASSES = 6  # over the samples, beside the products: flatten, centre, add the mean


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second; multiply-adds unless said otherwise."""

    moments: float  # float64, the lower half of a scatter matrix
    product: float  # float64, square matrices
    eigh: float  # n^3 of a symmetric eigendecomposition
    layer: float  # float64, forward and backward of a small convolution


@dataclass(frozen=True)
class FilterRates:
    """The same for filters in float32."""

    project: float  # batch times basis
    rebuild: float  # components times the other basis
    stream: float  # bytes read and written


def seconds_of(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median, after one call that does not count."""
    return Spread.of(measuring.interleaved({"it": function}, rounds)["it"]).median


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def fit_rates(size: int, side: int) -> Rates:
    """Rates of what a fit consists of, for matrices of `size` rows and images of this side."""
    moments, batch = Moments(size), random(250, size)
    square = random(size, size)
    symmetric = square + square.T
    linear = LinearPart(stem(CHANNELS).conv1, (3, side, side))
    some = random(CHUNK_NUMBERS // linear.output_size, linear.input_size)
    rounds = 1 if size > 2000 else ROUNDS
    return Rates(
        moments=250 * size**2 / 2 / seconds_of(lambda: moments.update(batch)),
        product=size**3 / seconds_of(lambda: square @ square, rounds),
        eigh=size**3 / seconds_of(lambda: torch.linalg.eigh(symmetric), rounds),
        layer=len(some) * _layer_work(linear) / seconds_of(lambda: linear.gram_rows(some), 3),
    )


def _layer_work(linear: LinearPart) -> int:
    """Multiply-adds of a 3x3 convolution of one image, there and back."""
    return 2 * linear.output_size * 27


def filter_rates(batch: int, q: int, kept: int) -> FilterRates:
    """Rates of what a filter consists of."""
    # Laid out as in the filter: components lie side by side.
    basis = random(kept, q, dtype=torch.float32)
    samples, components = random(batch, q).float(), random(batch, kept).float()
    numbers, work = samples.numel(), batch * basis.numel()
    return FilterRates(
        project=work / seconds_of(lambda: samples @ basis.T, 3 * ROUNDS),
        rebuild=work / seconds_of(lambda: components @ basis, 3 * ROUNDS),
        stream=8 * numbers / seconds_of(lambda: samples * 2, 3 * ROUNDS),
    )


def cosine_rate() -> float:
    """Multiply-adds a second of the DCT of 224 x 224 images."""
    images, cosines = random(32, 3, 224, 224, dtype=torch.float32), dct_matrix(224).float()
    return images.numel() * 448 / seconds_of(lambda: dct_coefficients(images, cosines, cosines))


def mean_of(one: Any, two: Any) -> Any:
    """Rates that lie in the middle of two measurements."""
    return type(one)(**{name: (rate + getattr(two, name)) / 2 for name, rate in vars(one).items()})


def fit_folded(rates: Rates, n: int, q: int, p: int, kept: int) -> float:
    """Seconds of a folded fit; its calibration decomposes a second time."""
    gram = q * 2 * p * 27 / rates.layer
    # R^T S R, R U, R^-T U (half), and the Cholesky factor.
    products = (2 * 2 * q**3 + 2.5 * q**2 * kept + q**3 / 6) / rates.product
    signs = kept * p * 27 / rates.layer
    return moments_and_roots(rates, n, q, kept) + gram + products + signs


def fit_exact(rates: Rates, n: int, q: int, p: int, kept: int) -> float:
    """Seconds of a fit by a p x p matrix."""
    del q
    return moments_and_roots(rates, n, p, kept)


def moments_and_roots(rates: Rates, n: int, size: int, kept: int) -> float:
    """What both have in common: reading, two eigendecompositions, energies of what is held out."""
    held_out = min(n // HELD_OUT, SAMPLES)
    reading = (n + held_out) * size**2 / 2 / rates.moments
    energies = held_out * size * kept / rates.product
    return reading + 2 * size**3 / rates.eigh + energies


def fit_memory(q: int, kept: int) -> float:
    """Bytes that a folded fit adds at its peak."""
    return 8 * (MATRICES * q**2 + 2 * q * kept) + WORK


def filter_seconds(rates: FilterRates, batch: int, q: int, kept: int) -> float:
    """Project and rebuild; a rate at batch 1 is that of reading the basis."""
    work = batch * q * kept
    return work / rates.project + work / rates.rebuild + PASSES * 4 * batch * q / rates.stream


def dct_seconds(rate: float, batch: int, shape: tuple[int, int, int]) -> float:
    """Transform, scale, transform back."""
    _, height, width = shape
    return 2 * batch * math.prod(shape) * (height + width) / rate


def timed_fit(route: str, n: int, side: int, kept: int) -> tuple[float, Any]:
    """In a process of its own; the memory that the fit added, and the rates around it."""
    model, loader = stem(CHANNELS), Loader(natural_images(n, side=side))
    size = CHANNELS * side**2 if route == "exact" else 3 * side**2
    ttapca.fit(model, "conv1", Loader(natural_images(60, side=8)), 8, route=route)
    before = fit_rates(size, side)
    forget_peak_memory()
    memory = measuring.peak_memory()
    seconds, _ = measuring.timed(lambda: ttapca.fit(model, "conv1", loader, kept, route=route))
    memory = measuring.peak_memory() - memory
    return seconds, (memory, mean_of(before, fit_rates(size, side)))


def timed_filter(batch: int, side: int, kept: int) -> tuple[float, FilterRates]:
    """The filter alone, unit gains, and the rates around it."""
    q = 3 * side**2
    fitted = ttapca.fit(stem(CHANNELS), "conv1", Loader(natural_images(kept + 50, side=side)), kept)
    spectral = fitted.spectral_filter()
    samples = natural_images(batch, side=side, seed=1).float() / 255
    with torch.no_grad():
        before = filter_rates(batch, q, kept)
        seconds = seconds_of(lambda: spectral(samples), 3 * ROUNDS)
        return seconds, mean_of(before, filter_rates(batch, q, kept))


FITS = (
    ("folded", 4_000, 16, 500),
    ("folded", 20_000, 16, 500),
    ("folded", 4_000, 24, 1000),
    ("exact", 4_000, 8, 128),
    ("exact", 4_000, 12, 128),
    ("folded", 4_000, 32, 2000),
    ("folded", 12_000, 32, 2000),
)
FILTERS = ((200, 16, 500), (200, 32, 500), (1, 32, 2000), (200, 32, 2000))


@dataclass(frozen=True)
class Checked:
    """One prediction, and what became of it."""

    what: str
    predicted: float
    measured: float
    unit: str


def checked(quick: bool) -> tuple[list[Checked], Rates, FilterRates]:
    """Everything that is predicted, and the rates of the largest sizes."""
    out = []
    predictions = {"folded": fit_folded, "exact": fit_exact}
    for route, n, side, kept in FITS[:1] if quick else FITS:
        q, p = 3 * side**2, CHANNELS * side**2
        what = f"{route} fit, N = {n:,}, q = {q:,}, p = {p:,}, L = {kept:,}"
        run = measuring.in_own_process(timed_fit, route, n, side, kept)
        memory, rates = run.result
        out.append(Checked(what, predictions[route](rates, n, q, p, kept), run.seconds, "s"))
        if route == "folded" and side == 32:
            out.append(Checked(f"{what}: memory", fit_memory(q, kept) / 1e9, memory, "GB"))
        print(f"  {out[-1]}", flush=True)
    for batch, side, kept in FILTERS[:1] if quick else FILTERS:
        q = 3 * side**2
        seconds, narrow = timed_filter(batch, side, kept)
        what = f"folded filter, batch {batch}, q = {q:,}, L = {kept:,}"
        predicted = 1000 * filter_seconds(narrow, batch, q, kept)
        out.append(Checked(what, predicted, 1000 * seconds, "ms"))
        print(f"  {out[-1]}", flush=True)
    return out, rates, narrow


def check_table(rows: list[Checked]) -> Table:
    shown = [
        [
            row.what,
            f"{row.predicted:,.2f} {row.unit}",
            f"{row.measured:,.2f} {row.unit}",
            f"{row.predicted / row.measured:.2f}",
        ]
        for row in rows
    ]
    return Table("Predicted and measured", ["what", "predicted", "measured", "ratio"], shown)


def imagenet_table(rates: Rates, narrow: FilterRates, cosine: float) -> Table:
    """A 7x7 convolution with stride 2 from 3 x 224 x 224 to 64 x 112 x 112, and L = 2,000."""
    q, p, kept, samples, batch = 150_528, 802_816, 2000, 50_000, 64
    exact = fit_folded(rates, samples, q, p, kept) / 86_400
    passes = 2 * 2 * samples * p * (kept + 64) / rates.product / 86_400
    dct_fit = samples * q * 448 / cosine
    rows = [
        [
            "folded",
            f"{fit_memory(q, kept) / 1e12:.1f} TB",
            f"{exact:.0f} days",
            f"{2 * 4 * q * kept / 1e9:.1f} GB",
            f"{filter_seconds(narrow, batch, q, kept):.1f} s",
        ],
        [
            "randomised",
            f"{3 * 8 * p * (kept + 64) / 1e9:.0f} GB",
            f"{passes:.1f} days",
            f"{4 * p * kept / 1e9:.1f} GB",
            f"{filter_seconds(narrow, batch, p, kept):.1f} s",
        ],
        [
            "DCT",
            f"{8 * 9 * 224**2 / 1e6:.0f} MB",
            f"{dct_fit:.0f} s",
            f"{4 * 2 * 224**2 / 1e6 + 4 * q / 1e6 + 8 * q / 1e6:.1f} MB",
            f"{dct_seconds(cosine, batch, (3, 224, 224)):.2f} s",
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
    rows, rates, narrow = checked(options.quick)
    cosine = cosine_rate()
    rate_rows = [
        ["float64 scatter, multiply-adds", rates.moments],
        ["float64 product, multiply-adds", rates.product],
        ["symmetric eigendecomposition, n^3", rates.eigh],
        ["float64 convolution there and back, multiply-adds", rates.layer],
        ["float32 batch times basis, multiply-adds", narrow.project],
        ["float32 components times basis, multiply-adds", narrow.rebuild],
        ["float32 DCT of 224 x 224, multiply-adds", cosine],
    ]
    worst = max(abs(math.log(row.predicted / row.measured)) for row in rows)
    return Result(
        title="Cost model",
        text=(
            "Rates of single operations were measured at the size of each problem, before and "
            "after it; the table has those of the largest."
        ),
        tables=[
            Table(
                "Rates of this machine",
                ["what", "10^9 a second"],
                [[what, f"{rate / 1e9:.1f}"] for what, rate in rate_rows],
            ),
            check_table(rows),
            imagenet_table(rates, narrow, cosine),
        ],
        goals=[
            Goal(
                "cost model, worst ratio of predicted and measured",
                math.exp(worst),
                f"{math.exp(worst):.2f}",
                1.2,
            )
        ],
        numbers={"rates": dict(rate_rows), "rows": [vars(row) for row in rows]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small sizes, to see it run")
    measuring.command("scaling", run, parser)


if __name__ == "__main__":
    main()
