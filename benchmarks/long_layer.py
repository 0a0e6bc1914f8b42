"""A layer past the p x p matrix: how exact the routes are, beside `torch.pca_lowrank`.

The activations of one layer of a trained network for some of its training images are decomposed by
each way in a process of its own; making them does not count. What is exact, a float64 SVD tells.

    python benchmarks/long_layer.py --network FILE --train DIR [--layer bn1] [--again]
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
from torch import Tensor

import measuring
from common import add_trained_options, trained_network, training_batches
from measuring import Goal, Result, Table
from ttapca.spectral.pca import SampleGram
from ttapca.spectral.randomised import OVERSAMPLING, randomised_pca, singular_value_error
from ttapca.support.modules import find_layer, stopped_at

BATCH = 250
ITERATIONS = (2, 4, 8, 16)  # of `pca_lowrank`; 2 are its default
Found = tuple[Tensor, Tensor, float | None]  # singular values, basis, bound


def by_gram(batches: tuple[Tensor, ...], kept: int) -> Found:
    pca = SampleGram(batches, batches[0].shape[1]).pca(kept)
    return pca.singular_values, pca.basis, None


def by_krylov(batches: tuple[Tensor, ...], kept: int) -> Found:
    pca = randomised_pca(lambda: batches, batches[0].shape[1], kept)
    return pca.singular_values, pca.basis, singular_value_error(pca.error_bound)


def by_two_power_passes(batches: tuple[Tensor, ...], kept: int) -> Found:
    """What the randomised route was until 2026-11: one power step, and the Ritz vectors."""
    samples = torch.cat(batches).double()
    samples -= samples.mean(0)
    generator = torch.Generator().manual_seed(0)
    columns = kept + OVERSAMPLING
    block = torch.randn(samples.shape[1], columns, generator=generator, dtype=torch.float64)
    for _ in range(2):
        block = torch.linalg.qr(block)[0]
        product = samples.T @ (samples @ block)
        start, block = block, product
    values, rotation = torch.linalg.eigh(start.T @ product)
    values, rotation = values.flip(0)[:kept], rotation.flip(1)[:, :kept]
    basis = start @ rotation
    residual = torch.linalg.vector_norm(product @ rotation - basis * values, dim=0) / values
    return values.sqrt(), basis, singular_value_error(residual)


def by_lowrank(iterations: int, batches: tuple[Tensor, ...], kept: int) -> Found:
    torch.manual_seed(0)
    _, values, basis = torch.pca_lowrank(torch.cat(batches), kept, niter=iterations)
    return values, basis, None


WAYS: dict[str, Callable[[tuple[Tensor, ...], int], Found]] = {
    "two power passes, as before": by_two_power_passes,
    "gram": by_gram,
    "randomised": by_krylov,
    **{
        f"pca_lowrank, niter={iterations}": functools.partial(by_lowrank, iterations)
        for iterations in ITERATIONS
    },
}


def decompose(name: str, data: Path, kept: int, to: Path) -> tuple[float, float | None]:
    """One way, in a process of its own: seconds, and the bound that it states."""
    batches = torch.from_numpy(np.load(data)).split(BATCH)
    seconds, found = measuring.timed(lambda: WAYS[name](batches, kept))
    values, basis, bound = found  # type: ignore[misc] - `timed` knows no types
    np.savez(to, values=values.double().numpy(), basis=basis.double().numpy())
    return seconds, bound


def activations(options: argparse.Namespace) -> np.ndarray:
    """The layer's output, float32, shape (images, p)."""
    network = trained_network(options)
    layer, rows = find_layer(network, options.layer), []
    with torch.no_grad():
        for batch in training_batches(options):
            with stopped_at(layer, before=False) as seen:
                network(batch[0] if isinstance(batch, (tuple, list)) else batch)
            rows.append(seen[0].flatten(1).numpy().copy())
    return np.concatenate(rows)


def quality(centred: Tensor, exact: tuple[Tensor, Tensor], path: Path) -> dict[str, float]:
    """How far a decomposition is from the exact one."""
    found = np.load(path)
    values, basis = torch.from_numpy(found["values"]), torch.from_numpy(found["basis"])
    half = len(values) // 2
    error = (values / exact[0][: len(values)] - 1).abs()
    # The sine of the angle is what of one subspace lies outside the other.
    outside = basis[:, :half] - exact[1][:, :half] @ (exact[1][:, :half].T @ basis[:, :half])
    left = centred - (centred @ basis) @ basis.T
    return {
        "top half": float(error[:half].max()),
        "all": float(error.max()),
        "angle": float(torch.linalg.matrix_norm(outside, 2).clamp(max=1).arcsin()),
        "rebuilt": float(left.norm() / centred.norm()),
    }


def run(options: argparse.Namespace) -> Result:
    if not (options.network and options.train):
        raise SystemExit("name a trained network and its images: --network FILE --train DIR")
    options.fit_images = options.images
    kept = options.components
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data, to = Path(scratch, "data.npy"), Path(scratch, "found.npz")
        samples = activations(options)
        np.save(data, samples)
        centred = torch.from_numpy(samples).double()
        centred -= centred.mean(0)
        _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
        exact = values, vectors[:kept].T
        for name in WAYS:
            measured = measuring.in_own_process(decompose, name, data, kept, to)
            rows[name] = {
                **quality(centred, exact, to),
                "seconds": measured.seconds,
                "peak_gb": measured.peak_gb,
                "bound": measured.result,
            }
            print("  ", name, rows[name], flush=True)
    best = centred - (centred @ exact[1]) @ exact[1].T
    return Result(
        title="A layer past the p x p matrix",
        text=(
            f"`{options.layer}` of `{Path(options.network).stem}`, p = {samples.shape[1]:,}, "
            f"{len(samples):,} training images, {kept:,} components. Errors of singular values are "
            "relative, the angle is the largest between the subspaces of the first half; rebuilt: "
            "what is left of the centred activations, relative, of which an exact decomposition "
            f"leaves {float(best.norm() / centred.norm()):.4f}. All ways are given the "
            "activations; `pca_lowrank` computes in float32, the others in float64."
        ),
        tables=[table(rows)],
        goals=goals(rows),
        numbers={"rows": rows},
    )


def table(rows: dict[str, dict[str, Any]]) -> Table:
    columns = [
        "way",
        "seconds",
        "peak GB",
        "error, top half",
        "error, all",
        "angle, top half",
        "rebuilt",
        "states",
    ]
    shown = [
        [
            name,
            f"{row['seconds']:.1f}",
            f"{row['peak_gb']:.2f}",
            f"{row['top half']:.1e}",
            f"{row['all']:.1e}",
            f"{row['angle']:.1e}",
            f"{row['rebuilt']:.4f}",
            "" if row["bound"] is None else f"{row['bound']:.1e}",
        ]
        for name, row in rows.items()
    ]
    return Table("Error and time", columns, shown)


def goals(rows: dict[str, dict[str, Any]]) -> list[Goal]:
    out = []
    for name in ("gram", "randomised"):
        error = rows[name]["top half"]
        what = f"{name}: error of a singular value, top half"
        out.append(Goal(what, error, f"{error:.1e}", 1e-3))
        for measure in ("rebuilt", "all"):
            others = [
                row[measure]
                for other, row in rows.items()
                if other.startswith("pca_lowrank") and row["seconds"] <= rows[name]["seconds"]
            ]
            if others:
                ahead = min(others) - rows[name][measure]
                what = f"{name} ahead of `pca_lowrank` in no more time, {measure}"
                out.append(Goal(what, ahead, f"{ahead:.1e}", 0, at_least=True))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained_options(parser)
    parser.add_argument("--layer", default="bn1")
    parser.add_argument("--components", type=int, default=300)
    measuring.command("long-layer", run, parser)


if __name__ == "__main__":
    main()
