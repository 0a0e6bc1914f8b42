"""The mathematics of closed-form gains, for any number of groups of samples at once.

Let s be the variance of a component in the source data and t its variance now. Additive noise
raises t, blur and loss of contrast lower it; r = s / t says by how much to undo that.

`ClosedFormRule` compares the band energies of a stream with those of source batches of the same
size (see `ttapca.spectral.calibration`) and applies the formulas of
`ttapca.spectral.shrinkage` to the difference. If the mean has surely moved, it is moved back first.
Its functions are pure: what streams have shown comes in as a `Spectrum`, and
`ttapca.spectral.closed_form` keeps it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ttapca._checks import Number, check_option
from ttapca.errors import OptionError
from ttapca.spectral.calibration import (
    SourceSpectrum,
    Usual,
    averaging_matrix,
    band_edges,
    between_bands,
    spreading_matrix,
)
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.gains import ABOVE_ONE, Gain, SourceComponents
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.shrinkage import (
    allowed_reach,
    sure_share,
    two_sided_gain,
    with_white_noise,
)
from ttapca.spectral.stream_state import Spectrum

TINY = 1e-12  # an energy of zero has no logarithm
# From this many components on, bands are averaged one by one: a matrix would take longer to read.
LARGE = 2**15

_RULES = {
    "shrink": Number(0),
    "restore": Number(0),
    "largest_ratio": ABOVE_ONE,
    "threshold": Number(0, below=1),
    "center": Number(0, 1),
}

Samples = TypeVar("Samples", float, Tensor)


def independent_images(
    samples: Samples, skew: Samples, constants: Constants = CONSTANTS
) -> Samples:
    """Return how many images of any class say as much as these.

    Images of one class resemble each other: many of them say as little as a few of any class.

    Args:
        samples: How many there are.
        skew: How surely they are of few classes, from 0 to 1.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> independent_images(200.0, 0.0), round(independent_images(200.0, 1.0), 1)
        (200.0, 9.5)
    """
    return samples / (1 + constants.likeness * skew * samples)


@dataclass(frozen=True, eq=False)
class Scaling:
    """What to do with components, in a row for each group of samples.

    Attributes:
        gains: Shape (groups, components).
        shift: How surely each group has shifted, from 0 to 1, shape (groups,).
        unusual: How unusual it is, from 0 to 1, shape (groups,).
        offset: What to subtract from components before scaling; None if nobody asks for it.
        rest_gain: Gain of what lies outside the basis, shape (groups,), or None.
        rest_offset: What to subtract from that, shape (groups, d), or None.
    """

    gains: Tensor
    shift: Tensor
    unusual: Tensor
    offset: Tensor | None
    rest_gain: Tensor | None
    rest_offset: Tensor | None

    def row(self, number: int) -> Scaling:
        """Return what to do with one of the groups."""
        own = slice(number, number + 1)
        return Scaling(
            self.gains[own],
            self.shift[own],
            self.unusual[own],
            None if self.offset is None else self.offset[own],
            None if self.rest_gain is None else self.rest_gain[own],
            None if self.rest_offset is None else self.rest_offset[own],
        )


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the energies of some images say about a shift.

    Attributes:
        samples: How many images there are; in a stream, older ones count less.
        energies: Their energies, shape (bands,): variance over that of the source.
        p_value: Share of source batches of that size that are as far from the mean source batch.
        band_p_values: The same for single bands, shape (bands,).
    """

    samples: float
    energies: Tensor
    p_value: float
    band_p_values: Tensor


class ClosedFormRule(Gain):
    """What the source says about gains, and the rule that leads to them.

    In each band, only the part of the log energy outside the range of source batches of the same
    size counts. So a single image, whose energies vary much by nature, changes little unless it is
    far off, and clean batches hardly change at all.

    Args:
        source: Deviations and energies of the source components.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less.
        largest_ratio: Larger ratios of variances count as this one.
        threshold: Share of source batches whose gains are exactly 1; 0 trusts every batch.
        center: Share of a sure shift of the mean that is removed, 0 to 1; see
            `ttapca.spectral.shrinkage`.
        constants: See `ttapca.spectral.constants`.

    Raises:
        OptionError: An option makes no sense, or the filter has no energies.
    """

    keeps_rest = True
    variances: Tensor
    spread: Tensor
    averages: Tensor
    rest_energy: float | None  # mean squared length of what lies outside, where it is watched
    reach: Tensor

    def __init__(
        self,
        source: SourceComponents,
        *,
        shrink: float = 1.0,
        restore: float = 0.5,
        largest_ratio: float = CONSTANTS.largest_ratio,
        threshold: float = CONSTANTS.threshold,
        center: float = 1.0,
        constants: Constants = CONSTANTS,
    ) -> None:
        super().__init__()
        values = (shrink, restore, largest_ratio, threshold, center)
        for (name, rule), value in zip(_RULES.items(), values, strict=True):
            check_option(name, value, rule)
        if source.energies is None:
            raise OptionError(
                "Closed-form gains need the band energies of source samples; this filter was saved "
                "without. Fit it again with `ttapca.fit`, which keeps them."
            )
        self.shrink, self.restore, self.largest_ratio = shrink, restore, largest_ratio
        self.threshold, self.center, self.constants = threshold, center, constants
        if source.resemblance is not None:
            self.constants = constants = source.resemblance.told(constants)
        deviations = source.deviations.detach()
        energies, self.rest_energy = source.energies, None
        self.watches_rest = source.rest is not None
        if source.rest is not None:  # one more band, for all that lies outside the basis
            self.rest_energy = float(source.rest.mean())
            energies = torch.cat([energies, source.rest[:, None] / self.rest_energy], 1)
        self._resemblance = source.resemblance
        self.normal = SourceSpectrum(energies, self.constants, source.resemblance)
        self.edges = band_edges(len(deviations))
        self._between = between_bands(self.edges)
        spread, averages = spreading_matrix(self.edges), averaging_matrix(self.edges)
        self.register_buffer("variances", deviations.square())
        self.register_buffer("spread", spread.to(deviations), persistent=False)
        self.register_buffer("averages", averages.to(deviations), persistent=False)
        reach = allowed_reach(source.class_reach, deviations, constants)
        self.register_buffer("reach", reach)
        white = source.noise().to(deviations) / self.variances  # of noise of variance 1
        self._white_noise = (white @ self.averages).to("cpu", torch.float64)  # (bands,)
        self._table: tuple[Tensor, Usual] | None = None  # see `make_traceable`

    def no_leeway(self) -> Tensor:
        """Return `leeway_of` images of the fitted size: nothing has been done to them."""
        return self.normal.energies.new_zeros(2, self.normal.energies.shape[1])

    def leeway_of(self, size: OtherSize | None) -> Tensor:
        """Return what resizing may have done to log energies, float64, shape (2, bands).

        Args:
            size: Of images; None for that of the fit.
        """
        if size is None:
            return self.no_leeway()
        bands = self.by_band(size.leeway(self.variances).exp()).log()
        # What lies outside the basis is the end of the spectrum, as the last band is.
        return torch.cat([bands, bands[:, -1:]], 1) if self.watches_rest else bands

    def scaling(self, seen: Spectrum, restore: Tensor | float | None = None) -> Scaling:
        """Return what follows from what was seen.

        Args:
            seen: Of at least one sample in each row.
            restore: In place of the rule's own exponent; a number, or one for each row.
        """
        usual = self.usual(seen.independent, seen.leeway)
        log_energy = self.log_energies(seen.energies, seen.rest_energy)
        shift, unusual = usual.judged(log_energy)
        offset = rest_offset = None
        if seen.mean is not None:
            offset = torch.zeros_like(seen.mean)
            # A mean that has not surely moved stays, which exporters cannot know beforehand.
            if torch.compiler.is_exporting() or bool(shift.any()):
                seen, offset, rest_offset = self._centred(seen, seen.mean, shift)
                log_energy = self.log_energies(seen.energies, seen.rest_energy)
        exponent = self.restore if restore is None else restore
        bands = len(self.spread)
        excess = usual.excess(log_energy)
        noisy = with_white_noise(
            excess[:, :bands],
            log_energy[:, :bands],
            self._white_noise,
            seen.samples,
            self.constants,
        )
        gains = self._undo(-self.spread_over(noisy), exponent)
        rest_gain = self._undo(-excess[:, -1:], exponent)[:, 0] if self.watches_rest else None
        return Scaling(gains, shift, unusual, offset, rest_gain, rest_offset)

    def usual(self, independent: Tensor, leeway: Tensor) -> Usual:
        """Return what is usual for so many images in each row, after what was done to them."""
        if self._table is None:
            return self.normal.usual(independent, self.threshold, leeway)
        rows, table = self._table
        whole = independent.round().clamp(min=0, max=len(rows) - 1).long()
        return table.of_streams(rows.index_select(0, whole))

    def make_traceable(self) -> None:
        """Do the same operations whatever the numbers, in float32, as exporters need it.

        What is usual is looked up in a table of all sizes, for images of the size of the fit.
        """
        rows, table = self.normal.usual_of_all(self.threshold)
        tensors = (getattr(table, each.name) for each in dataclasses.fields(table))
        self._table = rows, Usual(*(each.to(self.variances) for each in tensors))
        self._white_noise = self._white_noise.to(self.variances)

    def _undo(self, log_ratio: Tensor, restore: Tensor | float) -> Tensor:
        if isinstance(restore, Tensor):
            restore = restore.to(log_ratio)[:, None]
        return two_sided_gain(
            log_ratio, shrink=self.shrink, restore=restore, largest_ratio=self.largest_ratio
        )

    def _centred(
        self, seen: Spectrum, mean: Tensor, shift: Tensor
    ) -> tuple[Spectrum, Tensor, Tensor | None]:
        """Return what was seen around means that are moved back, and by how much they are."""
        energies = seen.energies
        weight = (self.center * shift).to(energies)
        worth = (
            seen.independent
            if self._resemblance is None
            else self._resemblance.worth(seen.independent)
        )
        counts = (seen.samples.to(energies), worth.to(energies))
        samples, independent = (each[:, None] for each in counts)
        square = mean.square() / self.variances
        share = weight[:, None] * sure_share(
            square, energies, self.reach, samples, independent, self.constants
        )
        energies = energies - share * (2 - share) * square
        moved = dataclasses.replace(seen, energies=energies)
        if seen.rest_energy is None or seen.rest_mean is None or self.rest_energy is None:
            return moved, share * mean, None
        far = seen.rest_mean.square().sum(1) / self.rest_energy
        # It depends on classes as much as the components next to it, at most.
        reach = self.reach[self.edges[-2] :].max()
        part = weight * sure_share(far, seen.rest_energy.to(far), reach, *counts, self.constants)
        rest = seen.rest_energy - (part * (2 - part) * far).to(seen.rest_energy)
        moved = dataclasses.replace(moved, rest_energy=rest)
        return moved, share * mean, part[:, None] * seen.rest_mean

    def by_band(self, energies: Tensor) -> Tensor:
        """Return the energies of bands, given those of components, in float64 on the CPU.

        Shape (..., components) to (..., bands).
        """
        found = self.band_means(energies.to(self.averages))
        return found if self._table is not None else found.to("cpu", torch.float64)

    def band_means(self, values: Tensor) -> Tensor:
        """Return the mean of every band, (..., components) to (..., bands)."""
        if len(self.averages) < LARGE:
            return values @ self.averages
        # Reading the matrix would take longer than reading the energies of a large image.
        bands = [values[..., low:high].mean(-1) for low, high in pairwise(self.edges)]
        return torch.stack(bands, -1)

    def spread_over(self, bands: Tensor) -> Tensor:
        """Spread the values of bands over components, (..., bands) to (..., components)."""
        bands = bands.to(self.spread)
        if self.spread.shape[1] < LARGE:
            return bands @ self.spread
        # Two bands count for each component; most of the matrix is zero, and long to read.
        values = bands[..., None].unbind(-2)
        parts = [
            torch.lerp(values[right - 1], values[right], self.spread[right, first:end])
            for right, first, end in self._between
        ]
        return torch.cat(parts, -1)

    def log_energies(self, energies: Tensor, rest: Tensor | None = None) -> Tensor:
        """Return the logarithms of band energies, given energies of components.

        Args:
            energies: Shape (..., components).
            rest: Energy of what lies outside the basis, shape (...); where that is watched, it is
                one more band, the last one.
        """
        return self.with_rest(self.by_band(energies), rest).clamp(min=TINY).log()

    def with_rest(self, bands: Tensor, rest: Tensor | None) -> Tensor:
        """Return energies of bands, and of what lies outside the basis where that is watched."""
        if not self.watches_rest:
            return bands
        last = torch.ones_like(bands[..., :1]) if rest is None else rest[..., None].to(bands)
        return torch.cat([bands, last], -1)

    def gains_by_band(self, gains: Tensor) -> Tensor:
        """Return the gains in the middle of every band, (..., components) to (..., bands)."""
        return self.band_means(gains.to(self.averages).log()).exp()

    def evidence(
        self,
        energies: Tensor,
        samples: float,
        independent: float | None = None,
        outside: float = 1.0,
        leeway: Tensor | None = None,
    ) -> Evidence:
        """Return what images say about a shift.

        Args:
            energies: Of bands, shape (bands,).
            samples: How many images they are of.
            independent: How many of them say something new; by default all.
            outside: Energy of what lies outside the basis, where that is watched.
            leeway: What resizing may have done to them; by default nothing.
        """
        normal = self.normal.batches_of(samples if independent is None else independent, leeway)
        log_energy = self.with_rest(energies, energies.new_tensor(outside)).clamp(min=TINY).log()
        p_value = float(normal.p_value(log_energy))
        by_band = normal.band_p_values(log_energy)[: len(energies)]
        return Evidence(samples, energies, p_value, by_band)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shrink={self.shrink}, restore={self.restore}, bands={len(self.edges) - 1}"
