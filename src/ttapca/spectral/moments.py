"""Mean and scatter of samples that arrive in batches, in float64 and in any order.

`merged_means` is the pairwise update of Chan, Golub and LeVeque. Memory does not depend on the
number of samples, and what two processes have seen can be merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError, ShapeError

# The scatter matrix is symmetric, so only blocks on and below its diagonal are updated. Blocks of
# this many columns still multiply at full speed.
BLOCK = 384

Count = TypeVar("Count", int, float)  # a whole number, unless older samples count less


class MergedMeans(NamedTuple, Generic[Count]):
    """Count and mean of two sets of samples together, and how to merge their scatters.

    The scatter about the common mean is the sum of both scatters plus `weight * delta * delta^T`,
    where `delta` points from the first mean to the second.
    """

    total: Count
    mean: Tensor
    delta: Tensor
    weight: float


def merged_means(count: Count, mean: Tensor, more: Count, more_mean: Tensor) -> MergedMeans[Count]:
    """Merge the means of two sets of samples; a negative `more` removes samples again.

    Example:
        >>> merged_means(1, torch.tensor(0.0), 3, torch.tensor(4.0))
        MergedMeans(total=4, mean=tensor(3.), delta=tensor(4.), weight=0.75)
    """
    total = count + more
    delta = more_mean - mean
    return MergedMeans(total, mean + delta * (more / total), delta, count * more / total)


class Moments:
    """Running mean and scatter of samples with `size` numbers each.

    Attributes:
        count: Number of samples seen.
        mean: Their mean, float64, shape (size,).

    Example:
        >>> batch = torch.tensor([[0.0, 1.0], [2.0, 5.0]])
        >>> moments = Moments(2).update(batch)
        >>> moments.mean.tolist(), moments.covariance.tolist()
        ([1.0, 3.0], [[2.0, 4.0], [4.0, 8.0]])
    """

    def __init__(self, size: int, *, device: torch.device | str = "cpu") -> None:
        if size < 1:
            raise OptionError(f"A sample has at least one number; found size {size}.")
        self._device = float64_device(device)
        self.count = 0
        self.mean = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._lower = torch.zeros(size, size, dtype=torch.float64, device=self._device)

    @property
    def scatter(self) -> Tensor:
        """Sum over samples of (x - mean)(x - mean)^T, float64, shape (size, size)."""
        return self._lower.tril() + self._lower.tril(-1).T

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance, shape (size, size).

        Raises:
            NotEnoughDataError: Fewer than two samples were seen.
        """
        if self.count < 2:
            raise NotEnoughDataError(f"A covariance needs 2 samples; found {self.count}.")
        return self.scatter / (self.count - 1)

    @torch.no_grad()
    def update(self, batch: Tensor) -> Moments:
        """Add a batch of shape (samples, ...) and return self.

        Raises:
            ShapeError: The samples do not have `size` numbers each.
            NonFiniteError: The batch holds NaN or infinity; nothing is added then.
        """
        samples = finite_samples(batch, self.mean.numel()).to(self._device, torch.float64)
        if len(samples):
            mean = samples.mean(0)
            centred = samples - mean
            self._merge_means(len(samples), mean)
            for start, block in zip(range(0, len(mean), BLOCK), self._blocks(), strict=True):
                block.addmm_(centred[:, start:].T, centred[:, start : start + BLOCK])
        return self

    @torch.no_grad()
    def merge(self, other: Moments) -> Moments:
        """Add what another `Moments` has seen, without changing it, and return self.

        Raises:
            ShapeError: The sizes differ.
        """
        if other.mean.shape != self.mean.shape:
            raise ShapeError(
                f"Moments merge with moments of the same size; found {self.mean.numel()} and "
                f"{other.mean.numel()}."
            )
        if other.count:
            lower = other._lower.to(self._device).clone()  # `other` may be `self`
            self._merge_means(other.count, other.mean.to(self._device))
            self._lower += lower
        return self

    @torch.no_grad()
    def remove(self, batch: Tensor) -> Moments:
        """Remove samples, shape (samples, ...), that were added before, and return self.

        Raises:
            NotEnoughDataError: Nothing would be left.

        Example:
            >>> data = torch.tensor([[1.0], [2.0], [6.0]])
            >>> Moments(1).update(data).remove(data[2:]).mean.tolist()
            [1.5]
        """
        gone = Moments(self.mean.numel(), device=self._device).update(batch)
        if gone.count >= self.count:
            raise NotEnoughDataError(
                f"Some of {self.count} samples must be left; {gone.count} were to be removed."
            )
        self._merge_means(-gone.count, gone.mean)
        self._lower -= gone._lower
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same moments of; of the scatter only one half."""
        blocks = [block.flatten() for block in self._blocks()]
        return {
            "count": torch.tensor(self.count),
            "mean": self.mean.cpu(),
            "lower": torch.cat(blocks).cpu(),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Moments:
        """Make moments of what `tensors` returned.

        Example:
            >>> moments = Moments(2).update(torch.tensor([[0.0, 1.0], [2.0, 5.0]]))
            >>> Moments.from_tensors(moments.tensors()).covariance.tolist()
            [[2.0, 4.0], [4.0, 8.0]]
        """
        moments = cls(len(tensors["mean"]))
        moments.count, moments.mean = int(tensors["count"]), tensors["mean"].clone()
        start = 0
        for block in moments._blocks():
            block.copy_(tensors["lower"][start : start + block.numel()].view_as(block))
            start += block.numel()
        return moments

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle no more than `tensors`."""
        return Moments.from_tensors, (self.tensors(),)

    def _blocks(self) -> Iterator[Tensor]:
        """Yield views of the blocks of columns on and below the diagonal."""
        for start in range(0, len(self._lower), BLOCK):
            yield self._lower[start:, start : start + BLOCK]

    def _merge_means(self, count: int, mean: Tensor) -> None:
        self.count, self.mean, delta, weight = merged_means(self.count, self.mean, count, mean)
        self._lower.addr_(delta, delta, alpha=weight)


def float64_device(device: torch.device | str) -> torch.device:
    """Return the device itself, or the CPU where the device has no float64 (Apple's MPS)."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def flatten_samples(batch: Tensor, size: int) -> Tensor:
    """Flatten (samples, ...) to (samples, size), or raise `ShapeError`."""
    if batch.dim() < 2 or math.prod(batch.shape[1:]) != size:
        raise ShapeError(
            f"Samples must have {size} numbers each, along the first dimension of a batch; found "
            f"a batch of shape {tuple(batch.shape)}."
        )
    return batch.flatten(1)


def finite_samples(batch: Tensor, size: int) -> Tensor:
    """Flatten as `flatten_samples` does, or raise `NonFiniteError` on NaN or infinity."""
    if not torch.isfinite(batch).all():
        raise NonFiniteError("PCA needs finite numbers; found NaN or infinity in a batch.")
    return flatten_samples(batch, size)
