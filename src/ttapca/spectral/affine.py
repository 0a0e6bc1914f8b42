"""The PCA of an affine layer's output, computed and applied in the space of its input.

Let the layer be A = W u + b with u of q numbers and A of p. For the first convolution of an image
network q is far smaller than p (3 x 32 x 32 against 16 x 32 x 32), and nothing of size p is needed:

- G = W^T W (q x q), factored as R R^T;
- R^T S_u R = U D U^T with S_u the scatter of u: D are the eigenvalues of the scatter of A, and the
  columns of V = W R^-T U are its eigenvectors, orthonormal because U^T R^-1 G R^-T U = I;
- the components of A are (u - mean) P with P = R U, and scaling them by gains and going back is
  u' = mean + (components * gains) B^T with B = R^-T U, followed by the layer itself: W u' + b.

Where W is rank-deficient, the eigenvectors of G with eigenvalue zero are dropped: what the layer
cannot see needs no filter.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttapca.spectral.moments import Moments
from ttapca.spectral.pca import (
    Spectrum,
    choose_components,
    eigh_descending,
    signs,
    total_variance,
)

AFFINE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

# Rows of a chunk hold at most this many numbers, so that work space stays near 64 MB.
CHUNK_NUMBERS = 8_000_000

# Below this ratio of smallest to largest pivot, a Cholesky factor loses half of the digits and the
# slower eigendecomposition takes over.
CHOLESKY_PIVOT_RATIO = 1e-4

# Eigenvalues of G below this fraction of the largest one are rounding, not directions of W.
NULL_DIRECTION = 1e-13


@dataclass(frozen=True, eq=False, kw_only=True)
class InputProjection(Spectrum):
    """The way from an affine layer's input to the components of its output.

    Mean and samples are those of the input; singular values and variances those of the output.

    Attributes:
        project: P, from centred input to components, of either sign, shape (q, components).
    """

    project: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class FoldedPCA(InputProjection):
    """PCA of an affine layer's output, in the space of its input: both ways, with fixed signs.

    Attributes:
        rebuild: B, from components to centred input, shape (q, components).
    """

    rebuild: Tensor


class LinearPart:
    """The map W u + b of a layer for which `is_affine` holds, in float64; the layer is not touched.

    `input_shape` is that of one sample.
    """

    def __init__(self, layer: nn.Module, input_shape: tuple[int, ...]) -> None:
        self._twin = _without_bias(layer)
        self.input_shape = input_shape
        self.input_size = math.prod(input_shape)
        probe = self._twin(torch.zeros(1, *input_shape, dtype=torch.float64))
        self.output_size = probe[0].numel()
        self._offset = _offset(layer, probe)  # (p,)

    def apply(self, inputs: Tensor) -> Tensor:
        """Multiply by W: rows of (n, q) to rows of (n, p)."""
        with torch.no_grad():
            output: Tensor = self._twin(inputs.reshape(-1, *self.input_shape))
        return output.flatten(1)

    def output_of(self, sample: Tensor) -> Tensor:
        """The layer's own output, W u + b, for one input: (q,) to (p,)."""
        return self.apply(sample[None].to("cpu", torch.float64))[0] + self._offset

    def gram_rows(self, rows: Tensor) -> Tensor:
        """Multiply by W^T W: rows of (n, q) to rows of (n, q)."""
        with torch.enable_grad():
            inputs = rows.reshape(-1, *self.input_shape).requires_grad_()
            # The gradient of |W u|^2 / 2 is W^T W u: automatic differentiation knows the adjoint
            # of every kind of padding, stride and grouping.
            energy = self._twin(inputs).square().sum() / 2
        return torch.autograd.grad(energy, inputs)[0].flatten(1)

    @functools.cached_property
    def factor(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """`factor` of W^T W, which itself is not kept."""
        return factor(self.gram())

    def gram(self) -> Tensor:
        """W^T W, shape (q, q)."""
        gram = torch.empty(self.input_size, self.input_size, dtype=torch.float64)
        rows = max(1, CHUNK_NUMBERS // self.output_size)
        for start in range(0, self.input_size, rows):
            stop = min(start + rows, self.input_size)
            unit = torch.zeros(stop - start, self.input_size, dtype=torch.float64)
            unit[:, start:stop].fill_diagonal_(1.0)
            gram[start:stop] = self.gram_rows(unit)
        return (gram + gram.T) / 2

    def column_signs(self, rebuild: Tensor) -> Tensor:
        """Signs of V = W B by the rule of `signs`, without holding V, shape (components,)."""
        columns = max(1, CHUNK_NUMBERS // self.output_size)
        return torch.cat(
            [signs(self.apply(part.T).T) for part in torch.split(rebuild, columns, dim=1)]
        )


def is_affine(layer: nn.Module) -> bool:
    """Whether a layer's output is an affine function of its input, by its type.

    A subclass may override `forward`, and a hook may change what goes in or comes out, so both
    count as not affine.
    """
    # nn.Module offers no public way to ask whether a hook is there.
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) in AFFINE and not hooked


def acts_on_input(
    layer: nn.Module, input_shape: tuple[int, ...] | None, output_shape: tuple[int, ...]
) -> bool:
    """Whether a filter is better put on a layer's input: it is affine, and its input smaller."""
    if input_shape is None or math.prod(input_shape) >= math.prod(output_shape):
        return False
    return is_affine(layer)


@torch.no_grad()
def fold(moments: Moments, linear: LinearPart, n_components: int | float | None) -> FoldedPCA:
    """Decompose the output of an affine layer from the moments of its input.

    `n_components` is as for `choose_components`; a fraction is one of the output's variance.
    """
    one_way, rotation = _project(moments, linear, n_components)
    rebuild = linear.factor[1](rotation)
    sign = linear.column_signs(rebuild)
    return FoldedPCA(
        mean=one_way.mean,
        project=one_way.project.mul_(sign),
        rebuild=rebuild.mul_(sign),
        singular_values=one_way.singular_values,
        n_samples=one_way.n_samples,
        total_variance=one_way.total_variance,
    )


@torch.no_grad()
def fold_one_way(moments: Moments, linear: LinearPart, n_components: int) -> InputProjection:
    """The same without the way back and without signs: less work, and one matrix instead of two."""
    return _project(moments, linear, n_components)[0]


def _project(
    moments: Moments, linear: LinearPart, n_components: int | float | None
) -> tuple[InputProjection, Tensor]:
    """The way from input to components; and U, shape (rank of W, components)."""
    right = linear.factor[0]
    # In one expression: nothing of size q x q outlives it but what is decomposed.
    eigenvalues, rotation = eigh_descending(right.T @ moments.scatter.cpu() @ right)
    kept = choose_components(n_components, eigenvalues, moments.count)
    rotation = rotation[:, :kept]
    found = InputProjection(
        mean=moments.mean.cpu().clone(),
        project=right @ rotation,
        singular_values=eigenvalues[:kept].sqrt(),
        n_samples=moments.count,
        total_variance=total_variance(eigenvalues, moments.count),
    )
    return found, rotation


def factor(gram: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Factor a positive semi-definite G = R R^T, shape (q, q).

    Returns:
        R, shape (q, rank), and the product with R^-T or its pseudo-inverse, (rank, n) to (q, n).
    """
    lower, failed = torch.linalg.cholesky_ex(gram)
    pivots = lower.diagonal()
    if not failed and pivots.min() > CHOLESKY_PIVOT_RATIO * pivots.max():
        return lower, lambda columns: torch.linalg.solve_triangular(lower.T, columns, upper=True)
    eigenvalues, vectors = eigh_descending(gram)
    # At least one direction stays: a layer of zeros is then reported as constant activations.
    rank = max(1, int((eigenvalues > NULL_DIRECTION * eigenvalues[0]).sum()))
    scale, directions = eigenvalues[:rank].sqrt(), vectors[:, :rank]
    return directions * scale, lambda columns: directions / scale @ columns


def _without_bias(layer: nn.Module) -> nn.Module:
    """A copy in float64 on the processor; no random numbers are drawn for it."""
    twin = copy.copy(layer)
    weight = torch.as_tensor(layer.weight).detach().to("cpu", torch.float64, copy=True)
    twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False), "bias": None}
    return twin


def _offset(layer: nn.Module, probe: Tensor) -> Tensor:
    """The bias b as the layer adds it: to channels (convolution) or to the last dimension."""
    bias = layer.bias
    if not isinstance(bias, Tensor):
        return torch.zeros_like(probe).flatten()
    bias = bias.detach().to("cpu", torch.float64)
    if not isinstance(layer, nn.Linear):
        bias = bias.reshape(-1, *[1] * (probe.dim() - 2))
    return (probe * 0 + bias).flatten()
