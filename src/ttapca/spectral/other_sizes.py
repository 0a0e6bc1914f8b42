"""Images of another size than that of the fit, for a filter of cosines (docs/large-images.md).

A cosine of index u along H pixels has u / (2 H) waves a pixel: along h pixels its partner has the
index u h / H, rounded, since noise, blur and compression act on waves a pixel. The first cosines of
either direction keep their index: they say where an image is bright. The spectral density of
natural images falls like 1 / frequency^2 (Field, "Relations between the statistics of natural
images and the response properties of cortical cells", 1987). So if partners differ in frequency,
coefficients are multiplied by the ratio of the frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.spectral.cosine_transform import (
    FastCosines,
    at_once,
    coefficients_of,
    dct_matrix,
    images_of,
    is_fast,
)

if TYPE_CHECKING:
    from ttapca.spectral.cosine import Cosine

# Cosines of each direction that belong to the layout of an image: eight, or one in eight.
LAYOUT = 8

# Logarithm of the energy that the softest resizing leaves at least.
SOFTEST = -3.0


class OtherSize:
    """Leads from images of another size, (C, h, w), to coefficients of the fitted one, and back."""

    def __init__(self, basis: Cosine, shape: tuple[int, ...], mean: Tensor) -> None:
        self.shape = shape
        self._basis = basis
        like = basis.rotation
        (rows, columns), (height, width) = shape[1:], basis.shape[1:]
        self._height, self._width = dct_matrix(rows).to(like), dct_matrix(columns).to(like)
        down, across = _partners(height, rows), _partners(width, columns)
        here, fitted = _frequencies(rows, columns), _frequencies(height, width)
        self._ratio = (here[down[:, None], across] / fitted).to(like)  # (H, W)
        # For every fitted cosine its partner here, and the other way round.
        self._down, self._across = down.to(like.device), across.to(like.device)
        self._fitted_down = _partners(rows, height).to(like.device)
        self._fitted_across = _partners(columns, width).to(like.device)
        # Factor by which the coefficients of a resized image are larger.
        self._growth = math.sqrt(rows * columns / (height * width))
        self.at_once = at_once(shape)
        self._fast = FastCosines(shape, torch.arange(math.prod(shape), device=like.device))
        # The mean at this size: its cosines keep their index, its pixels their values.
        every = basis.coefficients(mean[None]).reshape(basis.shape)
        shared = [min(rows, height), min(columns, width)]
        found = every.new_zeros(self.shape)
        found[:, : shared[0], : shared[1]] = every[:, : shared[0], : shared[1]]
        found *= self._growth
        self.mean = self.add_rebuilt(torch.zeros_like(found.flatten()), found[None])[0]

    def project(self, centred: Tensor) -> Tensor:
        """Return all coefficients of centred images, both of shape (batch, C h w)."""
        if is_fast(centred, self.shape):
            return self._fast.project(centred, self._basis.rotation)
        images = centred.reshape(-1, *self.shape)
        return coefficients_of(images, self._basis.rotation, self._height, self._width)

    def add_rebuilt(self, base: Tensor, coefficients: Tensor) -> Tensor:
        """Return a new tensor: `base`, (C h w,) or (batch, C h w), plus images by coefficients."""
        if is_fast(coefficients, self.shape):
            rows = coefficients.reshape(-1, math.prod(self.shape))
            return self._fast.rebuilt(rows, self._basis.rotation).add_(base)
        table = coefficients.reshape(-1, *self.shape)
        images = images_of(table, self._basis.rotation, self._height, self._width)
        return base + images.flatten(1)

    def like_fitted(self, coefficients: Tensor) -> Tensor:
        """Return coefficients as of images of the fitted size: (batch, C h w) to (batch, C H W)."""
        table = coefficients.reshape(-1, *self.shape)
        table = table.index_select(2, self._down).index_select(3, self._across)
        return (table * self._ratio).flatten(1)

    def components(self, fitted: Tensor) -> Tensor:
        """Return the coefficients of the fitted size that are components of the basis."""
        return fitted.index_select(1, self._basis.order)

    def outside(self, fitted: Tensor) -> Tensor:
        """Return the part of images outside the basis, from coefficients of the fitted size."""
        return self._basis.rebuilt(fitted.index_fill(1, self._basis.order, 0.0))

    def gains(self, gains: Tensor, rest: Tensor) -> Tensor:
        """Return the gain of every coefficient here, (..., C h w), from (..., components)."""
        before = gains.shape[:-1]
        every = rest.expand(*before, math.prod(self._basis.shape))
        every = every.index_copy(-1, self._basis.order, gains)
        table = every.reshape(*before, *self._basis.shape)
        table = table.index_select(-2, self._fitted_down).index_select(-1, self._fitted_across)
        return table.flatten(-3)

    def offset(self, inside: Tensor, outside: Tensor | None) -> Tensor:
        """Return the coefficients here, (..., C h w), of a mean image known at the fitted size."""
        before = inside.shape[:-1]
        every = inside.new_zeros(*before, math.prod(self._basis.shape))
        every = every.index_copy(-1, self._basis.order, inside)
        if outside is not None:
            every = every + self._basis.coefficients(outside.to(every)).reshape(every.shape)
        rows, columns = map(_layout, self.shape[1:], self._basis.shape[1:])
        layout = every.reshape(*before, *self._basis.shape)[..., :rows, :columns]
        found = inside.new_zeros(*before, *self.shape)
        found[..., :rows, :columns] = layout / self._ratio[:rows, :columns]
        return found.flatten(-3)

    def leeway(self, variances: Tensor) -> Tensor:
        """Return how resizing may have changed the log energies of clean images, (2, components).

        It is not known whether images were cut out of larger ones or resized. If they were resized,
        their cosines have kept their indices, and energies differ if the spectrum of the source
        does not fall like 1 / frequency^2. Resizing also makes images softer, by linear
        interpolation at most. Each of the two effects has a row.
        """
        basis, fitted = self._basis, self._basis.shape
        unknown = variances.new_full((math.prod(fitted),), math.nan)
        source = unknown.index_copy(0, basis.order, variances).reshape(fitted)
        # An image that was enlarged has nothing beyond the last cosine of the fitted size.
        source = F.pad(source, (0, 1, 0, 1))
        down, across = (
            partners.clamp(max=side)
            for partners, side in zip((self._down, self._across), fitted[1:], strict=True)
        )
        law = self._ratio * self._growth
        resized = source[:, down][:, :, across] * law.square() / source[:, :-1, :-1]
        kernel = _softness(self._down, self.shape[1], fitted[1])[:, None]
        kernel = kernel * _softness(self._across, self.shape[2], fitted[2])
        both = torch.stack([resized, kernel.to(resized).expand(fitted)]).flatten(1)
        # If a neighbour was dropped from the basis, its variance is not known.
        return both[:, basis.order].log().nan_to_num(0.0).clamp(min=SOFTEST)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that coefficients depend on; see `Basis.tensors`."""
        return self._basis.tensors()


def _layout(size: int, other: int) -> int:
    """Return the number of cosines in the layout of images of both sizes."""
    return max(1, min(LAYOUT, size // LAYOUT, other // LAYOUT))


def _partners(size: int, other: int) -> Tensor:
    """Return the partner along `other` pixels of every cosine along `size` pixels."""
    index = torch.arange(size)
    nearest = (index.double() * (other / size)).round().long()
    nearest[1:].clamp_(min=1)  # the constant stands for itself alone
    return torch.where(index < _layout(size, other), index, nearest).clamp(max=other - 1)


def _frequencies(height: int, width: int) -> Tensor:
    """Return the frequency of every cosine, in half waves a pixel, float64, (height, width)."""
    down = torch.arange(height, dtype=torch.float64) / height
    across = torch.arange(width, dtype=torch.float64) / width
    square = down[:, None].square() + across.square()
    # The variance of the constant in photographs is about four times that of the first cosines, as
    # if it had half their frequency.
    square[0, 0] = 0.25 / (height * width)
    return square.sqrt()


def _softness(partners: Tensor, size: int, fitted: int) -> Tensor:
    """Return the share of energy that linear interpolation leaves to cosines along `size`."""
    waves = partners.cpu().double() / (2 * size) * max(1.0, size / fitted)  # a pixel
    return torch.sinc(waves) ** 4
