"""Fit of the paper's stem (3x3, 3->16 on 32x32 images, p = 16,384, L = 2,000), folded.

Against scikit-learn's IncrementalPCA(2000, batch_size=2000) on the same activations, and against a
float64 SVD where that is possible. Prints ratios from one run; takes some minutes.

    python benchmarks/fit.py [--images 6000] [--all-images 50000]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.decomposition import IncrementalPCA

import ttapca
from common import Loader, in_own_process, natural_images, stem, timed, verdict

COMPONENTS = 2000


def activations(n: int, side: int = 32) -> np.ndarray:
    with torch.no_grad():
        parts = [stem()(batch).flatten(1) for batch in Loader(natural_images(n, side=side))]
    return torch.cat(parts).numpy()


def ours(n: int) -> tuple[float, object]:
    model, loader = stem(), Loader(natural_images(n))
    seconds, fitted = timed(lambda: ttapca.fit(model, "conv1", loader, COMPONENTS))
    return seconds, fitted.singular_values_.tolist()


def sklearn(n: int) -> tuple[float, object]:
    data = activations(n)
    incremental = IncrementalPCA(COMPONENTS, batch_size=2000)
    seconds, _ = timed(lambda: incremental.fit(data))
    return seconds, incremental.singular_values_.tolist()


def accuracy() -> None:
    """A case small enough for a float64 SVD of the whole matrix."""
    images, kept = natural_images(1500, side=8), 150
    matrix = activations(1500, side=8).astype(np.float64)
    exact = np.linalg.svd(matrix - matrix.mean(0), compute_uv=False)[:kept]
    fitted = ttapca.fit(stem().double(), "conv1", images.double() / 255, kept)
    incremental = IncrementalPCA(kept, batch_size=300).fit(matrix)
    worst = {
        "folded": np.abs(fitted.singular_values_.numpy() / exact - 1).max(),
        "IncrementalPCA": np.abs(incremental.singular_values_ / exact - 1).max(),
    }
    for name, error in worst.items():
        print(f"  worst relative error of a singular value, {name:15s} {error:.1e}")
    print(f"  goal: folded under 1e-5: {verdict(worst['folded'] < 1e-5)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--all-images", type=int, default=50000)
    options = parser.parse_args()
    few, many = options.images, options.all_images

    print("accuracy against a float64 SVD (1,500 images of 8x8, p = 1,024, 150 components)")
    accuracy()

    print(f"time and peak memory of a process, p = 16,384, {COMPONENTS:,} components")
    rows = {
        f"folded, {few:,} images": in_own_process(ours, few),
        f"IncrementalPCA, {few:,} images": in_own_process(sklearn, few),
        f"folded, {many:,} images": in_own_process(ours, many),
    }
    for name, row in rows.items():
        print(f"  {name:32s} {row.seconds:8.1f} s {row.peak_gb:6.2f} GB")
    folded_few, incremental, folded_many = rows.values()
    extrapolated = incremental.seconds * many / few
    print(
        f"  {f'IncrementalPCA, {many:,} images':32s} {extrapolated:8.1f} s (extrapolated: linear)"
    )

    ratio = incremental.seconds / folded_few.seconds
    print(f"  ratio on {few:,} images: {ratio:.1f} (goal 10: {verdict(ratio >= 10)})")
    ratio = extrapolated / folded_many.seconds
    print(f"  ratio on {many:,} images: {ratio:.1f} (goal 40: {verdict(ratio >= 40)})")
    peak = folded_many.peak_gb
    print(f"  peak memory on {many:,} images: {peak:.2f} GB (goal 1.5: {verdict(peak <= 1.5)})")


if __name__ == "__main__":
    main()
