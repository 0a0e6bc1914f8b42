"""PCA of few samples with many numbers each: exact, from the Gram matrix of the samples.

With n centred samples as the rows of A, the n x n matrix A A^T = U s^2 U^T has the singular values
s of A, and the components are the columns of A^T U / s. Where n is smaller than the p numbers of a
sample, this is the smaller of the two problems, and it needs one pass over the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ttapca.spectral.moments import finite_samples, float64_device
from ttapca.spectral.pca import (
    PCA,
    check_sample_count,
    choose_components,
    eigh_descending,
    signs,
    total_variance,
)

# Up to so many samples, the n x n matrix is decomposed within seconds; and so many bytes of
# activations are kept in memory for it.
MOST_SAMPLES = 4096
MOST_BYTES = 2**30

COLUMNS = 1024  # are brought to float64 at a time: all of them would take twice the activations


def hold(batches: Iterator[Tensor], *, limited: bool = True) -> tuple[list[Tensor], bool]:
    """Copy batches until they are past `MOST_SAMPLES` or `MOST_BYTES`, if these limits count.

    Returns:
        Copies of what was read, and whether that is all; the rest is left in `batches`.
    """
    held: list[Tensor] = []
    samples = size = 0
    for batch in batches:
        held.append(batch.clone())  # a layer may give a view of what the caller fills anew
        samples += len(batch)
        size += batch.numel() * batch.element_size()
        if limited and (samples > MOST_SAMPLES or size > MOST_BYTES):
            return held, False
    return held, True


class SampleGram:
    """Batches of samples with `size` numbers each, and all products of two samples.

    Raises:
        NotEnoughDataError: When there are fewer than two samples.
        NonFiniteError: When one of them holds NaN or infinity.
    """

    @torch.no_grad()
    def __init__(
        self, batches: Iterable[Tensor], size: int, *, device: torch.device | str = "cpu"
    ) -> None:
        self._size = size
        self._device = float64_device(device)
        self._rows = [finite_samples(batch, size) for batch in batches]
        self.count = sum(len(rows) for rows in self._rows)
        check_sample_count(None, self.count)
        self._products = torch.zeros(
            self.count, self.count, dtype=torch.float64, device=self._device
        )
        for columns in self._columns():
            # About the mean before they are multiplied: afterwards, digits would be lost.
            columns -= columns.mean(0)
            self._products.addmm_(columns, columns.T)

    def _columns(self) -> Iterator[Tensor]:
        """All samples in float64, some columns at a time, shape (samples, columns)."""
        for start in range(0, self._size, COLUMNS):
            parts = [rows[:, start : start + COLUMNS] for rows in self._rows]
            yield torch.cat(parts).to(self._device, torch.float64)

    @torch.no_grad()
    def pca(self, n_components: int | float | None = None, *, leave_out: Sequence[int] = ()) -> PCA:
        """Decompose the samples but those whose numbers are left out.

        Raises:
            NotEnoughDataError: When the samples have fewer components than asked for.
            OptionError: When `n_components` makes no sense.
        """
        kept = torch.ones(self.count, dtype=torch.bool, device=self._device)
        kept[list(leave_out)] = False
        products = self._products[kept][:, kept]
        if leave_out:  # what is left has another mean
            products = (
                products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()
            )
        eigenvalues, vectors = eigh_descending(products)
        count = len(products)
        number = choose_components(n_components, eigenvalues, count)
        vectors = vectors[:, :number]
        mean = torch.empty(self._size, dtype=torch.float64, device=self._device)
        basis = torch.empty(self._size, number, dtype=torch.float64, device=self._device)
        for start, columns in zip(range(0, self._size, COLUMNS), self._columns(), strict=True):
            columns = columns[kept]
            mean[start : start + COLUMNS] = columns.mean(0)
            basis[start : start + COLUMNS] = (columns - columns.mean(0)).T @ vectors
        # The columns are orthogonal but for rounding, which grows where singular values are small.
        basis, lengths = torch.linalg.qr(basis)
        return PCA(
            mean=mean,
            basis=basis * signs(basis),
            singular_values=lengths.diagonal().abs(),
            n_samples=count,
            total_variance=total_variance(eigenvalues, count),
        )
