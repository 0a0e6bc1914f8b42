"""The two-dimensional cosine transform (DCT-II, orthonormal) of images: by matrices, and faster.

Large images take Fourier transforms instead, a third of the time of matrices. Makhoul ("A fast
cosine transform in one and two dimensions", 1980): put every second pixel of a row first, and the
others behind them in reverse. The real part of their Fourier transform, turned by up to a quarter
of a wave, is the cosine transform of the row, and so is the imaginary part, counted from the end.
Along columns, where numbers are complex, a cosine is the sum of two of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST = 4096  # pixels of a side; its matrix has 128 MB

# Pixels from which Fourier transforms are quicker than matrices.
LARGE = 128 * 128


def has_cosines(shape: Sequence[int]) -> bool:
    """Return whether samples of this shape are images or maps, with sides that have a matrix."""
    return len(shape) == 3 and max(shape) <= LONGEST


def dct_matrix(size: int) -> Tensor:
    """Return the orthonormal DCT-II as a matrix: row k is the k-th cosine, shape (size, size)."""
    place = torch.arange(size, dtype=torch.float64)
    cosines = torch.cos(math.pi / size * (place + 0.5) * place[:, None])
    cosines *= math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines


def dct_coefficients(images: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return the two-dimensional DCT of images (..., H, W), given the matrices for H and W."""
    return height @ (images @ width.T)


def dct_images(coefficients: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Invert `dct_coefficients`."""
    return height.T @ (coefficients @ width)


def coefficients_of(images: Tensor, rotation: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return all coefficients of images with rotated channels, (batch, C, H, W) to (batch, d)."""
    coefficients = dct_coefficients(images, height, width).flatten(2)
    return (rotation.T @ coefficients).flatten(1)


def images_of(coefficients: Tensor, rotation: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Invert `coefficients_of`: both have the shape (batch, C, H, W)."""
    channels = rotation @ coefficients.flatten(2)
    return dct_images(channels.reshape(coefficients.shape), height, width)


def is_fast(numbers: Tensor, shape: Sequence[int]) -> bool:
    """Return whether Fourier transforms are possible and quicker, for images of (C, H, W)."""
    large = shape[-2] * shape[-1] >= LARGE
    # Other precisions have no transform, and exporters do better with matrices.
    precise = numbers.dtype in (torch.float32, torch.float64)
    return large and precise and not torch.compiler.is_compiling()


def at_once(shape: Sequence[int]) -> int | None:
    """Return how many images of (C, H, W) to work on at a time, so that they fit in the cache."""
    return 1 if shape[-2] * shape[-1] >= LARGE else None


def transform_cost(height: int, width: int) -> int:
    """Return the multiply-adds that the cosines of an image take for each of its numbers."""
    if height * width < LARGE:
        return height + width
    return math.ceil(1.25 * math.log2(height * width))


class FastCosines:
    """Leads from images, (C, H, W), to the cosines of flattened index `order`, and back."""

    def __init__(self, shape: tuple[int, ...], order: Tensor) -> None:
        self.shape = shape
        channels, height, width = shape
        kept = width // 2 + 1  # complex numbers of a row
        down = torch.arange(height, device=order.device)[:, None]
        across = torch.arange(width, device=order.device)
        real, imaginary = 2 * (down * kept + across), 2 * (down * kept + width - across) + 1
        places = torch.where(across < kept, real, imaginary).flatten()
        channel, cosine = order // len(places), order % len(places)
        self._table = (channels, height, kept, 2)
        self._places = places[cosine] + channel * math.prod(self._table[1:])

    def project(self, centred: Tensor, rotation: Tensor) -> Tensor:
        """Return the cosines of images of rotated channels, (batch, C H W) to (batch, n)."""
        found = [self._cosines(image, rotation) for image in centred]
        return torch.stack(found) if found else centred.new_empty(0, len(self._places))

    def _cosines(self, image: Tensor, rotation: Tensor) -> Tensor:
        plan = _plan(*self.shape[1:], image.dtype, image.device)
        channels = (rotation.T @ image.view(len(rotation), -1)).to(image.dtype)
        pixels = torch.stack([each.index_select(0, plan.pixels) for each in channels])
        waves = torch.fft.rfft2(pixels.view(self.shape)).mul_(plan.turn)
        sums = waves.clone()
        sums[:, 1:].sub_(waves[:, 1:].flip(1), alpha=1j)
        return torch.view_as_real(sums).flatten().index_select(0, self._places)

    def rebuilt(self, components: Tensor, rotation: Tensor) -> Tensor:
        """Return the images of the first components: (batch, any number) to (batch, C H W)."""
        found = [self._image(each, rotation) for each in components]
        return torch.stack(found) if found else components.new_empty(0, math.prod(self.shape))

    def _image(self, components: Tensor, rotation: Tensor) -> Tensor:
        height, width = self.shape[1:]
        plan = _plan(height, width, components.dtype, components.device)
        table = components.new_zeros(math.prod(self._table))
        table.scatter_(0, self._places[: len(components)], components)
        table = table.view(self._table)
        if width % 2 == 0:  # the cosine in the middle counts from both ends
            table[:, :, -1, 1] = table[:, :, -1, 0]
        sums = torch.view_as_complex(table)
        waves = sums.clone()
        waves[:, 1:].add_(sums[:, 1:].flip(1), alpha=1j)
        pixels = torch.fft.irfft2(waves.mul_(plan.turn_back), s=(height, width)).flatten(1)
        channels = torch.stack([each.index_select(0, plan.places) for each in pixels])
        return (rotation @ channels).to(components.dtype).flatten()


@dataclass(frozen=True, eq=False)
class _Plan:
    """The constants of all images of one size."""

    pixels: Tensor  # order in which pixels are transformed, shape (H W,)
    places: Tensor  # the inverse: the place of each pixel in that order
    turn: Tensor  # turns and scales Fourier transforms, complex, shape (H, W // 2 + 1)
    turn_back: Tensor  # undoes that, and the addition of two rows


@functools.lru_cache(maxsize=8)
def _plan(height: int, width: int, dtype: torch.dtype, device: torch.device) -> _Plan:
    # Tensors made in inference mode could not be used under gradients later.
    with torch.inference_mode(False), torch.no_grad():
        pixels = (_ends_last(height)[:, None] * width + _ends_last(width)).flatten()
        turn = _turn(height)[:, None] * _turn(width)[: width // 2 + 1]
        turn[1:] /= 2
        turn_back = 1 / turn
        turn_back[1:] /= 2
        precision = torch.promote_types(dtype, torch.complex64)
        return _Plan(
            pixels.int().to(device),
            pixels.argsort().int().to(device),
            turn.to(device, precision),
            turn_back.to(device, precision),
        )


def _ends_last(size: int) -> Tensor:
    """Return every second pixel, then the others in reverse, and count all of it backwards."""
    # The Fourier transform is then conjugate: its imaginary part has the sign of the cosines.
    index = torch.arange(size)
    return torch.cat([index[::2], index[1::2].flip(0)])[-index % size]


def _turn(size: int) -> Tensor:
    """Return the factors for the Fourier transform of `size` pixels, complex128."""
    index = torch.arange(size, dtype=torch.float64)
    scale = torch.full_like(index, math.sqrt(2 / size))
    scale[0] = math.sqrt(1 / size)
    return torch.polar(scale, index * (math.pi / (2 * size)))
