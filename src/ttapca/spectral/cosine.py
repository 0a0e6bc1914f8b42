"""A basis for images that needs no large matrix: channel PCA x two-dimensional DCT.

If the statistics of an image are the same everywhere and neighbouring pixels are alike, principal
components are close to cosines in space times a fixed rotation of the channels. So this basis
rotates the C channels by the PCA of their covariance, takes the two-dimensional discrete cosine
transform (DCT-II, orthonormal) of each, and orders the C H W coefficients by their exact variances.
It takes one pass over the data, with one C x C matrix per frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ttapca._checks import ListOf, Whole
from ttapca.errors import OptionError, ShapeError
from ttapca.spectral import cosine_transform as transform
from ttapca.spectral import pca
from ttapca.spectral.basis import Basis, BasisCost, TensorForm, orthonormal
from ttapca.spectral.other_sizes import OtherSize
from ttapca.support.tensors import TensorCache

# Numbers that are transformed at a time, which keeps the memory for it near 100 MB.
CHUNK_NUMBERS = 4_000_000

# Variances below this share of the largest one are rounding.
NO_VARIANCE = 1e-14


class Cosine(Basis):
    """Coefficients of a DCT of images with channels rotated by orthonormal columns, (C, C)."""

    sides = (False, True)
    routes = ("dct",)
    file_names: ClassVar[dict[str, str]] = {"rotation": "project", "order": "order"}
    shape_rule = ListOf(Whole(1, transform.LONGEST), 3, 3)
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
        self.at_input = self.of_input = at_input  # it does not know the layer
        self.shape = tuple(shape)
        self.register_buffer("rotation", rotation)
        self.register_buffer("order", order)
        # Not in the state dict: they follow from the shape.
        for name, size in zip(("height", "width"), shape[1:], strict=True):
            self.register_buffer(name, transform.dct_matrix(size).to(rotation), persistent=False)
        self._fast = TensorCache[transform.FastCosines]()
        self.at_once = transform.at_once(self.shape)

    @property
    def n_components(self) -> int:
        """Number of components."""
        return len(self.order)

    def project(self, centred: Tensor) -> Tensor:
        """See `Basis`."""
        if transform.is_fast(centred, self.shape):
            return self._by_fft().project(centred, self.rotation)
        return self.coefficients(centred).index_select(1, self.order)

    def add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        """See `Basis`."""
        if transform.is_fast(components, self.shape):
            return self._by_fft().rebuilt(components, self.rotation).add_(base)
        samples = components.shape[0]  # not `len`: exporters would fix it
        every = components.new_zeros(samples, math.prod(self.shape))
        every = every.index_copy(1, self.order[: components.shape[1]], components)
        return base + self.rebuilt(every)

    def _by_fft(self) -> transform.FastCosines:
        return self._fast.get([self.order], lambda: transform.FastCosines(self.shape, self.order))

    def coefficients(self, centred: Tensor) -> Tensor:
        """Return all coefficients, also those that are not kept as components, (batch, d)."""
        images = centred.reshape(-1, *self.shape)
        return transform.coefficients_of(images, self.rotation, self.height, self.width)

    def rebuilt(self, coefficients: Tensor) -> Tensor:
        """Return the samples that coefficients stand for, both (batch, d)."""
        table = coefficients.reshape(-1, *self.shape)
        return transform.images_of(table, self.rotation, self.height, self.width).flatten(1)

    def check_shape(self, shape: tuple[int, ...], fitted: tuple[int, ...]) -> None:
        """Raise unless these are images with the channels of the fit; they may have any size."""
        if shape == fitted:
            return
        if not transform.has_cosines(shape) or shape[0] != fitted[0] or min(shape) < 1:
            raise ShapeError(
                "Cosines take images of any size with the channels that they were fitted on, up to "
                f"{transform.LONGEST:,} pixels a side. The filter was fitted on samples of shape "
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

    @classmethod
    def most_components(cls, shape: tuple[int, ...], output_size: int) -> int:  # noqa: ARG003
        """See `Basis`: cosines are those of the samples, whatever the layer's output."""
        return math.prod(shape)

    @classmethod
    def cost(cls, shape: tuple[int, ...], n_components: int) -> BasisCost:
        """See `Basis`."""
        channels, height, width = shape
        numbers = channels**2 + height**2 + width**2 + n_components
        for_each = channels + transform.transform_cost(height, width)
        return BasisCost(numbers, 2 * math.prod(shape) * for_each)

    @classmethod
    def forms(cls, shape: tuple[int, ...], n_components: int) -> dict[str, TensorForm]:
        """See `Basis`."""
        size = math.prod(shape)
        words = f"different places from 0 to {size - 1:,}"

        def different_places(order: Tensor) -> bool:
            inside = (order >= 0) & (order < size)
            return bool(inside.all()) and len(set(order.tolist())) == len(order)

        order = TensorForm((n_components,), torch.int64, words, different_places)
        return {"project": orthonormal((shape[0], shape[0])), "order": order}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...], *, at_input: bool
    ) -> Basis:
        """See `Basis`."""
        return cls(tensors["project"], tensors["order"], shape, at_input=at_input)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChannelDCT(pca.Decomposition):
    """A rotation of the channels, and the coefficients in order of their variance."""

    rotation: Tensor  # orthonormal columns, by falling variance of the channels, shape (C, C)
    order: Tensor  # index of each component in the flattened (C, H, W), shape (components,)


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
        device = pca.float64_device(device)
        self.height = transform.dct_matrix(height).to(device)
        self.width = transform.dct_matrix(width).to(device)
        self.count = 0
        zeros = torch.zeros(height * width, channels, dtype=torch.float64, device=device)
        self.mean = zeros  # of the coefficients, (frequencies, channels)
        self.scatter = zeros[:, :, None].repeat(1, 1, channels)

    @torch.no_grad()
    def update(self, batch: Tensor) -> CoefficientMoments:
        """Add a batch of images, shape (samples, *shape), and return self; see `Moments`."""
        size = math.prod(self.shape)
        images = pca.finite_samples(batch, size).reshape(-1, *self.shape)
        for part in torch.split(images, max(1, CHUNK_NUMBERS // size)):
            if not len(part):  # of an empty batch
                continue
            coefficients = transform.dct_coefficients(part.to(self.height), self.height, self.width)
            # (frequencies, samples, channels), for one small matrix product per frequency
            table = coefficients.flatten(2).permute(2, 0, 1)
            mean = table.mean(1)
            centred = table - mean[:, None]
            self._merge(len(part), mean, centred.mT @ centred)
        return self

    @torch.no_grad()
    def merge(self, other: CoefficientMoments) -> CoefficientMoments:
        """Add the images of another one, of the same shape, and return self; see `Moments`."""
        if other.shape != self.shape:
            raise ShapeError(
                f"Moments merge with moments of images of one shape; found {self.shape} and "
                f"{other.shape}."
            )
        if other.count:
            self._merge(other.count, other.mean.to(self.mean), other.scatter.to(self.mean))
        return self

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        self.count, self.mean, delta, weight = pca.merged_means(self.count, self.mean, count, mean)
        self.scatter += scatter
        self.scatter += weight * delta[:, :, None] * delta[:, None, :]


@torch.no_grad()
def fit_channel_dct(moments: CoefficientMoments, n_components: int | float | None) -> ChannelDCT:
    """Find the rotation of the channels, and keep as many coefficients as asked for."""
    pca.check_sample_count(None, moments.count)
    mean = moments.mean.T.reshape(moments.shape)
    # The DCT is orthonormal: the scatter of the pixels' channels is the sum over frequencies.
    _, rotation = pca.eigh_descending(moments.scatter.sum(0))
    rotation = rotation * pca.signs(rotation)
    scatter = torch.einsum("fcd,ck,dk->kf", moments.scatter, rotation, rotation).clamp_min(0.0)
    ordered, order = scatter.flatten().sort(descending=True, stable=True)
    varying = ordered[ordered > NO_VARIANCE * ordered[0]]
    kept = pca.choose_among(
        n_components, varying, "that of the coefficients which vary", moments.count
    )
    return ChannelDCT(
        mean=transform.dct_images(mean, moments.height, moments.width).flatten().cpu(),
        rotation=rotation.cpu(),
        order=order[:kept].cpu(),
        singular_values=ordered[:kept].sqrt().cpu(),
        n_samples=moments.count,
        total_variance=pca.total_variance(ordered, moments.count),
    )
