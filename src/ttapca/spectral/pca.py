"""Exact principal component analysis: one symmetric eigendecomposition of accumulated moments.

Incremental PCA (merging low-rank factors) would need less memory but is not exact: what it drops
early it cannot recover when later batches show that it mattered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca._checks import Either, Number, Whole, check_option
from ttapca.errors import NotEnoughDataError
from ttapca.spectral.moments import Moments, flatten_samples

# Two entries of a basis vector whose magnitudes differ by less than this (relatively) count as
# tied when the vector's sign is fixed: rounding must not decide which of them is the larger.
TIE = 1e-6

_N_COMPONENTS = Either(
    [Whole(1), Number(above=0, high=1)],
    "a whole number of at least 1, a fraction of the variance (a float above 0 and up to 1), or "
    "None for all",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Spectrum:
    """What every decomposition knows of the samples that it was made from.

    Attributes:
        mean: Of the samples, shape (size,).
        singular_values: Of the centred data matrix, falling, shape (components,).
        n_samples: Number of samples.
        total_variance: Variance over all components, kept or not.
    """

    mean: Tensor
    singular_values: Tensor
    n_samples: int
    total_variance: float

    @property
    def explained_variance(self) -> Tensor:
        """Variance along each component, shape (components,)."""
        return self.singular_values.square() / (self.n_samples - 1)

    @property
    def explained_variance_ratio(self) -> Tensor:
        """Share of the total variance along each component, shape (components,)."""
        return self.explained_variance / self.total_variance


@dataclass(frozen=True, eq=False, kw_only=True)
class PCA(Spectrum):
    """Principal components of a data matrix with one sample in each row.

    Attributes:
        basis: Orthonormal columns in order of falling variance, with fixed signs (the entry of
            largest magnitude is positive), shape (p, components).

    Example:
        >>> moments = Moments(2).update(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        >>> pca = PCA.from_moments(moments, n_components=1)
        >>> [round(value, 3) for value in pca.basis[:, 0].tolist()]
        [0.6, 0.8]
    """

    basis: Tensor

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

    def transform(self, samples: Tensor) -> Tensor:
        """Components of samples: (N, ...) to (N, components), float64."""
        flat = flatten_samples(samples, self.mean.numel()).to(self.mean)
        return (flat - self.mean) @ self.basis

    def inverse_transform(self, components: Tensor) -> Tensor:
        """Samples from their components: (N, components) to (N, p), float64."""
        return components.to(self.mean) @ self.basis.T + self.mean


def eigh_descending(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in falling order, none below zero, and their eigenvectors as columns."""
    eigenvalues, vectors = torch.linalg.eigh(symmetric)
    return eigenvalues.flip(0).clamp_min(0.0), vectors.flip(1)


def total_variance(eigenvalues: Tensor, n_samples: int) -> float:
    """Variance over all components, from the eigenvalues of the scatter matrix."""
    return float(eigenvalues.sum()) / (n_samples - 1)


def signs(vectors: Tensor) -> Tensor:
    """Signs that make the entry of largest magnitude of each column positive, (p, n) to (n,)."""
    magnitude = vectors.abs()
    near_peak = magnitude >= magnitude.amax(0) * (1 - TIE)
    first = near_peak.to(torch.uint8).argmax(0, keepdim=True)
    return torch.where(vectors.gather(0, first)[0] < 0, -1.0, 1.0).to(vectors.dtype)


def choose_components(n_components: int | float | None, eigenvalues: Tensor, n_samples: int) -> int:
    """Turn a wish into a number of components, at least 1 and at most the rank of the data.

    Args:
        n_components: A number, a fraction of the variance (a float up to 1), or None for all.
        eigenvalues: Of the scatter matrix, in falling order.
        n_samples: Number of samples behind it.

    Raises:
        NotEnoughDataError: When the data cannot give what is wished.
        OptionError: When the wish makes no sense.
    """
    check_sample_count(n_components, n_samples)
    # Rounding leaves eigenvalues of about this size where the exact ones are zero.
    rounding = max(len(eigenvalues), n_samples) * torch.finfo(eigenvalues.dtype).eps
    rank = min(int((eigenvalues > eigenvalues[0] * rounding).sum()), n_samples - 1)
    return choose_of(n_components, eigenvalues[:rank], "the rank of the activations", n_samples)


def choose_of(
    n_components: int | float | None, variances: Tensor, limit: str, n_samples: int
) -> int:
    """The same among components that vary, by their falling variances; `limit` is for a message."""
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
    """Raise `NotEnoughDataError` when so few samples cannot have that many components."""
    if n_samples < 2:
        raise NotEnoughDataError(f"PCA needs at least 2 samples; found {n_samples}.")
    if isinstance(n_components, int) and n_components >= n_samples:
        raise NotEnoughDataError(
            f"{n_components} components need at least {n_components + 1} samples; found "
            f"{n_samples}. Give more data, or ask for at most {n_samples - 1} components."
        )
