"""The mathematics of closed-form gains, for one stream or for many at once.

Let s be the variance of a component in the source data and t its variance now. Additive noise
raises t, blur and loss of contrast lower it; r = s / t says by how much to undo that.

`ClosedFormRule` compares the band energies of a stream with those of source batches of the same
size (see `ttapca.spectral.calibration`) and applies the formulas of
`ttapca.spectral.variance_ratios` to the difference. Where the mean has surely moved (see
`ttapca.spectral.means`), it is moved back first. Who keeps what streams have shown is somebody
else: `ttapca.spectral.closed_form` for one stream, `ttapca.spectral.many_streams` for many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ttapca._checks import Number, Such, Whole, check_option
from ttapca.errors import OptionError
from ttapca.spectral.calibration import (
    SourceSpectrum,
    Usual,
    averaging_matrix,
    band_edges,
    between_bands,
    spreading_matrix,
)
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.gains import ABOVE_ONE, Gain, SourceComponents
from ttapca.spectral.means import allowed_reach, sure_share
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.variance_ratios import signal_share, smoothed, two_sided_gain
from ttapca.spectral.white_noise import with_white_noise

# The first two were chosen by scripts/tune_closed_form.py.
LARGEST_RATIO = 64.0
THRESHOLD = 0.8  # share of source batches that are left exactly alone
TINY = 1e-12  # an energy of zero has no logarithm
# From this many components on, bands are averaged one by one: a matrix would take longer to read.
LARGE = 2**15

ODD = Such(Whole(1), lambda value: value % 2 == 1, "an odd number of components")
_RULES = {
    "shrink": Number(0),
    "restore": Number(0),
    "largest_ratio": ABOVE_ONE,
    "threshold": Number(0, below=1),
    "center": Number(0, 1),
    "floor": Number(0),
}

Samples = TypeVar("Samples", float, Tensor)


def independent_images(samples: Samples, skew: Samples) -> Samples:
    """Return how many images of any class say as much as these.

    Images of one class resemble each other: many of them say as little as a few of any class.

    Args:
        samples: How many there are.
        skew: How surely they are of few classes, from 0 to 1.

    Example:
        >>> independent_images(200.0, 0.0), round(independent_images(200.0, 1.0), 1)
        (200.0, 9.5)
    """
    return samples / (1 + CONSTANTS.likeness * skew * samples)


@dataclass(frozen=True, eq=False)
class Shown:
    """What streams have shown of the components; older samples count less and less.

    Attributes:
        samples: How many samples count, float64, shape (streams,).
        energies: Mean square of each component over source variance, shape (streams, components).
        mean: Mean of each component, of the same shape; None where nobody asks for it.
        rest_energy: Mean squared length of what lies outside the basis, over that of the source,
            float64, shape (streams,); None where it is not watched.
        rest_mean: Mean of what lies outside the basis, shape (streams, d), or None.
    """

    samples: Tensor
    energies: Tensor
    mean: Tensor | None = None
    rest_energy: Tensor | None = None
    rest_mean: Tensor | None = None

    def joined(self, newer: Shown, memory: float) -> Shown:
        """Return what was shown in all, where all samples of `newer` came after these.

        Args:
            newer: What samples have shown that came since; of a stream without, anything finite.
            memory: After so many samples, what was seen counts 1 / e.
        """
        samples = self.samples * torch.exp(-newer.samples / memory) + newer.samples
        new = newer.samples / samples.clamp(min=TINY)
        found = {"samples": samples}
        for name, before in self.tensors().items():
            now = getattr(newer, name)
            if name != "samples" and now is not None:
                weight = new.to(now) if now.dim() == 1 else new.to(now)[:, None]
                found[name] = before.to(now).lerp(now, weight)
        return Shown(**found)

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def of_stream(self, number: int) -> Shown:
        """Return a copy of what one of the streams has shown."""
        return Shown(**{name: each[number, None].clone() for name, each in self.tensors().items()})

    @classmethod
    def of_each(cls, several: Sequence[Shown]) -> Shown:
        """Return what streams have shown together, given what each has."""
        names = several[0].tensors()
        return cls(**{name: torch.cat([getattr(one, name) for one in several]) for name in names})


@dataclass(frozen=True, eq=False)
class Verdict:
    """What follows from what streams have shown.

    Attributes:
        gains: Shape (streams, components).
        certainty: How surely each stream has shifted, from 0 to 1, shape (streams,).
        unusual: How unusual it is, from 0 to 1, shape (streams,).
        offset: What to subtract from components before scaling; None where nobody asks for it.
        rest_gain: Gain of what lies outside the basis, shape (streams,), or None.
        rest_offset: What to subtract from that, shape (streams, d), or None.
    """

    gains: Tensor
    certainty: Tensor
    unusual: Tensor
    offset: Tensor | None
    rest_gain: Tensor | None
    rest_offset: Tensor | None


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
            `ttapca.spectral.means`.
        window: Smooth the spectrum over this odd number of neighbouring components instead of over
            bands. There is no range of source batches then: the whole difference counts, times
            how surely the data have shifted.
        floor: Variance of noise that every image has. Detail is restored as far as it exceeds that
            noise; see `signal_share`.

    Attributes:
        leeway: What resizing may have done to the images that were seen; see `leeway_of`.

    Raises:
        OptionError: An option makes no sense, or the filter has no energies.
    """

    keeps_rest = True
    variances: Tensor
    spread: Tensor
    averages: Tensor
    rest_energy: float | None  # mean squared length of what lies outside, where it is watched
    reach: Tensor
    floor: Tensor | None

    def __init__(
        self,
        source: SourceComponents,
        *,
        shrink: float = 1.0,
        restore: float = 0.5,
        largest_ratio: float = LARGEST_RATIO,
        threshold: float = THRESHOLD,
        center: float = 1.0,
        window: int | None = None,
        floor: float = 0.0,
    ) -> None:
        super().__init__()
        values = (shrink, restore, largest_ratio, threshold, center, floor)
        for (name, rule), value in zip(_RULES.items(), values, strict=True):
            check_option(name, value, rule)
        if window is not None:
            check_option("window", window, ODD)
        if source.energies is None:
            raise OptionError(
                "Closed-form gains need the band energies of source samples; this filter was saved "
                "without. Fit it again with `ttapca.fit`, which keeps them."
            )
        self.shrink, self.restore, self.largest_ratio = shrink, restore, largest_ratio
        self.threshold, self.center, self.window = threshold, center, window
        deviations = source.deviations.detach()
        energies, self.rest_energy = source.energies, None
        self.watches_rest = source.rest is not None
        if source.rest is not None:  # one more band, for all that lies outside the basis
            self.rest_energy = float(source.rest.mean())
            energies = torch.cat([energies, source.rest[:, None] / self.rest_energy], 1)
        self.normal = SourceSpectrum(energies)
        self.edges = band_edges(len(deviations))
        self._between = between_bands(self.edges)
        spread, averages = spreading_matrix(self.edges), averaging_matrix(self.edges)
        self.register_buffer("variances", deviations.square())
        self.register_buffer("spread", spread.to(deviations), persistent=False)
        self.register_buffer("averages", averages.to(deviations), persistent=False)
        self.register_buffer("reach", allowed_reach(source.class_reach, deviations))
        white = source.noise().to(deviations) / self.variances  # of noise of variance 1
        self.register_buffer("floor", floor * white if floor else None)
        self._white_noise = (white @ self.averages).to("cpu", torch.float64)  # (bands,)

    @property
    def leeway(self) -> Tensor:
        """What resizing may have done to the images that were seen; see `leeway_of`."""
        return self.no_leeway()

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

    def verdict(
        self,
        shown: Shown,
        independent: Tensor,
        restore: float | None = None,
        leeway: Tensor | None = None,
    ) -> Verdict:
        """Return what follows from what streams have shown.

        Args:
            shown: Of at least one sample each.
            independent: How many of the samples say something new, float64, shape (streams,).
            restore: In place of the rule's own exponent.
            leeway: What resizing may have done to the images of all streams; see `leeway_of`.
        """
        usual = self.usual(independent, leeway)
        log_energy = self.log_energies(shown.energies, shown.rest_energy)
        certainty, unusual = usual.judged(log_energy)
        offset = rest_offset = None
        if shown.mean is not None:
            offset = torch.zeros_like(shown.mean)
            # A mean that has not surely moved stays, which exporters cannot know beforehand.
            if torch.compiler.is_exporting() or bool(certainty.any()):
                shown, offset, rest_offset = self._centred(
                    shown, shown.mean, certainty, independent
                )
                log_energy = self.log_energies(shown.energies, shown.rest_energy)
        restore = self.restore if restore is None else restore
        excess = self._excess(usual, log_energy, shown, certainty)
        gains = self._undo(-excess, restore)
        if self.floor is not None:
            share = signal_share(excess.exp(), self.floor)
            gains = torch.where(excess < 0, gains * share ** (1 - restore), gains)
        rest_gain = None
        if self.watches_rest:
            rest_gain = self._undo(-usual.excess(log_energy)[:, -1], restore)
        return Verdict(gains, certainty, unusual, offset, rest_gain, rest_offset)

    def usual(self, independent: Tensor, leeway: Tensor | None = None) -> Usual:
        """Return what is usual for streams of so many images, shape (streams,); see `verdict`."""
        return self.normal.usual(independent, self.threshold, leeway)

    def _undo(self, log_ratio: Tensor, restore: float) -> Tensor:
        exponents = {"shrink": self.shrink, "restore": restore}
        return two_sided_gain(log_ratio, **exponents, largest_ratio=self.largest_ratio)

    def _centred(
        self, shown: Shown, mean: Tensor, certainty: Tensor, independent: Tensor
    ) -> tuple[Shown, Tensor, Tensor | None]:
        """Return what is shown around means that are moved back, and by how much they are."""
        energies = shown.energies
        weight = (self.center * certainty).to(energies)
        counts = (shown.samples.to(energies), independent.to(energies))
        columns = tuple(each[:, None] for each in counts)
        square = mean.square() / self.variances
        share = weight[:, None] * sure_share(square, energies, self.reach, *columns)
        energies = energies - share * (2 - share) * square
        moved = dataclasses.replace(shown, energies=energies)
        if shown.rest_energy is None or shown.rest_mean is None or self.rest_energy is None:
            return moved, share * mean, None
        far = shown.rest_mean.square().sum(1) / self.rest_energy
        # It depends on classes as much as the components next to it, at most.
        reach = self.reach[self.edges[-2] :].max()
        part = weight * sure_share(far, shown.rest_energy.to(far), reach, *counts)
        rest = shown.rest_energy - (part * (2 - part) * far).to(shown.rest_energy)
        moved = dataclasses.replace(moved, rest_energy=rest)
        return moved, share * mean, part[:, None] * shown.rest_mean

    def _excess(self, usual: Usual, log_energy: Tensor, shown: Shown, certainty: Tensor) -> Tensor:
        """Return by how much the log energy of each component exceeds that of source batches."""
        bands = len(self.spread)
        if self.window is None:
            excess = usual.excess(log_energy)[:, :bands]
            noisy = with_white_noise(
                excess, log_energy[:, :bands], self._white_noise, shown.samples.cpu()
            )
            return self.spread_over(noisy)
        mean = self.spread_over(usual.mean[..., :bands])
        away = smoothed(shown.energies.clamp(min=TINY).log() - mean, self.window)
        return away * certainty.to(away)[:, None]

    def by_band(self, energies: Tensor) -> Tensor:
        """Return the energies of bands, given those of components, in float64 on the CPU.

        Shape (..., components) to (..., bands).
        """
        return self.band_means(energies.to(self.averages)).to("cpu", torch.float64)

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
            leeway: What resizing may have done to them; by default to those that were seen last.
        """
        leeway = self.leeway if leeway is None else leeway
        normal = self.normal.batches_of(samples if independent is None else independent, leeway)
        log_energy = self.with_rest(energies, energies.new_tensor(outside)).clamp(min=TINY).log()
        p_value = float(normal.p_value(log_energy))
        by_band = normal.band_p_values(log_energy)[: len(energies)]
        return Evidence(samples, energies, p_value, by_band)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shrink={self.shrink}, restore={self.restore}, bands={len(self.edges) - 1}"
