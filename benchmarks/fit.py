"""Fits of the first layer (3x3, 3 -> 16) by five ways: time, peak memory, and how far off they are.

Each fit runs in a process of its own, so that its peak memory is its own; the five take turns. The
exact subspace is that of the folded route, which `accuracy` compares with a float64 SVD. Images
are random with the spectrum of photographs, whose many equal frequencies make a hard case: the
gap behind the last component is small.

    python benchmarks/fit.py [--quick]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import measuring
import ttapca
from common import Loader, natural_images, stem, unfolded
from measuring import Goal, Result, Spread, Table

CHANNELS = 16
OTHERS = ("exact", "randomised", "IncrementalPCA", "pca_lowrank")

# (samples, side of the images, components): p = 16 side^2. The others are run where they end
# within minutes: p x p up to 4,096, what holds all activations up to some 2 GB of them.
SIZES = (
    (1_000, 8, 128),
    (5_000, 8, 128),
    (20_000, 8, 128),
    (50_000, 8, 128),
    (5_000, 16, 128),
    (5_000, 16, 512),
    (20_000, 16, 512),
    (50_000, 16, 512),
    (5_000, 32, 128),
    (5_000, 32, 512),
    (5_000, 32, 2_000),
    (20_000, 32, 2_000),
    (50_000, 32, 2_000),
)
RANDOMISED_ONLY = ((5_000, 64, 128), (5_000, 64, 256))
ALL_COMPONENTS = (50_000, 32, None)
QUICK = ((1_000, 8, 128), (2_000, 8, 128))


def activations(n: int, side: int) -> np.ndarray:
    """The layer's output for all samples, float32, shape (n, p)."""
    out = np.empty((n, CHANNELS * side * side), np.float32)
    row = 0
    with torch.no_grad():
        for batch in Loader(natural_images(n, side=side)):
            out[row : row + len(batch)] = stem(CHANNELS)(batch).flatten(1)
            row += len(batch)
    return out


def by_us(route: str, n: int, side: int, kept: int | None, to: Path | None) -> tuple[float, Any]:
    """One of the library's routes; images become activations as they are read, and this counts."""
    model, loader = stem(CHANNELS), Loader(natural_images(n, side=side))
    ttapca.fit(model, "conv1", Loader(natural_images(50, side=8)), 8, route=route)  # warm up
    seconds, fitted = measuring.timed(lambda: ttapca.fit(model, "conv1", loader, kept, route=route))
    if to is not None:
        output = unfolded(fitted, model.conv1) if fitted.basis.at_input else fitted
        np.save(to, output.basis.to_components.float().numpy())
    return seconds, float(fitted.explained_variance_ratio_.sum())


def by_sklearn(n: int, side: int, kept: int, to: Path) -> tuple[float, Any]:
    """IncrementalPCA on activations that are there already; making them is not counted."""
    from sklearn.decomposition import IncrementalPCA

    data = activations(n, side)
    incremental = IncrementalPCA(kept, batch_size=max(2 * kept, 500))
    seconds, _ = measuring.timed(lambda: incremental.fit(data))
    np.save(to, incremental.components_.T.astype(np.float32))
    return seconds, float(incremental.explained_variance_ratio_.sum())


def by_lowrank(n: int, side: int, kept: int, to: Path) -> tuple[float, Any]:
    """`torch.pca_lowrank` as documented, on activations that are there already."""
    data = torch.from_numpy(activations(n, side))
    torch.manual_seed(0)
    seconds, found = measuring.timed(lambda: torch.pca_lowrank(data, q=kept))
    np.save(to, found[2].numpy())
    share = found[1].double().square().sum() / (data - data.mean(0)).double().square().sum()
    return seconds, float(share)


WAYS: dict[str, Callable[..., tuple[float, Any]]] = {
    "folded": functools.partial(by_us, "folded"),
    "exact": functools.partial(by_us, "exact"),
    "randomised": functools.partial(by_us, "randomised"),
    "IncrementalPCA": by_sklearn,
    "pca_lowrank": by_lowrank,
}


def worst_angle(exact: np.ndarray, found: np.ndarray) -> float:
    """Largest principal angle between two subspaces, in degrees."""
    one, two = (torch.linalg.qr(torch.from_numpy(each).double())[0] for each in (exact, found))
    outside = two - one @ (one.T @ two)
    # The largest singular value of what lies outside, by its small Gram matrix.
    sine = torch.linalg.eigvalsh(outside.T @ outside)[-1].clamp(0, 1).sqrt()
    return float(torch.rad2deg(torch.arcsin(sine)))


def can(name: str, n: int, side: int, kept: int) -> bool:
    """Whether a way ends within minutes and 4 GB."""
    p = CHANNELS * side * side
    if name == "exact":
        return p <= 4096 and n <= 20_000
    if name == "pca_lowrank":
        return n * p <= 100e6
    if name == "IncrementalPCA":
        return n * p * kept <= 700e9
    return n <= 20_000 and n * p * kept <= 1e12


def one_size(n: int, side: int, kept: int, scratch: Path) -> list[dict[str, Any]]:
    """All ways at one size."""
    ways = ["folded", *(name for name in OTHERS if can(name, n, side, kept))]
    rounds = 3 if n * CHANNELS * side * side <= 50e6 and kept < 1000 else 1
    runs: dict[str, list[measuring.Measured]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            to = scratch / f"{name}.npy"
            runs[name].append(measuring.in_own_process(WAYS[name], n, side, kept, to))
    exact = np.load(scratch / "folded.npy")
    rows = []
    for name, measured in runs.items():
        angle = 0.0 if name == "folded" else worst_angle(exact, np.load(scratch / f"{name}.npy"))
        rows.append(row_of(name, n, side, kept, measured, angle))
        print("  ", rows[-1], flush=True)
    return rows


def row_of(
    name: str,
    n: int,
    side: int,
    kept: int | None,
    runs: list[measuring.Measured],
    angle: float | None,
) -> dict[str, Any]:
    """Median seconds, highest peak."""
    seconds = Spread.of([each.seconds for each in runs])
    return {
        "way": name,
        "samples": n,
        "p": CHANNELS * side * side,
        "q": 3 * side * side,
        "components": kept,
        "seconds": seconds.median,
        "quartiles": [seconds.low, seconds.high],
        "rounds": seconds.count,
        "peak_gb": max(each.peak_gb for each in runs),
        "degrees": angle,
        "variance": runs[0].result,
    }


def accuracy() -> dict[str, float]:
    """Worst relative error of a singular value against a float64 SVD, and worst angle."""
    images, kept = natural_images(1500, side=8), 150
    model = stem().double()
    with torch.no_grad():
        matrix = model(images.double() / 255).flatten(1)
    _, exact, vectors = torch.linalg.svd(matrix - matrix.mean(0), full_matrices=False)
    fitted = ttapca.fit(model, "conv1", images.double() / 255, kept)
    error = (fitted.singular_values_ / exact[:kept] - 1).abs().max()
    basis = unfolded(fitted, model.conv1).basis.to_components
    return {
        "error": float(error),
        "degrees": worst_angle(vectors[:kept].T.numpy(), basis.numpy()),
    }


def one_way(name: str, n: int, side: int, kept: int | None) -> list[dict[str, Any]]:
    """One way at a size that is out of reach for the others."""
    found = measuring.in_own_process(WAYS[name], n, side, kept, None)
    return [row_of(name, n, side, kept, [found], 0.0 if name == "folded" else None)]


def run(options: argparse.Namespace) -> Result:
    rows: list[dict[str, Any]] = []
    done = measuring.Progress(options.to / ("fit-quick.rows" if options.quick else "fit.rows"))
    with tempfile.TemporaryDirectory() as scratch:
        for size in QUICK if options.quick else SIZES:
            rows += done.once(str(size), lambda size=size: one_size(*size, Path(scratch)))
    if not options.quick:
        alone = [("randomised", *size) for size in RANDOMISED_ONLY] + [("folded", *ALL_COMPONENTS)]
        for each in alone:
            rows += done.once(str(each), lambda each=each: one_way(*each))
    exact = accuracy()
    done.forget()
    return Result(
        title="Fit",
        text=(
            "The first layer of the CIFAR networks, p = 16 x side^2 outputs; images with the "
            "spectrum of photographs, seed 0. The library's routes read images and run the layer; "
            "scikit-learn and `torch.pca_lowrank` are given all activations. Angle: largest "
            "principal angle to the exact subspace. Against a float64 SVD (1,500 images of 8x8, "
            f"150 components) the folded route is off by {exact['error']:.1e} in a singular value "
            f"and {exact['degrees']:.1e} degrees (a float32 copy of the basis was compared)."
        ),
        tables=[table(rows)],
        goals=goals(rows, exact),
        numbers={"rows": rows, "accuracy": exact},
    )


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ["way", "samples", "p", "components", "seconds", "peak GB", "angle", "variance"]
    shown = [
        [
            row["way"],
            f"{row['samples']:,}",
            f"{row['p']:,}",
            "all" if row["components"] is None else f"{row['components']:,}",
            Spread(row["seconds"], *row["quartiles"], row["rounds"]).show(digits=1),
            f"{row['peak_gb']:.2f}",
            "" if row["degrees"] is None else f"{row['degrees']:.1f}",
            f"{100 * row['variance']:.2f} %",
        ]
        for row in rows
    ]
    return Table("Time, memory and error", columns, shown)


def goals(rows: list[dict[str, Any]], exact: dict[str, float]) -> list[Goal]:
    out = [Goal("error of a singular value", exact["error"], f"{exact['error']:.1e}", 1e-5)]
    for row in rows:
        if row["components"] is None:
            what = "fit of 50,000 images, p = 16,384, all components"
            seconds, peak = row["seconds"], row["peak_gb"]
            out.append(Goal(f"{what}: time", seconds, f"{seconds:.1f} s", 90, unit=" s"))
            out.append(Goal(f"{what}: peak memory", peak, f"{peak:.2f} GB", 1.5, unit=" GB"))
    by_size: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        key = (row["samples"], row["p"], row["components"])
        by_size.setdefault(key, {})[row["way"]] = row["seconds"]
    for (n, p, kept), seconds in by_size.items():
        if "IncrementalPCA" in seconds and p == 16_384:
            over = seconds["IncrementalPCA"] / seconds["folded"]
            what = f"IncrementalPCA over folded, {n:,} images, p = {p:,}, {kept:,} components"
            # Its cost grows with the samples, that of the folded route hardly.
            least = 10 if n >= 20_000 else 1
            out.append(Goal(what, over, f"{over:.1f}", least, at_least=True))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small sizes, to see it run")
    measuring.command("fit", run, parser)


if __name__ == "__main__":
    main()
