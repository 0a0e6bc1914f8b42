"""Exact principal component analysis from a stream of batches.

`Moments` accumulates the sample count, the mean and the centred second moment in float64 with the
pairwise update of Chan, Golub and LeVeque, so its memory does not depend on the number of samples
and two accumulators merge in any order. `PCA` is then one symmetric eigendecomposition.

Incremental PCA (merging low-rank factors) would need less memory but is not exact: what it drops
early it cannot recover when later batches show that it mattered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError, ShapeError

# Columns of the scatter matrix that are updated at a time: below the diagonal block nothing is done
# twice, and blocks of this width still multiply at full speed.
BLOCK = 384

# Two entries of a basis vector whose magnitudes differ by less than this (relatively) count as
# tied when the vector's sign is fixed: rounding must not decide which of them is the larger.
TIE = 1e-6


class Moments:
    """Streaming mean and centred second moment of samples with `size` numbers each.

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
        # Only the lower triangle counts: the scatter is symmetric, and half the work is enough.
        self._lower = torch.zeros(size, size, dtype=torch.float64, device=self._device)

    @property
    def scatter(self) -> Tensor:
        """Sum over samples of centred sample times itself, float64, shape (size, size)."""
        return self._lower.tril() + self._lower.tril(-1).T

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance, shape (size, size)."""
        if self.count < 2:
            raise NotEnoughDataError(f"A covariance needs 2 samples; found {self.count}.")
        return self.scatter / (self.count - 1)

    @torch.no_grad()
    def update(self, batch: Tensor) -> Moments:
        """Add a batch.

        Args:
            batch: Shape (samples, ...); whatever follows the first dimension is flattened.

        Returns:
            This accumulator.

        Raises:
            ShapeError: When the samples do not have `size` numbers each.
            NonFiniteError: When the batch holds NaN or infinity; nothing is added then.
        """
        samples = flatten_samples(batch, self.mean.numel()).to(self._device, torch.float64)
        count = len(samples)
        if count == 0:
            return self
        if not torch.isfinite(samples).all():
            raise NonFiniteError("PCA needs finite numbers; found NaN or infinity in a batch.")
        mean = samples.mean(0)
        centred = samples - mean
        self._shift(count, mean)
        for start in range(0, len(mean), BLOCK):
            block = centred[:, start : start + BLOCK]
            self._lower[start:, start : start + BLOCK].addmm_(centred[:, start:].T, block)
        return self

    @torch.no_grad()
    def merge(self, other: Moments) -> Moments:
        """Add all that another accumulator has seen.

        Args:
            other: An accumulator of samples of the same size; it is left as it was.

        Returns:
            This accumulator.

        Raises:
            ShapeError: When the sizes differ.
        """
        if other.mean.shape != self.mean.shape:
            raise ShapeError(
                f"Moments merge with moments of the same size; found {self.mean.numel()} and "
                f"{other.mean.numel()}."
            )
        if other.count:
            lower = other._lower.to(self._device).clone()  # `other` may be this accumulator
            self._shift(other.count, other.mean.to(self._device))
            self._lower += lower
        return self

    def remove(self, batch: Tensor) -> Moments:
        """Take samples out again that this accumulator has seen.

        Args:
            batch: Fewer samples than it has seen, shape (samples, ...).

        Returns:
            This accumulator.

        Raises:
            NotEnoughDataError: When nothing would be left.

        Example:
            >>> data = torch.tensor([[1.0], [2.0], [6.0]])
            >>> Moments(1).update(data).remove(data[2:]).mean.tolist()
            [1.5]
        """
        gone = Moments(self.mean.numel(), device=self._device).update(batch)
        left = self.count - gone.count
        if left < 1:
            raise NotEnoughDataError(
                f"Some of {self.count} samples must be left; {gone.count} were to be removed."
            )
        mean = self.mean + (self.mean - gone.mean) * (gone.count / left)
        delta = gone.mean - mean
        self._lower -= gone._lower
        self._lower.addr_(delta, delta, alpha=-left * gone.count / self.count)
        self.mean, self.count = mean, left
        return self

    def _shift(self, count: int, mean: Tensor) -> None:
        """Move count and mean; add the scatter between the two means (Chan's cross term)."""
        total = self.count + count
        delta = mean - self.mean
        self._lower.addr_(delta, delta, alpha=self.count * count / total)
        self.mean += delta * (count / total)
        self.count = total


@dataclass(frozen=True, eq=False)
class PCA:
    """Principal components of a data matrix with one sample a row.

    Attributes:
        mean: Shape (p,).
        basis: Orthonormal columns in order of falling variance, with fixed signs (the entry of
            largest magnitude is positive), shape (p, components).
        singular_values: Of the centred data matrix, falling, shape (components,).
        n_samples: Number of rows of the data matrix.
        total_variance: Variance over all p components, kept or not.

    Example:
        >>> moments = Moments(2).update(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        >>> pca = PCA.from_moments(moments, n_components=1)
        >>> [round(value, 3) for value in pca.basis[:, 0].tolist()]
        [0.6, 0.8]
    """

    mean: Tensor
    basis: Tensor
    singular_values: Tensor
    n_samples: int
    total_variance: float

    @classmethod
    def from_moments(cls, moments: Moments, n_components: int | float | None = None) -> PCA:
        """Decompose what an accumulator has seen.

        Args:
            moments: The accumulator.
            n_components: A number of components, a fraction of the variance (a float up to 1), or
                None for all that the data have.

        Raises:
            NotEnoughDataError: When the data have fewer components than asked for.
            OptionError: When `n_components` makes no sense.
        """
        eigenvalues, vectors = eigh_descending(moments.scatter)
        kept = choose_components(n_components, eigenvalues, moments.count)
        basis = vectors[:, :kept]
        return cls(
            mean=moments.mean.clone(),
            basis=basis * signs(basis),
            singular_values=eigenvalues[:kept].sqrt(),
            n_samples=moments.count,
            total_variance=total_variance(eigenvalues, moments.count),
        )

    @property
    def project(self) -> Tensor:
        """From centred samples to components: the basis, shape (size, components)."""
        return self.basis

    @property
    def explained_variance(self) -> Tensor:
        """Variance along each component, shape (components,)."""
        return self.singular_values.square() / (self.n_samples - 1)

    @property
    def explained_variance_ratio(self) -> Tensor:
        """Share of the total variance along each component, shape (components,)."""
        return self.explained_variance / self.total_variance

    def transform(self, samples: Tensor) -> Tensor:
        """Components of samples: (N, ...) to (N, components), float64."""
        flat = flatten_samples(samples, self.mean.numel()).to(self.mean)
        return (flat - self.mean) @ self.basis

    def inverse_transform(self, components: Tensor) -> Tensor:
        """Samples from their components: (N, components) to (N, p), float64."""
        return components.to(self.mean) @ self.basis.T + self.mean


def float64_device(device: torch.device | str) -> torch.device:
    """The device itself, or the processor where the device has no float64 (Apple's MPS)."""
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


def eigh_descending(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in falling order, none below zero, and their eigenvectors as columns."""
    eigenvalues, vectors = torch.linalg.eigh(symmetric)
    return eigenvalues.flip(0).clamp_min(0.0), vectors.flip(1)


def total_variance(eigenvalues: Tensor, n_samples: int) -> float:
    """Variance over all components, from the eigenvalues of the scatter matrix."""
    return float(eigenvalues.sum()) / (n_samples - 1)


def signs(vectors: Tensor) -> Tensor:
    """Signs that make the entry of largest magnitude of each column positive.

    Args:
        vectors: Shape (p, components).

    Returns:
        Plus or minus one for each column, shape (components,).
    """
    magnitude = vectors.abs()
    near_peak = magnitude >= magnitude.amax(0) * (1 - TIE)
    first = near_peak.to(torch.uint8).argmax(0, keepdim=True)
    return torch.where(vectors.gather(0, first)[0] < 0, -1.0, 1.0).to(vectors.dtype)


def choose_components(n_components: int | float | None, eigenvalues: Tensor, n_samples: int) -> int:
    """Turn a wish into a number of components that the data can give.

    Args:
        n_components: A number, a fraction of the variance, or None for all.
        eigenvalues: Of the scatter matrix, in falling order.
        n_samples: Number of samples behind it.

    Returns:
        A number of components, at least 1 and at most the rank of the data.

    Raises:
        NotEnoughDataError: When the data cannot give what is wished.
        OptionError: When the wish makes no sense.
    """
    check_n_components(n_components)
    check_sample_count(n_components, n_samples)
    # Rounding leaves eigenvalues of about this size where the exact ones are zero.
    rounding = max(len(eigenvalues), n_samples) * torch.finfo(eigenvalues.dtype).eps
    rank = min(int((eigenvalues > eigenvalues[0] * rounding).sum()), n_samples - 1)
    if rank == 0:
        raise NotEnoughDataError(
            "PCA needs activations that vary; the layer gave the same output for all "
            f"{n_samples} samples. Fit at another layer or on other data."
        )
    if n_components is None:
        return rank
    if isinstance(n_components, int):
        if n_components > rank:
            raise NotEnoughDataError(
                f"The number of components is at most the rank of the activations, here {rank}; "
                f"found n_components={n_components}. Ask for {rank} or fewer, or None for all."
            )
        return n_components
    explained = eigenvalues[:rank].cumsum(0) / eigenvalues[:rank].sum()
    return min(int((explained < n_components).sum()) + 1, rank)


def check_n_components(n_components: int | float | None) -> None:
    """Raise `OptionError` unless this is a number, a fraction of the variance, or None."""
    whole = isinstance(n_components, int) and not isinstance(n_components, bool)
    if n_components is None or (whole and n_components >= 1):
        return
    if isinstance(n_components, float) and 0.0 < n_components <= 1.0:
        return
    raise OptionError(
        "n_components is a whole number of at least 1, a fraction of the variance (a float above "
        f"0 and up to 1), or None for all; found {n_components!r}."
    )


def check_sample_count(n_components: int | float | None, n_samples: int) -> None:
    """Raise `NotEnoughDataError` when so few samples cannot have that many components."""
    if n_samples < 2:
        raise NotEnoughDataError(f"PCA needs at least 2 samples; found {n_samples}.")
    if isinstance(n_components, int) and n_components >= n_samples:
        raise NotEnoughDataError(
            f"{n_components} components need at least {n_components + 1} samples; found "
            f"{n_samples}. Give more data, or ask for at most {n_samples - 1} components."
        )
