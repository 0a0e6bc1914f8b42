"""Gains in closed form: nothing is learned, they follow from the spectrum of the test data.

Let s be the variance of a component in the source data and t its variance now. Additive noise
raises t, blur and loss of contrast lower it; r = s / t says by how much to undo that.

`ClosedFormGain` compares the band energies of the stream so far with those of source batches of the
same size (see `ttapca.spectral.calibration`) and applies the formulas of
`ttapca.spectral.variance_ratios` to the difference.
Where the mean has surely moved (see `ttapca.spectral.means`), it is moved back first.
`PulledGain` multiplies the result by a factor that gradient steps may learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import Number, Such, Whole, check_option
from ttapca.errors import OptionError
from ttapca.spectral.calibration import (
    Normality,
    SourceSpectrum,
    averaging_matrix,
    band_edges,
    spreading_matrix,
)
from ttapca.spectral.conditions import Appearances, ConditionStates
from ttapca.spectral.gains import (
    ABOVE_ONE,
    MULTIPLIER_LIMIT,
    Gain,
    SourceComponents,
    bounded_multiplier,
    register_gain,
)
from ttapca.spectral.means import allowed_reach, sure_share
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.stream import Stream, surest_condition
from ttapca.spectral.textures import textures
from ttapca.spectral.variance_ratios import signal_share, smoothed, two_sided_gain
from ttapca.spectral.white_noise import with_white_noise

# Chosen by scripts/tune_closed_form.py; so are the exponents that the names stand for.
LARGEST_RATIO = 64.0
THRESHOLD = 0.8  # share of source batches that are left exactly alone
MEMORY = 200.0  # samples
WIENER = {"shrink": 1.0, "restore": 0.6}
LIKENESS = 0.1  # correlation of the energies of two images of one class
TINY = 1e-12  # an energy of zero has no logarithm

ODD = Such(Whole(1), lambda value: value % 2 == 1, "an odd number of components")
_RULES = {
    "shrink": Number(0),
    "restore": Number(0),
    "largest_ratio": ABOVE_ONE,
    "threshold": Number(0, below=1),
    "memory": Number(above=0),
    "center": Number(0, 1),
    "floor": Number(0),
}


def independent_images(samples: float, skew: float) -> float:
    """Return how many images of any class say as much as these.

    Images of one class resemble each other: many of them say as little as a few of any class.

    Args:
        samples: How many there are.
        skew: How surely they are of few classes, from 0 to 1.

    Example:
        >>> independent_images(200, 0.0), round(independent_images(200, 1.0), 1)
        (200.0, 9.5)
    """
    return samples / (1 + LIKENESS * skew * samples)


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


@register_gain("wiener", **WIENER)
@register_gain("match", shrink=0.5, restore=0.5)
@register_gain("two-sided")
class ClosedFormGain(Gain):
    """Gains in closed form from the energies of the stream.

    A call with components adds their energies to the stream, if this pass counts, and returns the
    gains for all that was seen. Older samples count less and less.

    In each band, only the part of the log energy outside the range of source batches of the same
    size counts. So a single image, whose energies vary much by nature, changes little unless it is
    far off, and clean batches hardly change at all.

    Args:
        source: Deviations and energies of the source components.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less. Where normalisation layers restore a lost scale by
            themselves, only the rest of it is restored here.
        largest_ratio: Larger ratios of variances count as this one.
        threshold: Share of source batches whose gains are exactly 1; 0 trusts every batch.
        memory: Samples after which what was seen counts 1 / e. A stream that the gain joins has its
            own.
        center: Share of a sure shift of the mean that is removed, 0 to 1; see
            `ttapca.spectral.means`.
        window: Smooth the spectrum over this odd number of neighbouring components instead of over
            bands. There is no range of source batches then: the whole difference counts, times
            `shift`.
        floor: Variance of noise that every image has. Detail is restored as far as it exceeds that
            noise; see `signal_share`.
        states: How many conditions of images are told apart at most, each with gains of its own;
            see `ttapca.spectral.conditions`.

    Attributes:
        last_batch: Components of the last batch, shape (batch, components).

    Raises:
        OptionError: An option makes no sense, or the filter has no energies.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> data = torch.randn(500, 3, generator=generator)
        >>> energies = torch.stack([data[:, 0].square(), data[:, 1:].square().mean(1)], 1)
        >>> ones = torch.ones(3)
        >>> gain = ClosedFormGain(SourceComponents(ones, ones, energies, lambda: ones))
        >>> bool((gain(3 * data[:50]) < 0.2).all())  # nine times the variance
        True
    """

    keeps_rest = True
    last_batch: Tensor | None = None
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
        memory: float = MEMORY,
        center: float = 1.0,
        window: int | None = None,
        floor: float = 0.0,
        states: int = 1,
    ) -> None:
        super().__init__()
        check_option("states", states, Whole(1))
        values = (shrink, restore, largest_ratio, threshold, memory, center, floor)
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
        self.conditions: ConditionStates | None = None
        if states > 1 and (describe := Appearances(source.energies, source.textures)).known:
            self.conditions = ConditionStates(describe, states)
            self._with_textures = source.textures is not None
        self.edges = band_edges(len(deviations))
        spread, averages = spreading_matrix(self.edges), averaging_matrix(self.edges)
        self.register_buffer("variances", deviations.square())
        self.register_buffer("spread", spread.to(deviations), persistent=False)
        self.register_buffer("averages", averages.to(deviations), persistent=False)
        self.register_buffer("reach", allowed_reach(source.class_reach, deviations))
        white = source.noise().to(deviations) / self.variances  # of noise of variance 1
        self.register_buffer("floor", floor * white if floor else None)
        self._white_noise = (white @ self.averages).to("cpu", torch.float64)  # (bands,)
        self.join(Stream(memory), "gain")

    def join(self, stream: Stream, name: str) -> None:
        """Keep what is seen in this stream, under names that begin with `name`."""
        self.stream = stream
        self._energies, self._samples = f"{name}/energies", f"{name}/samples"
        self._gains, self._certainty = f"{name}/gains", f"{name}/certainty"
        self._mean, self._offset = f"{name}/mean", f"{name}/offset"
        self._rest, self._rest_gain = f"{name}/rest", f"{name}/rest gain"
        self._unusual, self._leeway = f"{name}/unusual", f"{name}/leeway"
        ones = torch.ones_like(self.variances)
        by_condition = {self._energies: ones, self._samples: 0.0, self._gains: ones}
        by_condition[self._leeway] = torch.zeros(2, len(self.edges) - 1, dtype=torch.float64)
        if self.center:
            by_condition[self._mean] = torch.zeros_like(self.variances)
            by_condition[self._offset] = (0, torch.zeros_like(self.variances), None)
        if self.watches_rest:
            by_condition |= {self._rest: (1.0, None), self._rest_gain: 1.0}
        for value, start in by_condition.items():
            stream.declare(value, start, by_condition=True)
        stream.declare_certainty(self._certainty)
        stream.declare_unusual(self._unusual)
        if self.conditions is not None:
            self.conditions.join(stream)

    @property
    def closed_form(self) -> ClosedFormGain:
        """The gain itself."""
        return self

    @property
    def samples(self) -> float:
        """How many samples were seen, with older ones counting less."""
        return float(self.stream.now(self._samples))

    @property
    def shift(self) -> float:
        """How surely the data have shifted, from 0 (like the source) to 1."""
        return float(self.stream.now(self._certainty))

    def by_condition(
        self, run: Callable[..., Tensor], samples: Tensor, components: Tensor, *others: Tensor
    ) -> Tensor:
        """Tell the conditions of samples apart if this pass counts, and run; see `Gain`."""
        if len(samples) and not torch.compiler.is_exporting():
            self.last_batch = components.detach()
            if self.conditions is not None:
                self._tell_apart(self.conditions, samples, components)
        return self.stream.by_condition(run, samples, components, *others)

    @torch.no_grad()
    def _tell_apart(self, conditions: ConditionStates, samples: Tensor, components: Tensor) -> None:
        if not self.stream.counts("conditions/states"):
            return
        energies = components.square() @ (self.averages / self.variances[:, None])
        looks = conditions.describe(energies, textures(samples) if self._with_textures else None)
        # A broken batch is left out below, where its energies are added.
        if bool(torch.isfinite(looks).all()):
            states = conditions.route(looks)
            if self.stream.conditions > 1:
                self.stream.route(states)

    @torch.no_grad()
    def forward(
        self,
        components: Tensor | None = None,
        rest: Tensor | None = None,
        size: OtherSize | None = None,
    ) -> Tensor:
        """Add a batch to the stream if this pass counts, and return the gains; see `Gain`."""
        stream = self.stream
        if components is not None and len(components) and stream.counts(self._energies):
            energies = components.square().mean(0) / self.variances
            if math.isfinite(float(energies.sum())):  # energies are never negative
                self._add(energies, components, rest, size)
            else:
                stream.left_out = True
        gains: Tensor = stream.now(self._gains)
        return gains.to(self.variances)

    def _add(
        self, energies: Tensor, components: Tensor, rest: Tensor | None, size: OtherSize | None
    ) -> None:
        """Update the energies of the stream, how surely it has shifted, and the gains."""
        stream, count = self.stream, len(components)
        samples = stream.aged(stream.past(self._samples), count) + count
        new = count / samples
        seen = stream.past(self._energies).to(energies).lerp(energies, new)
        seen_rest = None if rest is None else self._add_rest(rest, new)
        independent = independent_images(samples, stream.skew)
        normal = self._normal(independent, self._add_leeway(size, new))
        log_energy = self._log_energy(seen, seen_rest)
        certainty = float(normal.certainty(log_energy))
        stream.write(self._energies, seen)
        stream.write(self._samples, samples)
        stream.write(self._certainty, certainty)
        stream.write(self._unusual, float(normal.unusual(log_energy)))
        if self.center:
            mean = stream.past(self._mean).to(components).lerp(components.mean(0), new)
            stream.write(self._mean, mean)
            seen, seen_rest = self._centre(mean, seen, seen_rest, certainty, (samples, independent))
            log_energy = self._log_energy(seen, seen_rest)
        excess = self._excess(normal, log_energy, seen, certainty, samples)
        given_back = stream.given_back
        restore = self.restore * (1 - (given_back.by(samples) if given_back else 0.0))
        exponents = {"shrink": self.shrink, "restore": restore}
        gains = two_sided_gain(-excess, **exponents, largest_ratio=self.largest_ratio)
        if self.floor is not None:
            share = signal_share(excess.exp(), self.floor)
            gains = torch.where(excess < 0, gains * share ** (1 - restore), gains)
        stream.write(self._gains, gains)
        if self.watches_rest:
            outside = -normal.excess(log_energy, self.threshold)[-1]
            gain = two_sided_gain(outside, **exponents, largest_ratio=self.largest_ratio)
            stream.write(self._rest_gain, float(gain))

    def _add_leeway(self, size: OtherSize | None, new: float) -> Tensor:
        """Return what resizing may have done to the energies of the stream, shape (2, bands)."""
        seen: Tensor = self.stream.past(self._leeway)
        now = torch.zeros_like(seen)
        if size is not None:
            now = self.by_band(size.leeway(self.variances).exp()).log().to(seen)
        seen = seen.lerp(now, new)
        self.stream.write(self._leeway, seen)
        return seen

    def _normal(self, images: float, leeway: Tensor) -> Normality:
        """Return how source batches of this many images are distributed, some of them resized."""
        # What lies outside the basis is the end of the spectrum, as the last band is.
        end = [leeway[:, -1:]] if self.watches_rest else []
        return self.normal.batches_of(images, torch.cat([leeway, *end], 1))

    def _add_rest(self, rest: Tensor, new: float) -> tuple[float, Tensor]:
        """Return the energy of what lies outside the basis and its mean, in the stream so far."""
        energy, mean = self.stream.past(self._rest)
        now = float(rest.square().sum(1).mean()) / (self.rest_energy or 1.0)
        start = torch.zeros_like(rest[0]) if mean is None else mean.to(rest)
        seen = (energy + (now - energy) * new, start.lerp(rest.mean(0), new))
        self.stream.write(self._rest, seen)
        return seen

    def _centre(
        self,
        mean: Tensor,
        energies: Tensor,
        rest: tuple[float, Tensor] | None,
        certainty: float,
        counts: tuple[float, float],
    ) -> tuple[Tensor, tuple[float, Tensor] | None]:
        """Settle what to subtract from samples, and return the energies around the rest of it."""
        weight = self.center * certainty
        square = mean.square() / self.variances
        share = weight * sure_share(square, energies, self.reach, *counts)
        outside = None
        if rest is not None and self.rest_energy is not None:
            energy, away = rest
            far = away.square().sum() / self.rest_energy
            # It depends on classes as much as the components next to it, at most.
            reach = self.reach[self.edges[-2] :].max()
            part = weight * sure_share(far, far.new_tensor(energy), reach, *counts)
            outside = part * away
            rest = (energy - float(part * (2 - part) * far), away)
            outside = outside if bool(part) else None
        moved = int(outside is not None or bool(share.any()))
        self.stream.write(self._offset, (moved, share * mean, outside))
        return energies - share * (2 - share) * square, rest

    def _excess(
        self,
        normal: Normality,
        log_energy: Tensor,
        seen: Tensor,
        certainty: float,
        samples: float,
    ) -> Tensor:
        """Return by how much the log energy of each component exceeds that of source batches."""
        if self.window is None:
            excess = normal.excess(log_energy, self.threshold)[: len(self.spread)]
            bands = log_energy[: len(self.spread)]
            excess = with_white_noise(excess, bands, self._white_noise, samples)
            return excess.to(self.spread) @ self.spread
        usual = normal.mean[: len(self.spread)].to(self.spread) @ self.spread
        return smoothed(seen.clamp(min=TINY).log() - usual, self.window) * certainty

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        """See `Gain`."""
        if not self.center:
            return None
        moved, inside, outside = self.stream.now(self._offset)
        # Where nothing has moved, what comes in may stay as it is, bit for bit.
        return (inside, outside) if moved else None

    def rest_gain(self) -> float | None:
        """See `Gain`."""
        return float(self.stream.now(self._rest_gain)) if self.watches_rest else None

    def band_energies(self) -> Tensor:
        """Return the energies seen, in float64 on the CPU, shape (bands,)."""
        return self.by_band(self.stream.now(self._energies))

    def log_energy(self) -> Tensor:
        """Return the logarithm of `band_energies`, shape (bands,).

        Where what lies outside the basis is watched, it is one more band, the last one.
        """
        rest = self.stream.now(self._rest) if self.watches_rest else None
        return self._log_energy(self.stream.now(self._energies), rest)

    def last_energies(self) -> tuple[Tensor, int] | None:
        """Return the energies of the last batch, shape (bands,), and its size; None without one."""
        if self.last_batch is None:
            return None
        energies = self.last_batch.square().mean(0) / self.variances
        return self.by_band(energies), len(self.last_batch)

    def evidence_in(self, values: Mapping[str, Any], skew: float = 0.0) -> Evidence | None:
        """Return what the values of a stream say about a shift; None before its first batch.

        Args:
            values: Of the stream that the gain has joined, or of another one of that kind.
            skew: How surely its images are of few classes, from 0 to 1.
        """
        # Where conditions are told apart, that of the one that has shifted most surely.
        condition = surest_condition(values, self._certainty)
        samples = float(values[self._samples + condition])
        if not samples:
            return None
        outside = float(values[self._rest + condition][0]) if self.watches_rest else 1.0
        energies = self.by_band(values[self._energies + condition])
        leeway = values[self._leeway + condition]
        return self.evidence(energies, samples, skew, outside, leeway)

    def evidence(
        self,
        energies: Tensor,
        samples: float,
        skew: float = 0.0,
        outside: float = 1.0,
        leeway: Tensor | None = None,
    ) -> Evidence:
        """Return what images say about a shift.

        Args:
            energies: Of bands, shape (bands,).
            samples: How many images they are of.
            skew: How surely these are of few classes, from 0 to 1.
            outside: Energy of what lies outside the basis, where that is watched.
            leeway: What resizing may have done to them, shape (2, bands); by default that of the
                stream that the gain has joined.
        """
        leeway = self.stream.now(self._leeway) if leeway is None else leeway
        normal = self._normal(independent_images(samples, skew), leeway)
        log_energy = self._with_outside(energies, outside).clamp(min=TINY).log()
        p_value = float(normal.p_value(normal.distance(log_energy)))
        by_band = normal.band_p_values(log_energy)[: len(energies)]
        return Evidence(samples, energies, p_value, by_band)

    def shift_in(self, values: Mapping[str, Any]) -> float:
        """Return `shift` for the values of a stream: the surest of its conditions."""
        return float(values[self._certainty + surest_condition(values, self._certainty)])

    def band_gains(self) -> Tensor:
        """Return the gains in the middle of every band, shape (bands,)."""
        gains: Tensor = self.stream.now(self._gains)
        return (gains.to(self.averages).log() @ self.averages).exp()

    def by_band(self, energies: Tensor) -> Tensor:
        """Return the energies of bands, given those of components, in float64 on the CPU."""
        return (energies.to(self.averages) @ self.averages).to("cpu", torch.float64)

    def _log_energy(self, energies: Tensor, rest: tuple[float, Tensor] | None = None) -> Tensor:
        bands = self._with_outside(self.by_band(energies), 1.0 if rest is None else rest[0])
        return bands.clamp(min=TINY).log()

    def _with_outside(self, bands: Tensor, outside: float) -> Tensor:
        """Return energies of bands, and of what lies outside the basis where that is watched."""
        return torch.cat([bands, bands.new_tensor([outside])]) if self.watches_rest else bands

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shrink={self.shrink}, restore={self.restore}, bands={len(self.edges) - 1}"


@register_gain("pulled", **WIENER)
class PulledGain(ClosedFormGain):
    """The closed form times a learned, bounded factor for each component.

    Factors start at 1, and `ttapca.methods.wiener` pulls them back there.

    Args:
        source: As for `ClosedFormGain`.
        limit: Factors stay between 1 / limit and limit.
        **options: Options of `ClosedFormGain`.
    """

    def __init__(
        self, source: SourceComponents, *, limit: float = MULTIPLIER_LIMIT, **options: Any
    ) -> None:
        super().__init__(source, **options)
        check_option("limit", limit, ABOVE_ONE)
        self.limit = limit
        self.log_multiplier = nn.Parameter(torch.zeros_like(self.variances))

    def forward(
        self,
        components: Tensor | None = None,
        rest: Tensor | None = None,
        size: OtherSize | None = None,
    ) -> Tensor:
        """Return the gains, shape (components,)."""
        gains = super().forward(components, rest, size)
        return gains * bounded_multiplier(self.log_multiplier, self.limit)
