"""A basis for images that needs no large matrix: channel PCA x two-dimensional DCT.

The p x p covariance of a 3 x 224 x 224 image has 23 billion entries; its PCA is out of reach, and
so is a basis of 2,000 vectors of 150,528 numbers for every filter. But where the statistics of an
image are the same everywhere and neighbouring pixels are alike, principal components are close to
cosines in space times a fixed rotation of the channels. This basis takes them to be just that: it
rotates the C channels by the PCA of their covariance, takes the two-dimensional discrete cosine
transform (DCT-II, orthonormal) of each, and orders the C H W coefficients by their variance.

The basis is orthonormal whatever the data, so unit gains are the identity and energies add up. The
variance of every coefficient is exact. Where coefficients are not correlated, this is the PCA. One
pass over the data suffices, with one C x C matrix per frequency (3.6 MB for 3 x 224 x 224). By
matrices the transform takes H + W + C multiply-adds per number, each way; for large images Fourier
transforms take its place (`ttapca.spectral.fast_cosine`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.errors import OptionError, ShapeError
from ttapca.spectral.moments import finite_samples, float64_device, merged_means
from ttapca.spectral.pca import (
    Decomposition,
    check_sample_count,
    choose_among,
    eigh_descending,
    signs,
    total_variance,
)

# Numbers that are transformed at a time, which keeps the memory for it near 100 MB.
CHUNK_NUMBERS = 4_000_000

# Variances below this share of the largest one are rounding.
NO_VARIANCE = 1e-14


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
    """Return all coefficients of images with rotated channels, (batch, C, H, W) to (batch, C H W).

    Args:
        images: The images.
        rotation: Of the channels, shape (C, C).
        height: The matrix for H.
        width: The matrix for W.
    """
    coefficients = dct_coefficients(images, height, width).flatten(2)
    return (rotation.T @ coefficients).flatten(1)


def images_of(coefficients: Tensor, rotation: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Invert `coefficients_of`: both have the shape (batch, C, H, W)."""
    channels = rotation @ coefficients.flatten(2)
    return dct_images(channels.reshape(coefficients.shape), height, width)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChannelDCT(Decomposition):
    """A rotation of the channels, and the coefficients in order of their variance.

    Attributes:
        rotation: Orthonormal columns, by falling variance of the channels, shape (C, C).
        order: Index of each component in the flattened (C, H, W), shape (components,).
    """

    rotation: Tensor
    order: Tensor


class CoefficientMoments:
    """Running mean and scatter of the channels at every frequency; images are (C, H, W)."""

    def __init__(self, shape: tuple[int, ...], *, device: torch.device | str = "cpu") -> None:
        if len(shape) != 3:
            raise OptionError(
                "The DCT basis is for images, samples of shape (channels, height, width); found "
                f"{tuple(shape)}. Choose another route, or a layer that takes or gives images."
            )
        self.shape = tuple(shape)
        channels, height, width = self.shape
        device = float64_device(device)
        self._height = dct_matrix(height).to(device)
        self._width = dct_matrix(width).to(device)
        self.count = 0
        zeros = torch.zeros(height * width, channels, dtype=torch.float64, device=device)
        self.mean = zeros  # of the coefficients, (frequencies, channels)
        self.scatter = zeros[:, :, None].repeat(1, 1, channels)

    @torch.no_grad()
    def update(self, batch: Tensor) -> CoefficientMoments:
        """Add a batch of images, shape (samples, *shape), and return self; see `Moments`."""
        size = math.prod(self.shape)
        images = finite_samples(batch, size).reshape(-1, *self.shape)
        for part in torch.split(images, max(1, CHUNK_NUMBERS // size)):
            self._add(part.to(self._height))
        return self

    def _add(self, images: Tensor) -> None:
        if not len(images):
            return
        coefficients = dct_coefficients(images, self._height, self._width)
        # (frequencies, samples, channels), for one small matrix product per frequency
        table = coefficients.flatten(2).permute(2, 0, 1)
        mean = table.mean(1)
        centred = table - mean[:, None]
        self._merge(len(images), mean, centred.mT @ centred)

    @torch.no_grad()
    def merge(self, other: CoefficientMoments) -> CoefficientMoments:
        """Add what another one has seen, without changing it, and return self.

        Raises:
            ShapeError: The images have another shape.
        """
        if other.shape != self.shape:
            raise ShapeError(
                f"Moments merge with moments of images of one shape; found {self.shape} and "
                f"{other.shape}."
            )
        if other.count:
            self._merge(other.count, other.mean.to(self.mean), other.scatter.to(self.mean))
        return self

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        self.count, self.mean, delta, weight = merged_means(self.count, self.mean, count, mean)
        self.scatter += scatter
        self.scatter += weight * delta[:, :, None] * delta[:, None, :]

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same moments of."""
        return {
            "count": torch.tensor(self.count),
            "mean": self.mean.cpu(),
            "scatter": self.scatter.cpu(),
        }

    @classmethod
    def from_tensors(cls, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> CoefficientMoments:
        """Make moments of what `tensors` returned for images of this shape."""
        moments = cls(shape)
        moments.count = int(tensors["count"])
        moments.mean, moments.scatter = tensors["mean"].clone(), tensors["scatter"].clone()
        return moments

    def mean_image(self) -> Tensor:
        """Return the mean of the images, flattened, shape (C H W,)."""
        coefficients = self.mean.T.reshape(self.shape)
        return dct_images(coefficients, self._height, self._width).flatten()


@torch.no_grad()
def fit_channel_dct(moments: CoefficientMoments, n_components: int | float | None) -> ChannelDCT:
    """Find the rotation of the channels, and keep as many coefficients as asked for."""
    check_sample_count(None, moments.count)
    # The DCT is orthonormal: the scatter of the pixels' channels is the sum over frequencies.
    _, rotation = eigh_descending(moments.scatter.sum(0))
    rotation = rotation * signs(rotation)
    scatter = torch.einsum("fcd,ck,dk->kf", moments.scatter, rotation, rotation).clamp_min(0.0)
    ordered, order = scatter.flatten().sort(descending=True, stable=True)
    varying = ordered[ordered > NO_VARIANCE * ordered[0]]
    kept = choose_among(n_components, varying, "that of the coefficients which vary", moments.count)
    return ChannelDCT(
        mean=moments.mean_image().cpu(),
        rotation=rotation.cpu(),
        order=order[:kept].cpu(),
        singular_values=ordered[:kept].sqrt().cpu(),
        n_samples=moments.count,
        total_variance=total_variance(ordered, moments.count),
    )
