"""A basis on an affine layer's input: the PCA of its output, computed and applied before it.

Let the layer be A = W u + b with u of q numbers and A of p, S_u the scatter of u, and G = W^T W = R
R^T (q x q). Then R^T S_u R = U D U^T: D are the eigenvalues of the scatter of A, and the columns of
V = W R^-T U its eigenvectors. The components of A are (u - mean) P with P = R U, and going back is
u' = mean + (components * gains) B^T with B = R^-T U, followed by the layer itself.

With fewer samples than inputs, `InputGram` needs no q x q matrix either. With the centred inputs as
the rows of X, and Z = X W^T W, X Z^T = U s^2 U^T is the Gram matrix of the outputs, with their
singular values s; B = X^T U / s, and P = W^T W B = Z^T U / s.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ttapca.errors import AttachError
from ttapca.spectral import pca
from ttapca.spectral.basis import MatrixBasis, TensorForm

WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
# These pass numbers on, or cut images into patches, which is linear without any weights.
REARRANGING = (nn.Identity, nn.Unfold, nn.PixelUnshuffle)
AFFINE = (*WEIGHTED, *REARRANGING)

# Numbers in one chunk of work, which keeps the memory for it near 64 MB.
CHUNK_NUMBERS = 8_000_000

# Below this ratio of smallest to largest pivot, a Cholesky factor loses half of its digits, and the
# slower eigendecomposition takes over.
CHOLESKY_PIVOT_RATIO = 1e-4

# Eigenvalues of G below this fraction of the largest one are rounding, not directions of W.
NULL_DIRECTION = 1e-13

# The first columns of a folded basis are checked against the layer's weights, and this is how far
# they may be from orthonormal: a bfloat16 copy of the weights passes, other weights do not.
PROBED_COLUMNS = 16
SAME_WEIGHTS = 0.05

ROWS = 256  # samples that are converted to float64 at a time


class Folded(MatrixBasis):
    """Components of an affine layer's output, by P and B of shape (q, components) on its input."""

    at_input = True
    sides = (True,)
    routes = ("folded", "gram")
    file_names: ClassVar[dict[str, str]] = {
        "to_components": "project",
        "from_components": "rebuild",
    }
    of_weights = True

    def lengths(self) -> Tensor:
        """See `Basis`: its components have length 1 in the layer's output only."""
        return self.from_components.double().square().sum(0)

    def check_layer(
        self, layer: nn.Module, name: str, shape: tuple[int, ...], output_size: int
    ) -> None:
        """Raise unless the layer is affine and has the weights of the fit."""
        if not is_affine(layer):
            raise AttachError(
                "A folded filter goes on the input of an affine layer without hooks; "
                f"`{name}` is a {type(layer).__name__} that has hooks or is not affine. "
                "Fit the filter on this model."
            )
        columns = self.from_components[:, :PROBED_COLUMNS].to("cpu", torch.float64)
        try:
            vectors = LinearPart(layer, shape).apply(columns.T)  # rows of V^T
        except RuntimeError as error:
            raise AttachError(
                f"The filter was fitted on a layer that takes samples of shape {shape}; "
                f"`{name}` cannot take them: {error}. Fit a filter on this model."
            ) from error
        # With the weights of the fit, the layer maps these columns to orthonormal ones.
        gram = vectors @ vectors.T
        away = (gram - torch.eye(len(gram), dtype=torch.float64)).abs().max()
        if vectors.shape[1] != output_size or not away < SAME_WEIGHTS:
            raise AttachError(
                f"A folded filter belongs to the weights it was fitted on; those of `{name}` "
                "are others. Fit the filter on this model."
            )

    @classmethod
    def forms(cls, shape: tuple[int, ...], n_components: int) -> dict[str, TensorForm]:
        """See `Basis`."""
        return dict.fromkeys(cls.file_names.values(), TensorForm((math.prod(shape), n_components)))


@dataclass(frozen=True, eq=False, kw_only=True)
class FoldedPCA(pca.Decomposition):
    """The PCA of an affine layer's output, whose mean and samples are those of its input."""

    project: Tensor  # P, from centred input to components, shape (q, components)
    rebuild: Tensor  # B, from components to input, shape (q, components)


@dataclass(frozen=True, eq=False, kw_only=True)
class InputPCA(pca.Decomposition):
    """The same without B, which takes memory: P has arbitrary signs, and U leads to B."""

    project: Tensor  # P, shape (q, components)
    rotation: Tensor  # U, shape (rank of W, components)

    def both_ways(self, linear: LinearPart) -> tuple[Tensor, Tensor]:
        """Give P the signs for V = W B, in place, and return P and B of its shape."""
        rebuild = linear.factor[1](self.rotation)
        sign = linear.signs_of(rebuild)
        return self.project.mul_(sign), rebuild.mul_(sign)


class LinearPart:
    """The map W u + b of an affine layer (see `is_affine`), in float64, by a copy."""

    def __init__(self, layer: nn.Module, input_shape: tuple[int, ...]) -> None:
        self._layer = layer
        self._twin = _float64_copy(layer, bias=False)
        self.input_shape = input_shape
        self.input_size = math.prod(input_shape)
        self.output_size = self._twin(torch.zeros(1, *input_shape, dtype=torch.float64)).numel()
        self.chunk = max(1, CHUNK_NUMBERS // self.output_size)  # samples to work on at a time

    @torch.no_grad()
    def apply(self, inputs: Tensor) -> Tensor:
        """Multiply by W: rows of (n, q) to rows of (n, p)."""
        output: Tensor = self._twin(inputs.reshape(-1, *self.input_shape))
        return output.flatten(1)

    @torch.no_grad()
    def output_of(self, sample: Tensor) -> Tensor:
        """Return the layer's own output W u + b for one input: (q,) to (p,)."""
        inputs = sample.to("cpu", torch.float64).reshape(1, *self.input_shape)
        output: Tensor = _float64_copy(self._layer, bias=True)(inputs)
        return output.flatten().clone()  # some layers return what they are given

    def signs_of(self, columns: Tensor) -> Tensor:
        """Return the `signs` of W times columns, (q, n) to (n,)."""
        parts = torch.split(columns, self.chunk, dim=1)  # the whole product may be too large
        return torch.cat([pca.signs(self.apply(part.T).T) for part in parts])

    @functools.cached_property
    def factor(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """R of G = W^T W = R R^T, (q, rank), and a function that multiplies by R^-T."""
        # It takes (rank, n) to (q, n), by the pseudo-inverse if W is rank-deficient.
        gram = self._gram()
        lower, failed = torch.linalg.cholesky_ex(gram)
        pivots = lower.diagonal()
        if not failed and pivots.min() > CHOLESKY_PIVOT_RATIO * pivots.max():
            return lower, lambda some: torch.linalg.solve_triangular(lower.T, some, upper=True)
        eigenvalues, vectors = pca.eigh_descending(gram)
        # At least one direction stays: a layer of zeros is then reported as constant activations.
        rank = max(1, int((eigenvalues > NULL_DIRECTION * eigenvalues[0]).sum()))
        scale, directions = eigenvalues[:rank].sqrt(), vectors[:, :rank]
        return directions * scale, lambda some: directions / scale @ some

    def gram_rows(self, rows: Tensor) -> Tensor:
        """Multiply by W^T W: rows of (n, q) to rows of (n, q)."""
        with torch.enable_grad():
            inputs = rows.reshape(-1, *self.input_shape).requires_grad_()
            # The gradient of |W u|^2 / 2 is W^T W u: automatic differentiation knows the adjoint
            # of every kind of padding, stride and grouping.
            energy = self._twin(inputs).square().sum() / 2
        return torch.autograd.grad(energy, inputs)[0].flatten(1)

    def _gram(self) -> Tensor:
        gram = torch.empty(self.input_size, self.input_size, dtype=torch.float64)
        for start in range(0, self.input_size, self.chunk):
            stop = min(start + self.chunk, self.input_size)
            unit = torch.zeros(stop - start, self.input_size, dtype=torch.float64)
            unit[:, start:stop].fill_diagonal_(1.0)
            gram[start:stop] = self.gram_rows(unit)
        return (gram + gram.T) / 2


def is_affine(layer: nn.Module) -> bool:
    """Return whether a layer is affine by its very type; hooks may change input or output."""
    # nn.Module offers no public way to ask whether a hook is there.
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) in AFFINE and not hooked


@torch.no_grad()
def fold(moments: pca.Moments, linear: LinearPart, n_components: int | float | None) -> InputPCA:
    """Decompose the output of an affine layer from the moments of its input."""
    right = linear.factor[0]
    # One expression, so that no other matrix of q x q stays in memory during the decomposition.
    eigenvalues, rotation = pca.eigh_descending(right.T @ moments.scatter.cpu() @ right)
    kept = pca.choose_components(n_components, eigenvalues, moments.count)
    rotation = rotation[:, :kept]
    return InputPCA(
        mean=moments.mean.cpu().clone(),
        project=right @ rotation,
        rotation=rotation,
        singular_values=eigenvalues[:kept].sqrt(),
        n_samples=moments.count,
        total_variance=pca.total_variance(eigenvalues, moments.count),
    )


def _float64_copy(layer: nn.Module, *, bias: bool) -> nn.Module:
    """Return a copy on the CPU; no random numbers are drawn for it."""
    twin = copy.copy(layer)
    twin._parameters = dict.fromkeys(layer._parameters)
    for name, tensor in layer._parameters.items():
        if tensor is not None and (bias or name != "bias"):
            precise = tensor.detach().to("cpu", torch.float64, copy=True)
            twin._parameters[name] = nn.Parameter(precise, requires_grad=False)
    return twin


class InputGram:
    """All products of two samples' outputs, computed from their inputs."""

    @torch.no_grad()
    def __init__(self, batches: Iterable[Tensor], linear: LinearPart) -> None:
        self._linear = linear
        rows = [pca.finite_samples(batch, linear.input_size).cpu() for batch in batches]
        self._inputs = torch.cat(rows)
        self.count = len(self._inputs)
        pca.check_sample_count(None, self.count)
        # Centred once, in float64, before anything is multiplied: afterwards, digits are lost.
        self._mean = self._inputs.mean(0, dtype=torch.float64)
        self._there_and_back = torch.empty(self._inputs.shape, dtype=torch.float64)  # Z
        self._products = torch.empty(self.count, self.count, dtype=torch.float64)
        chunks = [slice(i, i + linear.chunk) for i in range(0, self.count, linear.chunk)]
        for some in chunks:
            self._there_and_back[some] = linear.gram_rows(self._inputs[some] - self._mean)
        for some in chunks:
            centred = self._inputs[some] - self._mean
            torch.mm(centred, self._there_and_back.T, out=self._products[some])

    @torch.no_grad()
    def pca(
        self, n_components: int | float | None = None, *, leave_out: Sequence[int] = ()
    ) -> FoldedPCA:
        """Decompose all samples except the ones at the positions in `leave_out`."""
        kept = torch.ones(self.count, dtype=torch.bool)
        kept[list(leave_out)] = False
        # Centred again: rounding, and those that are left out, have moved the mean.
        products = pca.products_about_mean(self._products[kept][:, kept])
        eigenvalues, vectors = pca.eigh_descending((products + products.T) / 2)
        count = len(products)
        vectors = vectors[:, : pca.choose_components(n_components, eigenvalues, count)]
        # For all samples, with zeros for those that are left out: no copy of all inputs is made.
        weights = vectors.new_zeros(self.count, vectors.shape[1])
        weights[kept] = vectors - vectors.mean(0)
        rebuild = weights.new_zeros(self._inputs.shape[1], weights.shape[1])  # X^T times weights
        for rows, part in zip(
            torch.split(self._inputs, ROWS), torch.split(weights, ROWS), strict=True
        ):
            rebuild.addmm_((rows - self._mean).T, part)
        project = self._there_and_back.T @ weights
        # B^T P is s^2 up to rounding, which grows as singular values get small.
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
            total_variance=pca.total_variance(eigenvalues, count),
        )
