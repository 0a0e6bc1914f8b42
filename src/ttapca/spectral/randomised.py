"""PCA of activations too long for a p x p matrix: block Krylov iteration from a random start.

Each pass over the data multiplies the scatter matrix S by a block of orthonormal columns. The
product, made orthogonal to all blocks before it, is the next block (Musco and Musco, "Randomized
Block Krylov Methods for Stronger and Faster Approximate Singular Value Decomposition", NeurIPS
2015). The best eigenvectors within all blocks (Ritz vectors) are the components. For each, the
residual r = |S v - d v| is computed exactly, and S has an eigenvalue within r of d.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca._checks import Whole, check_option
from ttapca.errors import OptionError
from ttapca.spectral import pca

# Extra columns beyond the components asked for: the trailing ones converge slowest.
OVERSAMPLING = 64

# Relative error of a singular value in the first half of the components.
TOLERANCE = 1e-3

# Real activations take four or five passes, a spectrum that hardly falls six.
MAX_PASSES = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class RandomisedPCA(pca.PCA):
    """A PCA with a bound on its error."""

    # Bound on the relative distance of each squared singular value from the nearest exact one.
    error_bound: Tensor


def singular_value_error(error_bound: Tensor) -> float:
    """Return the largest relative error of a singular value in the first half of the components."""
    worst = float(error_bound[: math.ceil(len(error_bound) / 2)].max())
    return 1 - math.sqrt(max(0.0, 1 - worst))


def _read(batches: Iterable[Tensor], block: Tensor) -> tuple[int, Tensor, Tensor, float]:
    """Return number and mean of the samples of a pass, S Q for a block Q, and the trace of S."""
    count, mean, trace = 0, torch.zeros_like(block[:, 0]), 0.0
    product = torch.zeros_like(block)
    for batch in batches:
        samples = pca.finite_samples(batch, len(block)).to(block)
        if not len(samples):
            continue
        own_mean = samples.mean(0)
        centred = samples - own_mean
        count, mean, delta, weight = pca.merged_means(count, mean, len(samples), own_mean)
        product.addmm_(centred.T, centred @ block)
        product.addr_(delta, delta @ block, alpha=weight)
        trace += float(centred.square().sum() + weight * delta.square().sum())
    return count, mean, product, trace


class _KrylovSpace:
    """The blocks so far, which are orthonormal, and S within them."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # each of shape (p, columns)
        self._inner = torch.zeros(0, 0)  # Q^T S Q over all blocks
        self._outside = torch.zeros(0, 0)  # the part of S times the last block beyond all blocks

    def add(self, block: Tensor, product: Tensor) -> None:
        """Add a block and S times it."""
        self._blocks.append(block)
        coefficients = torch.cat([each.T @ product for each in self._blocks])
        old = len(self._inner)
        inner = block.new_zeros(len(coefficients), len(coefficients))
        inner[:old, :old] = self._inner
        inner[:, old:] = coefficients
        inner[old:, :old] = coefficients[:old].T
        self._inner = (inner + inner.T) / 2
        self._outside = self._orthogonal(product)

    @property
    def complete(self) -> bool:
        """Whether the blocks span everything."""
        return len(self._inner) == len(self._outside)

    def next_block(self) -> Tensor:
        """Return the directions in which S leaves all blocks so far."""
        left = len(self._outside) - len(self._inner)
        # If only rounding errors are left, columns must become orthogonal as well: so again, once
        # they have length 1.
        return _orthonormal(self._orthogonal(_orthonormal(self._outside[:, :left])))

    def ritz(self, n_components: int, n_samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first eigenvalues within the space, their vectors, and their bounds."""
        eigenvalues, rotation = pca.eigh_descending(self._inner)
        kept = pca.choose_components(n_components, eigenvalues, n_samples)
        eigenvalues, rotation = eigenvalues[:kept], rotation[:, :kept]
        # S times a Ritz vector leaves the space through the last block only.
        residual = self._outside @ rotation[-self._outside.shape[1] :]
        return eigenvalues, rotation, torch.linalg.vector_norm(residual, dim=0) / eigenvalues

    def columns(self, rotation: Tensor) -> Tensor:
        """Return vectors of shape (p, ...) from their coefficients in all blocks."""
        parts = torch.split(rotation, [block.shape[1] for block in self._blocks])
        basis = rotation.new_zeros(len(self._outside), rotation.shape[1])
        for block, part in zip(self._blocks, parts, strict=True):
            basis.addmm_(block, part)
        return basis

    def _orthogonal(self, block: Tensor) -> Tensor:
        """Return the part of each column that is orthogonal to all blocks."""
        block = block.clone()
        for _ in range(2):  # the second time for the rounding errors
            for each in self._blocks:
                block.addmm_(each, each.T @ block, alpha=-1)
        return block


@torch.no_grad()
def randomised_pca(
    passes_over: Callable[[], Iterable[Tensor]],
    size: int,
    n_components: int | float | None,
    *,
    tolerance: float = TOLERANCE,
    max_passes: int = MAX_PASSES,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> RandomisedPCA:
    """Find the leading components in some passes over the data, to a `singular_value_error`."""
    if not isinstance(n_components, int):
        raise OptionError(
            f"Many samples of {size:,} numbers are decomposed by the randomised route, which "
            f"needs a whole number of components; found n_components={n_components!r}."
        )
    check_option("n_components", n_components, Whole(1))
    check_option("max_passes", max_passes, Whole(2))
    generator = generator or torch.Generator().manual_seed(0)
    columns = min(n_components + OVERSAMPLING, size)
    start = torch.randn(size, columns, generator=generator, dtype=torch.float64)
    count, _, product, _ = _read(passes_over(), start.to(pca.float64_device(device)))
    pca.check_sample_count(n_components, count)
    space = _KrylovSpace()
    block = _orthonormal(product)
    for _ in range(max_passes - 1):
        count, mean, product, trace = _read(passes_over(), block)
        space.add(block, product)
        eigenvalues, rotation, bounds = space.ritz(n_components, count)
        reached = singular_value_error(bounds)
        if reached <= tolerance or space.complete:
            break
        block = space.next_block()
    else:
        warnings.warn(
            f"Singular values of the first half of {n_components} components are to be within "
            f"{tolerance:.1g} of the exact ones; after {max_passes} passes over the data their "
            f"bound is {reached:.1g}. Ask for more components than you need, and truncate.",
            stacklevel=2,
        )
    basis = space.columns(rotation)
    return RandomisedPCA(
        mean=mean,
        basis=basis * pca.signs(basis),
        singular_values=eigenvalues.sqrt(),
        n_samples=count,
        total_variance=trace / (count - 1),
        error_bound=bounds,
    )


def _orthonormal(block: Tensor) -> Tensor:
    """Return orthonormal columns that span those of the block."""
    found: Tensor = torch.linalg.qr(block).Q
    return found
