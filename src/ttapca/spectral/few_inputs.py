"""The PCA of an affine layer's output from few samples of its input, without any q x q matrix.

`ttapca.spectral.affine` folds the layer into its input by matrices of q x q. With fewer samples
than inputs, the products of samples are enough. Let the centred inputs be the rows of X and the
layer's weights W, so that the centred outputs are the rows of X W^T, and let Z = X W^T W:

- X Z^T = U s^2 U^T is the Gram matrix of the outputs, with their singular values s;
- the eigenvectors of the scatter of the outputs are the columns of V = W B with B = X^T U / s;
- the components of an output are (u - mean) P with P = W^T W B = Z^T U / s.

P and B are what a folded basis has. Z takes the layer there and back once for each sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.spectral.affine import CHUNK_NUMBERS, LinearPart
from ttapca.spectral.moments import finite_samples
from ttapca.spectral.pca import (
    Decomposition,
    check_sample_count,
    choose_components,
    eigh_descending,
    products_about_mean,
    total_variance,
)

ROWS = 256  # samples that are converted to float64 at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class FoldedPCA(Decomposition):
    """The PCA of an affine layer's output, in the space of its input, both ways.

    Attributes:
        project: P, from centred input to components, shape (q, components).
        rebuild: B, from components to input, shape (q, components).
    """

    project: Tensor
    rebuild: Tensor


class InputGram:
    """All products of the outputs of two samples, given the samples' inputs."""

    @torch.no_grad()
    def __init__(self, batches: Iterable[Tensor], linear: LinearPart) -> None:
        self._linear = linear
        rows = [finite_samples(batch, linear.input_size).cpu() for batch in batches]
        self._inputs = torch.cat(rows)
        self.count = len(self._inputs)
        check_sample_count(None, self.count)
        # Centred once, in float64, before anything is multiplied: afterwards, digits are lost.
        self._mean = self._inputs.mean(0, dtype=torch.float64)
        self._there_and_back = torch.empty(self._inputs.shape, dtype=torch.float64)  # Z
        self._products = torch.empty(self.count, self.count, dtype=torch.float64)
        step = max(1, CHUNK_NUMBERS // linear.output_size)
        for start in range(0, self.count, step):
            some = slice(start, start + step)
            self._there_and_back[some] = linear.gram_rows(self._inputs[some] - self._mean)
        for start in range(0, self.count, step):
            some = slice(start, start + step)
            centred = self._inputs[some] - self._mean
            torch.mm(centred, self._there_and_back.T, out=self._products[some])

    @torch.no_grad()
    def pca(
        self, n_components: int | float | None = None, *, leave_out: Sequence[int] = ()
    ) -> FoldedPCA:
        """Decompose all samples except those at the positions in `leave_out`."""
        kept = torch.ones(self.count, dtype=torch.bool)
        kept[list(leave_out)] = False
        # Centred again: rounding, and those that are left out, have moved the mean.
        products = products_about_mean(self._products[kept][:, kept])
        eigenvalues, vectors = eigh_descending((products + products.T) / 2)
        count = len(products)
        vectors = vectors[:, : choose_components(n_components, eigenvalues, count)]
        # For all samples, with zeros for those that are left out: no copy of all inputs is made.
        weights = vectors.new_zeros(self.count, vectors.shape[1])
        weights[kept] = vectors - vectors.mean(0)
        rebuild = self._times_inputs(weights)
        project = self._there_and_back.T @ weights
        # B^T P is s^2 up to rounding, which grows where singular values are small.
        lower = torch.linalg.cholesky(rebuild.T @ project)
        for matrix in (rebuild, project):
            matrix.copy_(torch.linalg.solve_triangular(lower, matrix.T, upper=False).T)
        sign = self._linear.signs_of(rebuild)
        return FoldedPCA(
            mean=(self._inputs * kept[:, None]).sum(0, dtype=torch.float64) / count,
            project=project.mul_(sign),
            rebuild=rebuild.mul_(sign),
            singular_values=lower.diagonal().clone(),
            n_samples=count,
            total_variance=total_variance(eigenvalues, count),
        )

    def _times_inputs(self, weights: Tensor) -> Tensor:
        """Return X^T times weights, some samples at a time: (samples, n) to (q, n)."""
        total = weights.new_zeros(self._inputs.shape[1], weights.shape[1])
        for rows, part in zip(
            torch.split(self._inputs, ROWS), torch.split(weights, ROWS), strict=True
        ):
            total.addmm_((rows - self._mean).T, part)
        return total
