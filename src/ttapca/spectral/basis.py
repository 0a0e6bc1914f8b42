"""The directions along which a filter scales: three kinds of basis behind one contract.

A basis leads from samples to components and back. A *sample* is a tensor at a layer, flattened to d
numbers and centred; it has one *component* along each direction.

- `Dense` sits on the output of any layer: orthonormal vectors, one matrix for both ways.
- `Folded` sits on the input of an affine layer and filters its output: two matrices, which belong
  to the layer's weights (see `ttapca.spectral.affine`).
- `Cosine` sits on the input or output of a layer for images: cosines, which take hardly any memory
  (see `ttapca.spectral.cosine`).

Code that uses a basis never asks which kind it is. A further kind is a class here, its entry in
`BASES`, a route in `ttapca.fitting.fit` that finds it, and its cost in
`ttapca.fitting.plan`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ttapca._checks import ListOf, Rule, Whole
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.affine import LinearPart, acts_on_input, is_affine, takes_images
from ttapca.spectral.cosine import coefficients_of, dct_matrix, images_of
from ttapca.spectral.fast_cosine import FastCosines, at_once, is_fast, transform_cost
from ttapca.spectral.other_sizes import OtherSize
from ttapca.support.tensors import TensorCache

# The first columns of a folded basis are checked against the layer's weights, and this is how far
# they may be from orthonormal: a bfloat16 copy of the weights passes, other weights do not.
PROBED_COLUMNS = 16
SAME_WEIGHTS = 0.05

# `ttapca.fit` decomposes matrices of up to this many rows: 8 n^2 bytes (512 MB) and some minutes.
MATRIX_LIMIT = 8192

# Bytes of a basis of vectors, on disk and at test time. For images, cosines take its place above.
LARGEST_DENSE = 2**27

# Numbers of an image, up to which principal components are the default: they are found at once, and
# on centred digits of 8 x 8 they were 5 points better than cosines. From 3 x 32 x 32 on, cosines
# were as good on four networks (docs/closed-form-evidence.md).
SMALL = 1024

LONGEST_DCT = 4096  # its matrix has 128 MB
UNIT = 0.05  # tolerance for the squared length of a basis vector in half precision


class BasisCost(NamedTuple):
    """Numbers that a basis keeps, and multiply-adds to filter one sample."""

    numbers: int
    multiply_adds: int


@dataclass(frozen=True)
class TensorForm:
    """What a tensor in a saved filter must be: `holds` checks what `words` says about its numbers.

    Without a `dtype` it is a matrix in the precision in which the filter is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    words: str = "finite"
    holds: Callable[[Tensor], bool] = lambda _: True


class Basis(nn.Module, abc.ABC):
    """The contract of all bases; their tensors are buffers, so `.to()` moves them.

    Attributes:
        at_input: Whether samples are the input of an affine layer instead of a layer's output.
        sides: Values that `at_input` can have.
        routes: Names of the routes of `ttapca.fit` that find this kind of basis.
        file_names: What its tensors are called in a saved filter, by attribute.
        shape_rule: Rule for the shape of a sample in a saved filter.
        accuracy: How exact the components are when the route that found them is exact.
        kind: What the components are.
        principal: Whether they are principal ones.
        of_weights: Whether it follows from the weights of the layer, which `check_layer` then
            compares.
        at_once: How many samples are best worked on at a time; None for all of a batch.
    """

    at_input: bool
    sides: ClassVar[tuple[bool, ...]]
    routes: ClassVar[tuple[str, ...]]
    file_names: ClassVar[dict[str, str]]
    shape_rule: ClassVar[Rule] = ListOf(Whole(1), 1, 8)
    accuracy: ClassVar[str] = "exact up to rounding"
    kind: ClassVar[str] = "Principal components"
    principal: ClassVar[bool] = True
    of_weights: ClassVar[bool] = False
    at_once: int | None = None

    @property
    @abc.abstractmethod
    def n_components(self) -> int:
        """Number of components."""

    @property
    def of_input(self) -> bool:
        """Whether components are those of the layer's input, and not of what it makes of it."""
        return False

    @abc.abstractmethod
    def project(self, centred: Tensor) -> Tensor:
        """Return the components of centred samples, (batch, d) to (batch, components)."""

    @abc.abstractmethod
    def add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        """Return a new tensor: `base` plus the samples that the first components stand for.

        Args:
            base: Shape (d,) or (batch, d).
            components: Shape (batch, up to n_components).
        """

    @abc.abstractmethod
    def truncated(self, n_components: int) -> Basis:
        """Return a basis of the first components, which shares memory."""

    @abc.abstractmethod
    def prepared(self, dtype: torch.dtype) -> Basis:
        """Return a copy that computes in this precision."""

    @abc.abstractmethod
    def noise(self) -> Tensor:
        """Return each component's variance for white noise of variance 1, in float64."""

    def lengths(self) -> Tensor:
        """Return the squared length of what each component stands for, in float64."""
        return torch.ones(self.n_components, dtype=torch.float64)

    @classmethod
    def most_components(cls, shape: tuple[int, ...], output_size: int) -> int:
        """Return how many components such a basis has at most.

        Args:
            shape: Shape of one sample that is filtered.
            output_size: Numbers in one sample of the layer's output.
        """
        return min(math.prod(shape), output_size)

    @classmethod
    @abc.abstractmethod
    def cost(cls, shape: tuple[int, ...], n_components: int) -> BasisCost:
        """Return the cost of such a basis for samples of this shape."""

    def check_layer(
        self, layer: nn.Module, name: str, shape: tuple[int, ...], output_size: int
    ) -> None:
        """Raise `AttachError` unless a filter for samples of this shape can sit at the layer.

        At the fit, a sample of the layer's output had `output_size` numbers.
        """

    def check_shape(self, shape: tuple[int, ...], fitted: tuple[int, ...]) -> None:
        """Raise `ShapeError` unless samples of this shape can be filtered.

        Args:
            shape: Of one sample.
            fitted: Shape of the samples of the fit, which every basis takes.
        """
        if shape == fitted:
            return
        way_out = "Resize the input, or fit a filter for this shape"
        if Cosine.takes(fitted) and len(shape) == 3 and shape[0] == fitted[0]:
            way_out += ', or fit it with `route="dct"`, whose cosines take images of any size'
        raise ShapeError(
            "Principal components take samples of one shape. The filter was fitted on samples of "
            f"shape {fitted}; found {shape}. {way_out}."
        )

    def for_shape(self, shape: tuple[int, ...], mean: Tensor) -> OtherSize:
        """Return what leads from samples of another shape to those of the fit, and back.

        Args:
            shape: Of one sample, which `check_shape` allows.
            mean: Source mean of the samples of the fit, shape (d,).
        """
        raise NotImplementedError(f"{type(self).__name__} takes samples of one shape.")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by their name in the file."""
        return {name: getattr(self, attribute) for attribute, name in self.file_names.items()}

    @classmethod
    @abc.abstractmethod
    def forms(cls, shape: tuple[int, ...], n_components: int) -> dict[str, TensorForm]:
        """Return what these tensors must be."""

    @classmethod
    @abc.abstractmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...], *, at_input: bool
    ) -> Basis:
        """Build a basis from saved tensors, which were compared with `forms` before."""

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"components={self.n_components}, at the {'input' if self.at_input else 'output'}"


def half_product(row: Tensor, matrix: Tensor | None) -> Tensor | None:
    """Multiply a single sample by the transpose of a float16 matrix: (1, n) and (m, n) to (1, m).

    The time for a batch goes into arithmetic, which is as fast on a CPU in float32 as in float16.
    The time for a single sample goes into reading the matrix, and float16 is half as much to read.

    Returns:
        None where float32 must be used: for batches, under gradients, while a model is compiled, on
        other devices than the CPU, and where float16 cannot hold the numbers.
    """
    # While a model is exported, nobody may ask how many rows there are.
    if matrix is None or torch.compiler.is_compiling() or len(row) != 1 or torch.is_grad_enabled():
        return None
    # `.to(...)` may have moved or widened what was float16 on the CPU.
    if matrix.dtype != torch.float16 or matrix.device.type != "cpu":
        return None
    product = (row.half() @ matrix.T).to(row.dtype)
    return product if math.isfinite(float(product.sum())) else None


class _MatrixBasis(Basis):
    """A basis of matrices with a column for each component."""

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
        return self.to_components.shape[1]

    def project(self, centred: Tensor) -> Tensor:
        quick = half_product(centred, self.half_to)
        return centred @ self.to_components if quick is None else quick

    def add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        count = components.shape[1]
        half = self.half_from
        quick = None if half is None else half_product(components, half[:, :count])
        if quick is not None:
            return base + quick
        return torch.addmm(base, components, self.from_components[:, :count].T)

    def truncated(self, n_components: int) -> Basis:
        return type(self)(*(matrix[:, :n_components] for matrix in self.tensors().values()))

    def prepared(self, dtype: torch.dtype) -> Basis:
        matrices = [_by_component(matrix, dtype) for matrix in self.tensors().values()]
        if self.to_components.dtype != torch.float16 or dtype != torch.float32:
            return type(self)(*matrices)
        # float16 copies stay beside the float32 matrices. The numbers that make up one result are
        # adjacent in memory.
        halves = (self.to_components.T.contiguous(), self.from_components.contiguous())
        return type(self)(*matrices, halves=halves)

    def noise(self) -> Tensor:
        return self.to_components.double().square().sum(0)

    @classmethod
    def cost(cls, shape: tuple[int, ...], n_components: int) -> BasisCost:
        numbers = math.prod(shape) * n_components
        return BasisCost(len(cls.file_names) * numbers, 2 * numbers)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        shape: tuple[int, ...],  # noqa: ARG003 - see `Basis`
        *,
        at_input: bool,  # noqa: ARG003
    ) -> Basis:
        return cls(*(tensors[name] for name in cls.file_names.values()))


def _by_component(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in which the numbers of one component are adjacent, shape (d, components).

    A single image is then multiplied a fifth faster; and because all have this layout, a saved
    filter rounds as the fitted one does.
    """
    return matrix.T.to(dtype, copy=True, memory_format=torch.contiguous_format).T


class Dense(_MatrixBasis):
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
        return {"project": _orthonormal((math.prod(shape), n_components))}


class Folded(_MatrixBasis):
    """Components of an affine layer's output, in the space of its input.

    It has two matrices of shape (d, components): one from centred input to components, one back.
    """

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


class Cosine(Basis):
    """Coefficients of a discrete cosine transform of images whose channels were rotated.

    Args:
        rotation: Rotation of the channels, orthonormal columns, shape (C, C).
        order: Index of each component in the flattened (C, H, W), shape (components,).
        shape: Shape of an image, (C, H, W).
        at_input: See `Basis`.
    """

    sides = (False, True)
    routes = ("dct",)
    file_names: ClassVar[dict[str, str]] = {"rotation": "project", "order": "order"}
    shape_rule = ListOf(Whole(1, LONGEST_DCT), 3, 3)
    accuracy = "cosines, not principal components; their variances are exact"
    kind = "Cosines"
    principal = False
    rotation: Tensor
    order: Tensor
    height: Tensor
    width: Tensor

    def __init__(
        self, rotation: Tensor, order: Tensor, shape: tuple[int, ...], *, at_input: bool = False
    ) -> None:
        super().__init__()
        self.at_input = at_input
        self.shape = tuple(shape)
        self.register_buffer("rotation", rotation)
        self.register_buffer("order", order)
        # Not in the state dict: they follow from the shape.
        for name, size in zip(("height", "width"), shape[1:], strict=True):
            self.register_buffer(name, dct_matrix(size).to(rotation), persistent=False)
        self._fast = TensorCache[FastCosines]()
        self.at_once = at_once(self.shape)

    @classmethod
    def takes(cls, shape: tuple[int, ...]) -> bool:
        """Return whether samples of this shape can be images."""
        return len(shape) == 3 and max(shape) <= LONGEST_DCT

    @property
    def of_input(self) -> bool:
        """See `Basis`: it does not know the layer."""
        return self.at_input

    @property
    def n_components(self) -> int:
        """Number of components."""
        return len(self.order)

    def project(self, centred: Tensor) -> Tensor:
        """See `Basis`."""
        if is_fast(centred, self.shape):
            return self._by_fft().project(centred, self.rotation)
        return self.coefficients(centred).index_select(1, self.order)

    def add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        """See `Basis`."""
        if is_fast(components, self.shape):
            return self._by_fft().rebuilt(components, self.rotation).add_(base)
        samples = components.shape[0]  # not `len`: exporters would fix it
        every = components.new_zeros(samples, math.prod(self.shape))
        every = every.index_copy(1, self.order[: components.shape[1]], components)
        return base + self.rebuilt(every)

    def _by_fft(self) -> FastCosines:
        return self._fast.get([self.order], lambda: FastCosines(self.shape, self.order))

    def coefficients(self, centred: Tensor) -> Tensor:
        """Return all coefficients, also those that are no components, both (batch, d)."""
        images = centred.reshape(-1, *self.shape)
        return coefficients_of(images, self.rotation, self.height, self.width)

    def rebuilt(self, coefficients: Tensor) -> Tensor:
        """Return the samples that coefficients stand for, both (batch, d)."""
        table = coefficients.reshape(-1, *self.shape)
        return images_of(table, self.rotation, self.height, self.width).flatten(1)

    def check_shape(self, shape: tuple[int, ...], fitted: tuple[int, ...]) -> None:
        """Raise unless these are images with the channels of the fit; they may have any size."""
        if shape == fitted:
            return
        images = len(shape) == 3 and shape[0] == fitted[0] and min(shape) > 0
        if not images or max(shape[1:]) > LONGEST_DCT:
            raise ShapeError(
                f"Cosines take images of any size with the channels that they were fitted on, up "
                f"to {LONGEST_DCT:,} pixels a side. The filter was fitted on samples of shape "
                f"{fitted}; found {shape}. Give it such images, or fit a filter for this shape."
            )

    def for_shape(self, shape: tuple[int, ...], mean: Tensor) -> OtherSize:
        """See `Basis`."""
        return OtherSize(self, shape, mean)

    def truncated(self, n_components: int) -> Basis:
        """See `Basis`."""
        return Cosine(self.rotation, self.order[:n_components], self.shape, at_input=self.at_input)

    def prepared(self, dtype: torch.dtype) -> Basis:
        """See `Basis`."""
        rotation = self.rotation.to(dtype, copy=True)
        return Cosine(rotation, self.order.clone(), self.shape, at_input=self.at_input)

    def noise(self) -> Tensor:
        """See `Basis`: for an orthonormal basis, all are 1."""
        return torch.ones(self.n_components, dtype=torch.float64)

    @classmethod
    def most_components(cls, shape: tuple[int, ...], output_size: int) -> int:  # noqa: ARG003
        """See `Basis`: cosines are those of the samples, whatever the layer makes of them."""
        return math.prod(shape)

    @classmethod
    def cost(cls, shape: tuple[int, ...], n_components: int) -> BasisCost:
        """See `Basis`."""
        channels, height, width = shape
        numbers = channels**2 + height**2 + width**2 + n_components
        for_each = channels + transform_cost(height, width)
        return BasisCost(numbers, 2 * math.prod(shape) * for_each)

    @classmethod
    def forms(cls, shape: tuple[int, ...], n_components: int) -> dict[str, TensorForm]:
        """See `Basis`."""
        size = math.prod(shape)
        words = f"different places from 0 to {size - 1:,}"
        return {
            "project": _orthonormal((shape[0], shape[0])),
            "order": TensorForm(
                (n_components,), torch.int64, words, lambda order: _different_places(order, size)
            ),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...], *, at_input: bool
    ) -> Basis:
        """See `Basis`."""
        return cls(tensors["project"], tensors["order"], shape, at_input=at_input)


# By the name of the route that finds it, which saved filters hold, and whether it acts on the
# layer's input.
BASES: dict[tuple[str, bool], type[Basis]] = {
    (route, side): kind
    for kind in (Folded, Dense, Cosine)
    for route in kind.routes
    for side in kind.sides
}
ROUTE_NAMES = ("folded", *Dense.routes, *Cosine.routes)


def basis_kind(route: str, *, at_input: bool) -> type[Basis]:
    """Return the kind of basis that a route finds, on that side of the layer if it can be there."""
    return BASES.get((route, at_input)) or BASES[route, not at_input]


def cosines_serve(shape: tuple[int, ...], data_shape: tuple[int, ...] | None) -> bool:
    """Return whether cosines do as well as principal components.

    They do for the images that a model is given, unless these are small.

    Args:
        shape: Shape of the samples that are filtered.
        data_shape: Shape of one sample of what the model is given, where that is known.

    Example:
        >>> cosines_serve((3, 32, 32), (3, 32, 32)), cosines_serve((1, 8, 8), (1, 8, 8))
        (True, False)
    """
    return takes_images(shape, data_shape) and Cosine.takes(shape) and math.prod(shape) > SMALL


def usual_basis(
    layer: nn.Module,
    input_shape: tuple[int, ...] | None,
    output_shape: tuple[int, ...],
    n_components: int = 1,
    data_shape: tuple[int, ...] | None = None,
    *,
    asked: bool = True,
) -> tuple[type[Basis], tuple[int, ...]]:
    """Return the kind of basis that `ttapca.fit` finds by default, and the shape it filters.

    Args:
        layer: The layer.
        input_shape: Shape of one sample of its input; None if that is not a single tensor.
        output_shape: Shape of one sample of its output.
        n_components: How many components are kept.
        data_shape: Shape of one sample of what the model is given; see `acts_on_input`.
        asked: Whether that many were asked for; without, images have all cosines.
    """
    kind: type[Basis] = Dense
    shape = output_shape
    at_input = acts_on_input(layer, input_shape, output_shape, data_shape)
    if at_input and input_shape is not None:
        kind, shape = Folded, input_shape
    size = math.prod(shape)
    if not asked and cosines_serve(shape, data_shape):
        return Cosine, shape
    large = 4 * kind.cost(shape, min(size, n_components)).numbers > LARGEST_DENSE
    return (Cosine if large and size > MATRIX_LIMIT and Cosine.takes(shape) else kind), shape


def _orthonormal(shape: tuple[int, ...]) -> TensorForm:
    return TensorForm(shape, None, "columns of length 1", _has_unit_columns)


def _has_unit_columns(matrix: Tensor) -> bool:
    lengths = matrix.float().square().sum(0)
    return bool(((lengths - 1).abs() <= UNIT).all())


def _different_places(order: Tensor, size: int) -> bool:
    inside = bool((order >= 0).all()) and bool((order < size).all())
    return inside and len(set(order.tolist())) == len(order)
