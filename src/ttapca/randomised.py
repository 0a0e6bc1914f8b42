"""PCA of activations too long for a p x p matrix: randomised block subspace iteration.

Each pass over the data multiplies the scatter matrix S, which is never formed, with a block Q of
orthonormal columns. The first pass starts from random columns and turns them towards the leading
eigenvectors; the last one also gives Q^T S Q, whose eigenvectors (Ritz vectors) are the components.
For each of them the residual r = |S v - d v| is computed exactly, and S has an eigenvalue within r
of d: a bound that holds whatever the data, reported relative to the singular value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.errors import NonFiniteError, OptionError
from ttapca.pca import (
    PCA,
    check_n_components,
    check_sample_count,
    choose_components,
    eigh_descending,
    flatten_samples,
    float64_device,
    signs,
)

# Extra columns beyond the components asked for: the trailing ones converge slowest.
OVERSAMPLING = 64


@dataclass(frozen=True, eq=False)
class RandomisedPCA(PCA):
    """A PCA with a bound on its error.

    Attributes:
        error_bound: For each component, a bound on the relative distance from its squared singular
            value to that of the nearest exact one, shape (components,).
        missed_variance: Share of the total variance outside the subspace that was searched.
    """

    error_bound: Tensor
    missed_variance: float


class _ScatterProduct:
    """One pass: mean, S Q and the trace of S from a stream, with Chan's pairwise update."""

    def __init__(self, block: Tensor) -> None:
        self.block = block
        self.count = 0
        self.mean = torch.zeros_like(block[:, 0])
        self.product = torch.zeros_like(block)
        self.trace = 0.0

    def update(self, batch: Tensor) -> None:
        samples = flatten_samples(batch, len(self.block)).to(self.block)
        if not torch.isfinite(samples).all():
            raise NonFiniteError("PCA needs finite numbers; found NaN or infinity in a batch.")
        if len(samples) == 0:
            return
        count, mean = len(samples), samples.mean(0)
        centred = samples - mean
        delta = mean - self.mean
        weight = self.count * count / (self.count + count)
        self.product.addmm_(centred.T, centred @ self.block)
        self.product.addr_(delta, delta @ self.block, alpha=weight)
        self.trace += float(centred.square().sum() + weight * delta.square().sum())
        self.mean += delta * (count / (self.count + count))
        self.count += count


@torch.no_grad()
def randomised_pca(
    passes_over: Callable[[], Iterable[Tensor]],
    size: int,
    n_components: int | float | None,
    *,
    passes: int = 2,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> RandomisedPCA:
    """Leading principal components in a few passes over the data.

    Args:
        passes_over: Called once a pass; gives the batches, each of shape (samples, ...), the same
            samples every time, in any order.
        size: Numbers in a sample, p.
        n_components: How many components.
        passes: Two or more; each further one tightens the error.
        generator: Draws the starting block; a fixed seed by default.
        device: Where the block lives.

    Raises:
        OptionError: When `n_components` is not a number: how many components hold a fraction of
            the variance is not known before the passes.
        NotEnoughDataError: When the data have fewer components than asked for.
    """
    check_n_components(n_components)
    if not isinstance(n_components, int):
        raise OptionError(
            f"A layer with {size:,} outputs is decomposed by the randomised route, which needs a "
            f"whole number of components; found n_components={n_components!r}."
        )
    if passes < 2:
        raise OptionError(f"The randomised route needs at least 2 passes; found {passes}.")
    generator = generator or torch.Generator().manual_seed(0)
    columns = min(n_components + OVERSAMPLING, size)
    block = torch.randn(size, columns, generator=generator, dtype=torch.float64)
    block = block.to(float64_device(device))
    for _ in range(passes):
        scatter = _ScatterProduct(torch.linalg.qr(block)[0])
        for batch in passes_over():
            scatter.update(batch)
        check_sample_count(n_components, scatter.count)
        block = scatter.product
    return _ritz(scatter, n_components)


def _ritz(scatter: _ScatterProduct, n_components: int) -> RandomisedPCA:
    """Best eigenvectors within the block, with the residual of each."""
    inner = scatter.block.T @ scatter.product
    eigenvalues, rotation = eigh_descending((inner + inner.T) / 2)
    kept = choose_components(n_components, eigenvalues, scatter.count)
    values, rotation = eigenvalues[:kept], rotation[:, :kept]
    basis = scatter.block @ rotation
    residual = torch.linalg.vector_norm(scatter.product @ rotation - basis * values, dim=0)
    return RandomisedPCA(
        mean=scatter.mean,
        basis=basis * signs(basis),
        singular_values=values.sqrt(),
        n_samples=scatter.count,
        total_variance=scatter.trace / (scatter.count - 1),
        error_bound=residual / values,
        missed_variance=max(0.0, 1.0 - float(eigenvalues.sum()) / scatter.trace),
    )
