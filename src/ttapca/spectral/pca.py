"""Exact principal component analysis: moments of samples, and the smaller of two eigenproblems.

`Moments` merge by the pairwise update of Chan, Golub and LeVeque; `PCA.from_moments` decomposes
their p x p scatter. `SampleGram` decomposes the n x n products of few and long samples: with the
centred samples as the rows of A, A A^T = U s^2 U^T has the singular values s of A, and the
components are the columns of A^T U / s. Incremental PCA would need less memory but is not exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ttapca._checks import Either, Number, Whole, check_option
from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError, ShapeError

# The scatter matrix is symmetric, so only blocks on and below its diagonal are updated. Blocks of
# this many columns still multiply at full speed.
BLOCK = 384

# Two entries of a basis vector count as tied when their magnitudes differ by less than this share:
# rounding must not decide which one is larger, and so the sign of the vector.
TIE = 1e-6

# Limits of `hold`: a matrix of this many samples is decomposed within seconds.
MOST_SAMPLES = 4096
MOST_BYTES = 2**30

# `SampleGram` converts this many columns to float64 at a time: all would double the memory.
COLUMNS = 1024

# A basis that drops a smaller share of the variance counts as complete: the rest is not watched at
# test time, and there is no warning if predictions were not compared.
MOST_DROPPED = 1e-4

_N_COMPONENTS = Either(
    [Whole(1), Number(above=0, high=1)],
    "a whole number of at least 1, a fraction of the variance (a float above 0 and up to 1), or "
    "None for all",
)


def merged_means(
    count: int, mean: Tensor, more: int, more_mean: Tensor
) -> tuple[int, Tensor, Tensor, float]:
    """Merge the means of two sets of samples; a negative `more` removes samples again.

    The scatter about the common mean is that of both plus weight * step * step^T, as returned.
    """
    total = count + more
    step = more_mean - mean
    return total, mean + step * (more / total), step, count * more / total


class Moments:
    """Running mean and scatter of samples with `size` numbers each, in float64.

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
        """Unbiased covariance, shape (size, size); `NotEnoughDataError` below two samples."""
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
        """Add the samples of another `Moments`, which stays as it is, and return self.

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
        """Remove samples, (samples, ...), that were added before, and return self."""
        gone = Moments(self.mean.numel(), device=self._device).update(batch)
        if gone.count >= self.count:
            raise NotEnoughDataError(
                f"Some of {self.count} samples must be left; {gone.count} were to be removed."
            )
        self._merge_means(-gone.count, gone.mean)
        self._lower -= gone._lower
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for `from_tensors`; of the scatter only one half."""
        lower = torch.cat([block.flatten() for block in self._blocks()])
        count = torch.tensor(self.count)
        return {"count": count, "mean": self.mean.cpu(), "lower": lower.cpu()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Moments:
        """Make moments from the tensors that `tensors` returned."""
        moments = cls(len(tensors["mean"]))
        moments.count, moments.mean = int(tensors["count"]), tensors["mean"].clone()
        blocks = list(moments._blocks())
        parts = torch.split(tensors["lower"], [block.numel() for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            block.copy_(part.view_as(block))
        return moments

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only `tensors`."""
        return Moments.from_tensors, (self.tensors(),)

    def _blocks(self) -> Iterator[Tensor]:
        """Yield views of the blocks of columns on and below the diagonal."""
        for start in range(0, len(self._lower), BLOCK):
            yield self._lower[start:, start : start + BLOCK]

    def _merge_means(self, count: int, mean: Tensor) -> None:
        self.count, self.mean, delta, weight = merged_means(self.count, self.mean, count, mean)
        self._lower.addr_(delta, delta, alpha=weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class Decomposition:
    """The facts of every decomposition about its samples."""

    mean: Tensor  # of the samples, shape (size,)
    singular_values: Tensor  # of the centred data, falling, shape (components,)
    n_samples: int
    total_variance: float  # over all components, kept or not

    @property
    def explained_variance(self) -> Tensor:
        """Variance along each component, shape (components,)."""
        return self.singular_values.square() / (self.n_samples - 1)

    @property
    def explained_variance_ratio(self) -> Tensor:
        """Share of the total variance along each component, shape (components,)."""
        return self.explained_variance / self.total_variance

    @property
    def drops_something(self) -> bool:
        """Whether enough lies outside the components to be watched at test time."""
        return 1 - float(self.explained_variance_ratio.sum()) > MOST_DROPPED

    def truncated(self, n_components: int) -> Self:
        """Return the first components only."""
        columns: dict[str, Any] = {
            name: value[:, :n_components]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.dim() == 2
        }
        kept = self.singular_values[:n_components]
        return dataclasses.replace(self, singular_values=kept, **columns)


@dataclass(frozen=True, eq=False, kw_only=True)
class PCA(Decomposition):
    """Principal components of a data matrix with one sample in each row.

    Attributes:
        basis: Orthonormal columns in order of falling variance, shape (p, components). Signs are
            fixed: the entry of largest magnitude in each column is positive.

    Example:
        >>> moments = Moments(2).update(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        >>> pca = PCA.from_moments(moments, n_components=1)
        >>> [round(value, 3) for value in pca.basis[:, 0].tolist()]
        [0.6, 0.8]
    """

    basis: Tensor

    @classmethod
    def from_moments(cls, moments: Moments, n_components: int | float | None = None) -> PCA:
        """Decompose the samples of some moments; for `n_components` see `ttapca.fit`.

        Raises:
            NotEnoughDataError: The data have fewer components than asked for.
            OptionError: `n_components` makes no sense.
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
        """The matrix from centred samples to components: the basis itself."""
        return self.basis

    def transform(self, samples: Tensor) -> Tensor:
        """Return the components of samples: (N, ...) to (N, components), float64."""
        flat = flatten_samples(samples, self.mean.numel()).to(self.mean)
        return (flat - self.mean) @ self.basis

    def inverse_transform(self, components: Tensor) -> Tensor:
        """Return samples from their components: (N, components) to (N, p), float64."""
        return components.to(self.mean) @ self.basis.T + self.mean


class SampleGram:
    """All products of two samples, for the PCA of few samples with `size` numbers each."""

    @torch.no_grad()
    def __init__(
        self, batches: Iterable[Tensor], size: int, *, device: torch.device | str = "cpu"
    ) -> None:
        self._size = size
        self._device = float64_device(device)
        self._rows = [finite_samples(batch, size) for batch in batches]
        self.count = sum(len(rows) for rows in self._rows)
        check_sample_count(None, self.count)
        shape = (self.count, self.count)
        self._products = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for columns in self._columns():
            columns -= columns.mean(0)  # before they are multiplied: afterwards, digits are lost
            self._products.addmm_(columns, columns.T)

    def _columns(self) -> Iterator[Tensor]:
        """Yield all samples in float64, some columns at a time, shape (samples, columns)."""
        for start in range(0, self._size, COLUMNS):
            parts = [rows[:, start : start + COLUMNS] for rows in self._rows]
            yield torch.cat(parts).to(self._device, torch.float64)

    @torch.no_grad()
    def pca(self, n_components: int | float | None = None, *, leave_out: Sequence[int] = ()) -> PCA:
        """Decompose all samples except the ones at the positions in `leave_out`."""
        kept = torch.ones(self.count, dtype=torch.bool, device=self._device)
        kept[list(leave_out)] = False
        products = self._products[kept][:, kept]
        if leave_out:  # the mean has changed
            products = products_about_mean(products)
        eigenvalues, vectors = eigh_descending(products)
        count = len(products)
        vectors = vectors[:, : choose_components(n_components, eigenvalues, count)]
        means, projected = [], []
        for columns in self._columns():
            columns = columns[kept]
            means.append(columns.mean(0))
            projected.append((columns - means[-1]).T @ vectors)
        # These columns are orthogonal up to rounding, which grows as singular values get small.
        basis, lengths = torch.linalg.qr(torch.cat(projected))
        return PCA(
            mean=torch.cat(means),
            basis=basis * signs(basis),
            singular_values=lengths.diagonal().abs(),
            n_samples=count,
            total_variance=total_variance(eigenvalues, count),
        )


def products_about_mean(products: Tensor) -> Tensor:
    """Return the products of samples about their mean, given those about any other point."""
    return products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()


def hold(batches: Iterator[Tensor], *, limited: bool = True) -> tuple[list[Tensor], bool]:
    """Return copies of batches up to `MOST_SAMPLES` or `MOST_BYTES`, and whether these are all."""
    held: list[Tensor] = []
    samples = size = 0
    for batch in batches:
        held.append(batch.clone())  # a layer may return a view of memory that is reused
        samples += len(batch)
        size += batch.numel() * batch.element_size()
        if limited and (samples > MOST_SAMPLES or size > MOST_BYTES):
            return held, False
    return held, True


def eigh_descending(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in falling order, clipped at zero, and eigenvectors as columns."""
    eigenvalues, vectors = torch.linalg.eigh(symmetric)
    return eigenvalues.flip(0).clamp_min(0.0), vectors.flip(1)


def total_variance(eigenvalues: Tensor, n_samples: int) -> float:
    """Return the variance over all components, from the eigenvalues of the scatter matrix."""
    return float(eigenvalues.sum()) / (n_samples - 1)


def signs(vectors: Tensor) -> Tensor:
    """Return the sign of the largest entry of each column, (p, n) to (n,)."""
    magnitude = vectors.abs()
    near_peak = magnitude >= magnitude.amax(0) * (1 - TIE)
    first = near_peak.to(torch.uint8).argmax(0, keepdim=True)
    return torch.where(vectors.gather(0, first)[0] < 0, -1.0, 1.0).to(vectors.dtype)


def choose_components(n_components: int | float | None, eigenvalues: Tensor, n_samples: int) -> int:
    """Return how many components to keep, given falling eigenvalues of the scatter matrix."""
    check_sample_count(n_components, n_samples)
    # Rounding turns eigenvalues of zero into ones of about this size.
    rounding = max(len(eigenvalues), n_samples) * torch.finfo(eigenvalues.dtype).eps
    rank = min(int((eigenvalues > eigenvalues[0] * rounding).sum()), n_samples - 1)
    return choose_among(n_components, eigenvalues[:rank], "the rank of the activations", n_samples)


def choose_among(
    n_components: int | float | None, variances: Tensor, limit: str, n_samples: int
) -> int:
    """Return how many of these components to keep; errors call their number `limit`."""
    check_n_components(n_components)
    most = len(variances)
    if not most:
        raise NotEnoughDataError(
            "PCA needs activations that vary; the layer gave the same output for all "
            f"{n_samples} samples. Fit at another layer or on other data."
        )
    if n_components is None:
        return most
    if isinstance(n_components, int):
        if n_components > most:
            raise NotEnoughDataError(
                f"The number of components is at most {limit}, here {most:,}; found "
                f"n_components={n_components:,}. Ask for {most:,} or fewer, or None for all."
            )
        return n_components
    explained = variances.cumsum(0) / variances.sum()
    return min(int((explained < n_components).sum()) + 1, most)


def check_n_components(n_components: int | float | None) -> None:
    """Raise `OptionError` unless this is a number, a fraction of the variance, or None."""
    if n_components is not None:
        check_option("n_components", n_components, _N_COMPONENTS)


def check_sample_count(n_components: int | float | None, n_samples: int) -> None:
    """Raise `NotEnoughDataError` if there are too few samples for this number of components."""
    if n_samples < 2:
        raise NotEnoughDataError(f"PCA needs at least 2 samples; found {n_samples}.")
    if isinstance(n_components, int) and n_components >= n_samples:
        raise NotEnoughDataError(
            f"{n_components} components need at least {n_components + 1} samples; found "
            f"{n_samples}. Give more data, or ask for at most {n_samples - 1} components."
        )


def float64_device(device: torch.device | str) -> torch.device:
    """Return the device itself, or the CPU if the device has no float64 (Apple's MPS)."""
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
