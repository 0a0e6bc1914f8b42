"""The rule of closed-form gains, as pure functions for any number of groups of samples at once.

`ClosedFormRule` compares the band energies of a stream with those of source batches of the same
size (see `ttapca.spectral.calibration`). With r = s / t, the variance of a component in the source
over that of now, gains are

    Wiener      min(r, 1)                        the optimal linear estimate under additive noise
    matching    sqrt(r)                          gives back the variance of the source
    two-sided   min(r, 1)^a clip(r, 1, limit)^b  Wiener is (1, 0), matching (1/2, 1/2)

If the mean has surely moved, it is moved back first; see `sure_share`. docs/method/equations.md
derives the formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ttapca._checks import Number, check_option
from ttapca.errors import OptionError
from ttapca.spectral.calibration import (
    NormalRange,
    SourceSpectrum,
    averaging_matrix,
    band_edges,
    between_centres,
    spreading_matrix,
)
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.gains import ABOVE_ONE, Gain, SourceComponents
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.stream_state import Spectrum, Table

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
    """Return how many images of any class say as much as these, surely of few classes by `skew`."""
    return samples / (1 + constants.likeness * skew * samples)


@dataclass(frozen=True, eq=False)
class Scaling(Table):
    """The gains and offsets of components, in a row for each group of samples."""

    gains: Tensor  # shape (groups, components)
    shift: Tensor  # how surely each group has shifted, from 0 to 1, shape (groups,)
    unusual: Tensor  # how unusual it is, from 0 to 1, shape (groups,)
    offset: Tensor | None = None  # subtracted from components before scaling
    rest_gain: Tensor | None = None  # of the part outside the basis, shape (groups,)
    rest_offset: Tensor | None = None  # subtracted from that part, shape (groups, d)


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the energies of some images say about a shift."""

    samples: float  # in a stream, older ones count less
    energies: Tensor  # variances over those of the source, shape (bands,)
    p_value: float  # share of source batches of that size that are as far from their mean
    band_p_values: Tensor  # the same for single bands, shape (bands,)


def two_sided_gain(
    log_ratio: Tensor,
    *,
    shrink: float = 1.0,
    restore: Tensor | float = 0.0,
    largest_ratio: float = 64.0,
) -> Tensor:
    """Return the gains min(r, 1)^shrink clip(r, 1, largest_ratio)^restore, given log r."""
    if isinstance(restore, Tensor):  # a number for each row
        restore = restore.to(log_ratio)[:, None]
    shrunk = shrink * log_ratio.clamp(max=0.0)
    restored = restore * log_ratio.clamp(0.0, math.log(largest_ratio))
    return shrunk.add_(restored).exp_()


def white_noise_in(
    excess: Tensor, energy: Tensor, noise: Tensor, constants: Constants = CONSTANTS
) -> tuple[Tensor, Tensor]:
    """Return by how much energies exceed the source's, and what of that is white noise.

    White noise of variance 1 has the energies `noise`, (bands,). It stands out where images have
    hardly any variance: the surplus of the last band gives its level.
    """
    surplus = -energy * torch.expm1(-excess.clamp(min=0))
    least = (energy / noise).amin(-1, keepdim=True)
    # No band exceeds its own signal by more than ratios are believed.
    most = (1 - 1 / constants.largest_ratio) * least
    return surplus, torch.minimum((surplus / noise)[..., -1:], most) * noise


def with_white_noise(
    excess: Tensor,
    log_energy: Tensor,
    noise: Tensor,
    samples: Tensor | float = 1.0,
    constants: Constants = CONSTANTS,
) -> Tensor:
    """Return by how much log energies exceed the source's, (..., bands), with white noise in each.

    One image does not tell noise from detail in the middle bands. If noise makes up the share q of
    a band's energy, that band exceeds its own signal by -log(1 - q). All of it counts for one
    sample, and evenly less for more: beyond `prior`, each band shows its own noise.
    """
    fading = (torch.as_tensor(samples, dtype=excess.dtype) - 1) / constants.prior
    if not torch.compiler.is_exporting() and bool((fading >= 1).all()):
        return excess
    energy = log_energy.exp()
    share = white_noise_in(excess, energy, noise, constants)[1] / energy
    more = (-torch.log1p(-share) - excess).clamp(min=0) * (share > 0)
    return excess + more * (1 - fading.clamp(0, 1))[..., None]


def growth_of_large(
    excess: Tensor, log_energy: Tensor, noise: Tensor, large: Tensor, constants: Constants
) -> Tensor:
    """Return by how much the large components have grown together, as a logarithm, (..., 1).

    Noise as strong as the largest shapes is rare, while black silhouettes have shapes several times
    as strong as those of photographs. `large` is the share of each band in the variance of the
    components with more variance than the mean, (bands,). White noise does not count.
    """
    surplus, white = white_noise_in(excess, log_energy.exp(), noise, constants)
    return torch.log1p((surplus - white).clamp(min=0) @ large[:, None])


def class_reach(class_means: Tensor, shares: Tensor, variances: Tensor) -> Tensor:
    """Return how far the mean of the farthest class lies, in squared deviations within classes."""
    squares = class_means.square()
    # If few samples make a class look as far as all variance, something within must be left.
    within = (variances - shares @ squares).clamp(min=variances / 64)
    return squares.amax(0) / within


def allowed_reach(reach: Tensor | None, like: Tensor, constants: Constants = CONSTANTS) -> Tensor:
    """Return how far a mean may lie before it counts, shape of `like`; see `sure_share`."""
    if reach is None:  # the classes are not known
        return torch.full_like(like, constants.chance)
    return (constants.farthest_class * reach.to(like)).clamp(min=constants.smallest_reach)


def sure_share(
    square: Tensor,
    energy: Tensor,
    reach: Tensor,
    samples: Tensor | float,
    independent: Tensor | float,
    constants: Constants = CONSTANTS,
) -> Tensor:
    """Return the part of a mean's distance from the source's that is surely a shift, from 0 to 1.

    Fog moves the mean of an image's components, and so does a batch of one class, which must be
    left alone. But a class varies around its mean, while fog leaves little variance around the new
    one. With m the mean of a component in n samples and v their variance around it, in units of the
    source, the part of m that counts is, after James and Stein,

        m max(0, 1 - (reach v + chance max(v, 1) / n) / m^2)

    The first term is how far a class may lie, the second the allowance for chance. Few samples do
    not tell v, so the source's variance counts for `prior` samples in it; and of the remainder, the
    share (n - 1) / n counts, n being the `independent` samples. `square` is m^2, and `energy` m^2 +
    v.
    """
    # In place if possible: a large image has as many components as numbers.
    own = samples * (energy - square).clamp_(min=0)
    own = own.add_(constants.prior) / (samples + constants.prior)
    bound = reach * own
    bound = bound + own.clamp_(min=1).mul_(constants.chance) / independent
    sure = bound.div_(square.clamp(min=torch.finfo(square.dtype).tiny)).neg_().add_(1).clamp_(min=0)
    others = torch.as_tensor(independent - 1, dtype=square.dtype).clamp(min=0)
    return sure * (others / (others + 1))


class ClosedFormRule(Gain):
    """The source's statistics, and the rule that leads to gains; for options see `Wiener`."""

    keeps_rest = True
    variances: Tensor
    spread: Tensor
    averages: Tensor
    rest_energy: float | None  # mean squared length outside the basis, if it is watched
    rest_range: tuple[float, float]  # of squared lengths there that count
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
        self.rest_range = 0.0, math.inf
        self.watches_rest = source.rest is not None
        if source.rest is not None:  # one more band, for all that lies outside the basis
            self.rest_energy = float(source.rest.mean())
            least = float(source.rest.min())
            if least == float(source.rest.median()):  # next to nothing: see `cross_validation`
                self.rest_range = least, constants.largest_ratio * least
            energies = torch.cat([energies, source.rest[:, None] / self.rest_energy], 1)
        self._resemblance = source.resemblance
        self.normal = SourceSpectrum(energies, self.constants, source.resemblance)
        self.edges = band_edges(len(deviations))
        # Right band, first component and end of the components between two bands, in order.
        bands = range(1, len(self.edges) - 1)
        ends = torch.searchsorted(between_centres(self.edges)[0], torch.tensor(bands), right=True)
        self._between = list(zip(bands, [0, *ends.tolist()], ends.tolist(), strict=False))
        spread, averages = spreading_matrix(self.edges), averaging_matrix(self.edges)
        self.register_buffer("variances", deviations.square())
        self.register_buffer("spread", spread.to(deviations), persistent=False)
        self.register_buffer("averages", averages.to(deviations), persistent=False)
        reach = allowed_reach(source.class_reach, deviations, constants)
        self.register_buffer("reach", reach)
        large = self.variances.where(self.variances > self.variances.mean(), 0.0).double().cpu()
        of_band = torch.stack([large[low:high].sum() for low, high in pairwise(self.edges)])
        self._large = of_band / of_band.sum().clamp(min=TINY)  # (bands,), see `growth_of_large`
        # All growth for a Wiener filter; none for exponents up to 1/2, which undo any scaling.
        self._spared = max(0.0, 2 - 1 / shrink) if shrink else 0.0
        white = source.noise().to(deviations) / self.variances  # of noise of variance 1
        self._white_noise = (white @ self.averages).to("cpu", torch.float64)  # (bands,)
        self._table: tuple[Tensor, NormalRange] | None = None  # see `make_traceable`

    def leeway_of(self, size: OtherSize | None) -> Tensor:
        """Return how resizing may have changed log energies, float64, shape (2, bands)."""
        if size is None:  # the fitted size: nothing has been done to them
            return self.normal.energies.new_zeros(2, self.normal.energies.shape[1])
        bands = self.by_band(size.leeway(self.variances).exp()).log()
        # What lies outside the basis is the end of the spectrum, as the last band is.
        return torch.cat([bands, bands[:, -1:]], 1) if self.watches_rest else bands

    def scaling(self, seen: Spectrum, restore: Tensor | float | None = None) -> Scaling:
        """Return the scaling for spectra of samples; `restore` replaces the rule's exponent."""
        normal = self.normal_ranges(seen.independent, seen.leeway)
        log_energy = self.log_energies(seen.energies, seen.rest_energy)
        shift, unusual = normal.judged(log_energy)
        offset = rest_offset = None
        if seen.mean is not None:
            offset = torch.zeros_like(seen.mean)
            # A mean that has not surely moved stays, which exporters cannot know beforehand.
            if torch.compiler.is_exporting() or bool(shift.any()):
                seen, offset, rest_offset = self._centred(seen, seen.mean, shift)
                log_energy = self.log_energies(seen.energies, seen.rest_energy)
        undo = functools.partial(
            two_sided_gain,
            shrink=self.shrink,
            restore=self.restore if restore is None else restore,
            largest_ratio=self.largest_ratio,
        )
        bands = len(self.spread)
        excess = normal.excess(log_energy)
        inside = (excess[:, :bands], log_energy[:, :bands], self._white_noise)
        grown = growth_of_large(*inside, self._large, self.constants)
        noisy = with_white_noise(*inside, seen.samples, self.constants)
        noisy, excess = (
            each - self._spared * each.clamp(min=0).minimum(grown) for each in (noisy, excess)
        )
        gains = undo(-self.spread_over(noisy))
        rest_gain = undo(-excess[:, -1:])[:, 0] if self.watches_rest else None
        return Scaling(gains, shift, unusual, offset, rest_gain, rest_offset)

    def normal_ranges(self, independent: Tensor, leeway: Tensor) -> NormalRange:
        """Return the range of source batches of this many images and this leeway in each row."""
        if self._table is None:
            return self.normal.normal_ranges(independent, self.threshold, leeway)
        rows, table = self._table
        whole = independent.round().clamp(min=0, max=len(rows) - 1).long()
        chosen = rows.index_select(0, whole)
        return table.mapped(lambda each: each.index_select(0, chosen))

    def like_one_image(self, seen: Spectrum) -> Tensor:
        """Return whether each row may be a single source image, seen again and again."""
        usual = self.normal.batches_of(1).normal_range(self.threshold)
        log_energy = self.log_energies(seen.energies, seen.rest_energy)
        return usual.distance(log_energy) <= usual.reach

    def make_traceable(self) -> None:
        """Do the same operations whatever the numbers, in float32, as exporters need it."""
        rows, table = self.normal.all_normal_ranges(self.threshold)
        self._table = rows, table.mapped(lambda each: each.to(self.variances))
        self._white_noise = self._white_noise.to(self.variances)
        self._large = self._large.to(self.variances)

    def _centred(
        self, seen: Spectrum, mean: Tensor, shift: Tensor
    ) -> tuple[Spectrum, Tensor, Tensor | None]:
        """Return spectra around means that are moved back, and the moves inside and outside."""
        energies = seen.energies
        weight = (self.center * shift).to(energies)
        worth = seen.independent
        if self._resemblance is not None:
            worth = self._resemblance.worth(worth)
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
        rest = rest.clamp(min=self.rest_range[0] / self.rest_energy)
        moved = dataclasses.replace(moved, rest_energy=rest)
        return moved, share * mean, part[:, None] * seen.rest_mean

    def by_band(self, energies: Tensor) -> Tensor:
        """Return energies of bands, float64 on the CPU: (..., components) to (..., bands)."""
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
        """Return the logarithms of band energies, and last that of the rest if it is watched."""
        return self._with_rest(self.by_band(energies), rest).clamp(min=TINY).log()

    def _with_rest(self, bands: Tensor, rest: Tensor | None) -> Tensor:
        if not self.watches_rest:
            return bands
        last = torch.ones_like(bands[..., :1]) if rest is None else rest[..., None].to(bands)
        return torch.cat([bands, last], -1)

    def evidence(
        self,
        energies: Tensor,
        samples: float,
        independent: float | None = None,
        outside: float = 1.0,
        leeway: Tensor | None = None,
    ) -> Evidence:
        """Return the evidence of images by their energies in bands, (bands,), and outside."""
        normal = self.normal.batches_of(samples if independent is None else independent, leeway)
        log_energy = self._with_rest(energies, energies.new_tensor(outside)).clamp(min=TINY).log()
        p_value = float(normal.p_value(log_energy))
        by_band = normal.band_p_values(log_energy)[: len(energies)]
        return Evidence(samples, energies, p_value, by_band)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shrink={self.shrink}, restore={self.restore}, bands={len(self.edges) - 1}"
