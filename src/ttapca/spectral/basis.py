"""The directions along which a filter scales: the contract of all bases, and the plain kind.

A *sample* is a tensor at a layer, flattened to d numbers and centred; it has one *component* along
each direction. A further kind of basis is a class in a file of its own, its entry in
`ttapca.spectral.basis_choice`, a route in `ttapca.fitting.routes`, and its cost in
`ttapca.fitting.plan`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ttapca._checks import ListOf, Rule, Whole
from ttapca.errors import ShapeError
from ttapca.spectral.cosine_transform import has_cosines

if TYPE_CHECKING:
    from ttapca.spectral.other_sizes import OtherSize

UNIT = 0.05  # tolerance for the squared length of a basis vector in half precision


class BasisCost(NamedTuple):
    """Numbers that a basis keeps, and multiply-adds to filter one sample."""

    numbers: int
    multiply_adds: int


@dataclass(frozen=True)
class TensorForm:
    """The rule for a tensor in a saved filter; without a `dtype` it has the filter's precision."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    words: str = "finite"
    holds: Callable[[Tensor], bool] = lambda _: True


class Basis(nn.Module, abc.ABC):
    """The contract of all bases; their tensors are buffers, so `.to()` moves them."""

    at_input: bool  # whether samples are the input of an affine layer, and not a layer's output
    sides: ClassVar[tuple[bool, ...]]  # values that `at_input` can have
    routes: ClassVar[tuple[str, ...]]  # routes of `ttapca.fit` that find this kind of basis
    file_names: ClassVar[dict[str, str]]  # names of tensors in a saved filter, by attribute
    shape_rule: ClassVar[Rule] = ListOf(Whole(1), 1, 8)  # for samples, in a saved filter
    accuracy: ClassVar[str] = "exact up to rounding"  # of components, if the route is exact
    kind: ClassVar[str] = "Principal components"  # name of the components, for messages
    principal: ClassVar[bool] = True  # whether they are principal ones
    of_weights: ClassVar[bool] = False  # whether `check_layer` compares the layer's weights
    of_input = False  # whether components are those of the layer's input, and not of its output
    at_once: int | None = None  # samples that are best worked on at a time; None for a whole batch

    @property
    @abc.abstractmethod
    def n_components(self) -> int:
        """Number of components."""

    @abc.abstractmethod
    def project(self, centred: Tensor) -> Tensor:
        """Return the components of centred samples, (batch, d) to (batch, components)."""

    @abc.abstractmethod
    def add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        """Return a new tensor: `base`, (d,) or (batch, d), plus the first components rebuilt."""

    @abc.abstractmethod
    def truncated(self, n_components: int) -> Basis:
        """Return a basis of the first components, which shares memory."""

    @abc.abstractmethod
    def prepared(self, dtype: torch.dtype) -> Basis:
        """Return a copy that computes in this precision."""

    def noise(self) -> Tensor:
        """Return each component's variance for white noise of variance 1, in float64."""
        return torch.ones(self.n_components, dtype=torch.float64)  # of an orthonormal basis

    def lengths(self) -> Tensor:
        """Return the squared length of the sample that each component stands for, in float64."""
        return torch.ones(self.n_components, dtype=torch.float64)  # of an orthonormal basis

    @classmethod
    def most_components(cls, shape: tuple[int, ...], output_size: int) -> int:
        """Return the largest number of components, for samples of this shape at such a layer."""
        return min(math.prod(shape), output_size)

    @classmethod
    @abc.abstractmethod
    def cost(cls, shape: tuple[int, ...], n_components: int) -> BasisCost:
        """Return the cost of such a basis for samples of this shape."""

    def check_layer(
        self, layer: nn.Module, name: str, shape: tuple[int, ...], output_size: int
    ) -> None:
        """Raise `AttachError` unless a filter of these shapes can sit at the layer."""

    def check_shape(self, shape: tuple[int, ...], fitted: tuple[int, ...]) -> None:
        """Raise `ShapeError` unless samples of this shape can be filtered, as `fitted` ones can."""
        if shape == fitted:
            return
        way_out = "Resize the input, or fit a filter for this shape"
        if has_cosines(fitted) and len(shape) == 3 and shape[0] == fitted[0]:
            way_out += ', or fit it with `route="dct"`, whose cosines take images of any size'
        raise ShapeError(
            "Principal components take samples of one shape. The filter was fitted on samples of "
            f"shape {fitted}; found {shape}. {way_out}."
        )

    def for_shape(self, shape: tuple[int, ...], mean: Tensor) -> OtherSize:
        """Return a map from samples of another shape, allowed by `check_shape`, and back."""
        raise NotImplementedError(f"{type(self).__name__} takes samples of one shape.")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by their name in the file."""
        return {name: getattr(self, attribute) for attribute, name in self.file_names.items()}

    @classmethod
    @abc.abstractmethod
    def forms(cls, shape: tuple[int, ...], n_components: int) -> dict[str, TensorForm]:
        """Return the rules for these tensors."""

    @classmethod
    @abc.abstractmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...], *, at_input: bool
    ) -> Basis:
        """Build a basis from saved tensors, which were compared with `forms` before."""

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"components={self.n_components}, at the {'input' if self.at_input else 'output'}"


class MatrixBasis(Basis):
    """A basis of matrices of shape (d, components), for the ways to components and back."""

    to_components: Tensor
    from_components: Tensor
    half_to: Tensor | None
    half_from: Tensor | None

    def __init__(self, *matrices: Tensor, halves: tuple[Tensor | None, ...] = (None, None)) -> None:
        super().__init__()
        for attribute, matrix in zip(self.file_names, matrices, strict=True):
            self.register_buffer(attribute, matrix)
        # Not in the state dict: they are copies, for single samples.
        for attribute, half in zip(("half_to", "half_from"), halves, strict=True):
            self.register_buffer(attribute, half, persistent=False)

    @property
    def n_components(self) -> int:
        """Number of components."""
        return self.to_components.shape[1]

    def project(self, centred: Tensor) -> Tensor:
        """See `Basis`."""
        quick = _half_product(centred, self.half_to)
        return centred @ self.to_components if quick is None else quick

    def add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        """See `Basis`."""
        count = components.shape[1]
        half = self.half_from
        quick = None if half is None else _half_product(components, half[:, :count])
        if quick is not None:
            return base + quick
        return torch.addmm(base, components, self.from_components[:, :count].T)

    def truncated(self, n_components: int) -> Basis:
        """See `Basis`."""
        return type(self)(*(matrix[:, :n_components] for matrix in self.tensors().values()))

    def prepared(self, dtype: torch.dtype) -> Basis:
        """See `Basis`."""
        # The numbers of one component are adjacent in memory. A single image is then multiplied a
        # fifth faster; and since all have this layout, a saved filter rounds as the fitted one.
        adjacent = torch.contiguous_format
        matrices = [
            matrix.T.to(dtype, copy=True, memory_format=adjacent).T
            for matrix in self.tensors().values()
        ]
        if self.to_components.dtype != torch.float16 or dtype != torch.float32:
            return type(self)(*matrices)
        # float16 copies stay beside the float32 matrices. The numbers that make up one result are
        # adjacent in memory.
        halves = (self.to_components.T.contiguous(), self.from_components.contiguous())
        return type(self)(*matrices, halves=halves)

    def noise(self) -> Tensor:
        """See `Basis`."""
        return self.to_components.double().square().sum(0)

    @classmethod
    def cost(cls, shape: tuple[int, ...], n_components: int) -> BasisCost:
        """See `Basis`."""
        numbers = math.prod(shape) * n_components
        return BasisCost(len(cls.file_names) * numbers, 2 * numbers)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...], *, at_input: bool
    ) -> Basis:
        """See `Basis`."""
        del shape, at_input
        return cls(*(tensors[name] for name in cls.file_names.values()))


class Dense(MatrixBasis):
    """Orthonormal vectors in the space of a layer's output, shape (d, components)."""

    at_input = False
    sides = (False,)
    routes = ("exact", "gram", "randomised")
    file_names: ClassVar[dict[str, str]] = {"to_components": "project"}

    @property
    def from_components(self) -> Tensor:  # type: ignore[override]
        """The same matrix as `to_components`."""
        return self.to_components

    @classmethod
    def forms(cls, shape: tuple[int, ...], n_components: int) -> dict[str, TensorForm]:
        """See `Basis`."""
        return {"project": orthonormal((math.prod(shape), n_components))}


def orthonormal(shape: tuple[int, ...]) -> TensorForm:
    """Return the rule for a saved matrix with columns of length 1."""
    return TensorForm(shape, None, "columns of length 1", _has_unit_columns)


def _has_unit_columns(matrix: Tensor) -> bool:
    lengths = matrix.float().square().sum(0)
    return bool(((lengths - 1).abs() <= UNIT).all())


def _half_product(row: Tensor, matrix: Tensor | None) -> Tensor | None:
    """Multiply a sample by a float16 matrix, (1, n) and (m, n) to (1, m); None if it cannot be."""
    # Reading the matrix takes most of the time of one sample, and float16 is half as much to read.
    # While a model is exported, the number of rows must not be looked at.
    if matrix is None or torch.compiler.is_compiling() or len(row) != 1 or torch.is_grad_enabled():
        return None
    # `.to(...)` may have moved or widened the matrix.
    if matrix.dtype != torch.float16 or matrix.device.type != "cpu":
        return None
    product = (row.half() @ matrix.T).to(row.dtype)
    return product if math.isfinite(float(product.sum())) else None
