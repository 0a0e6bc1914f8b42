"""Gains in closed form: nothing is learned, they follow from the spectrum of the test data.

`ClosedFormGain` compares the band energies of the batch, or of the stream so far, with those of
source batches of the same size, and scales every component by what `ttapca.spectral.bands` makes of
the difference. `PulledGain` multiplies that by a factor which gradient steps may learn.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import Number, Such, Whole, check_option
from ttapca.errors import OptionError
from ttapca.spectral.bands import (
    across_bands,
    band_edges,
    mean_shift,
    over_bands,
    signal_share,
    smoothed,
    two_sided_gain,
)
from ttapca.spectral.calibration import Normality, SourceSpectrum
from ttapca.spectral.gains import (
    ABOVE_ONE,
    MULTIPLIER_LIMIT,
    Gain,
    SourceComponents,
    bounded_multiplier,
    register_gain,
)
from ttapca.spectral.stream import Stream

# Chosen by scripts/tune_closed_form.py; so are the exponents that the names stand for.
LARGEST_RATIO = 64.0
THRESHOLD = 0.8  # share of source batches that are left exactly alone
MEMORY = 200.0  # samples
WIENER = {"shrink": 1.0, "restore": 0.6}
TINY = 1e-12  # no energy has no logarithm

AT_LEAST_ZERO = Number(0)
SHARE = Number(0, 1)
SHARE_BELOW_ONE = Number(0, below=1)
POSITIVE = Number(above=0)
ODD = Such(Whole(1), lambda value: value % 2 == 1, "an odd number of components")


@register_gain("wiener", **WIENER)
@register_gain("match", shrink=0.5, restore=0.5)
@register_gain("two-sided")
class ClosedFormGain(Gain):
    """Gains in closed form from the energies of the stream.

    A call with components takes their energies in, if this pass counts for the stream, and gives
    the gains for all that was seen; what was seen before counts less and less.

    Of each band's log energy, only what lies beyond the range of source batches of the same size
    counts. So a single image, whose energies vary much by nature, changes little unless it is far
    off, and clean batches change hardly at all.

    Args:
        source: Its deviations and energies are used.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less. Where normalisation layers give a lost scale back by
            themselves, only the rest of it is restored here.
        largest_ratio: The largest ratio of variances that is believed.
        threshold: Share of source batches whose gains are exactly 1; 0 trusts every batch.
        memory: After so many samples, what was seen counts 1 / e; a stream that the gain joins has
            its own.
        center: What part of a batch's sure distance from the source mean is taken away, 0 to 1;
            see `ttapca.spectral.bands.mean_shift`.
        window: Smooth the spectrum over this odd number of neighbouring components instead of over
            bands. A source batch has no range then; all of the difference counts, times `shift`.
        floor: Variance of noise that every image has. Detail is restored as far as it exceeds that
            noise; see `ttapca.spectral.bands.signal_share`.

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
    variances: Tensor
    spread: Tensor
    averages: Tensor
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
        center: float = 0.0,
        window: int | None = None,
        floor: float = 0.0,
    ) -> None:
        super().__init__()
        check_option("shrink", shrink, AT_LEAST_ZERO)
        check_option("restore", restore, AT_LEAST_ZERO)
        check_option("largest_ratio", largest_ratio, ABOVE_ONE)
        check_option("threshold", threshold, SHARE_BELOW_ONE)
        check_option("memory", memory, POSITIVE)
        check_option("center", center, SHARE)
        check_option("floor", floor, AT_LEAST_ZERO)
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
        self.normal = SourceSpectrum(source.energies)
        self.edges = band_edges(len(deviations))
        self.register_buffer("variances", deviations.square())
        self.register_buffer("spread", across_bands(self.edges).to(deviations), persistent=False)
        self.register_buffer("averages", over_bands(self.edges).to(deviations), persistent=False)
        noise = (floor * source.noise()).to(deviations) / self.variances if floor else None
        self.register_buffer("floor", noise)
        self.join(Stream(memory), "gain")

    def join(self, stream: Stream, name: str) -> None:
        """Keep what is seen in this stream, under names that begin with `name`."""
        self.stream = stream
        self._energies, self._samples = f"{name}/energies", f"{name}/samples"
        self._gains, self._certainty = f"{name}/gains", f"{name}/certainty"
        ones = torch.ones_like(self.variances)
        stream.declare(self._energies, ones)
        stream.declare(self._samples, 0.0)
        stream.declare(self._gains, ones)
        stream.declare_certainty(self._certainty)

    @property
    def closed_form(self) -> ClosedFormGain:
        """Itself."""
        return self

    @property
    def samples(self) -> float:
        """For how many samples what was seen counts."""
        return float(self.stream.now(self._samples))

    @property
    def shift(self) -> float:
        """How surely the data have shifted, from 0 (as the source) to 1."""
        return float(self.stream.now(self._certainty))

    @torch.no_grad()
    def forward(self, components: Tensor | None = None) -> Tensor:
        """Take a batch in if it counts, and give the gains; see `Gain`."""
        stream = self.stream
        if components is not None and len(components) and stream.counts(self._energies):
            energies = components.square().mean(0) / self.variances
            if math.isfinite(float(energies.sum())):  # none of them is below zero
                self._take_in(energies, len(components))
            else:
                stream.left_out = True
        gains: Tensor = stream.now(self._gains)
        return gains.to(self.variances)

    def _take_in(self, energies: Tensor, count: int) -> None:
        """Follow the stream: what was seen, how surely it has shifted, and the gains."""
        stream = self.stream
        samples = stream.aged(stream.past(self._samples), count) + count
        seen = stream.past(self._energies).to(energies).lerp(energies, count / samples)
        normal = self.normal.batches_of(samples)
        log_energy = self._log_energy(seen)
        certainty = float(normal.certainty(log_energy))
        stream.write(self._energies, seen)
        stream.write(self._samples, samples)
        stream.write(self._certainty, certainty)
        excess = self._excess(normal, log_energy, seen, certainty)
        given_back = stream.given_back
        restore = self.restore * (1 - (given_back.by(samples) if given_back else 0.0))
        gains = two_sided_gain(
            -excess, shrink=self.shrink, restore=restore, largest_ratio=self.largest_ratio
        )
        if self.floor is not None:
            share = signal_share(excess.exp(), self.floor)
            gains = torch.where(excess < 0, gains * share ** (1 - restore), gains)
        stream.write(self._gains, gains)

    def _excess(
        self, normal: Normality, log_energy: Tensor, seen: Tensor, certainty: float
    ) -> Tensor:
        """By how much the log energy of every component lies beyond that of source batches."""
        if self.window is None:
            return normal.excess(log_energy, self.threshold).to(self.spread) @ self.spread
        usual = normal.mean.to(self.spread) @ self.spread
        return smoothed(seen.clamp(min=TINY).log() - usual, self.window) * certainty

    @torch.no_grad()
    def offset(self, components: Tensor) -> Tensor | None:
        """What is to be subtracted from the components before they are scaled."""
        if not self.center or not len(components):
            return None
        return self.center * mean_shift(components, self.variances.sqrt())

    def band_energies(self) -> Tensor:
        """What was seen, in float64 on the CPU, shape (bands,)."""
        return self._by_band(self.stream.now(self._energies))

    def log_energy(self) -> Tensor:
        """Its logarithm, shape (bands,)."""
        return self._log_energy(self.stream.now(self._energies))

    def band_gains(self) -> Tensor:
        """The gains in the middle of every band, shape (bands,)."""
        gains: Tensor = self.stream.now(self._gains)
        return (gains.to(self.averages).log() @ self.averages).exp()

    def _by_band(self, energies: Tensor) -> Tensor:
        return (energies.to(self.averages) @ self.averages).to("cpu", torch.float64)

    def _log_energy(self, energies: Tensor) -> Tensor:
        return self._by_band(energies).clamp(min=TINY).log()

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"shrink={self.shrink}, restore={self.restore}, bands={len(self.edges) - 1}"


@register_gain("pulled", **WIENER)
class PulledGain(ClosedFormGain):
    """The closed form times a factor for each component, learned in log space and bounded.

    It starts at the closed form; `ttapca.methods.wiener` pulls it back there.

    Args:
        source: As for `ClosedFormGain`.
        limit: Factors stay between 1 / limit and limit.
        **options: Of `ClosedFormGain`.
    """

    def __init__(
        self, source: SourceComponents, *, limit: float = MULTIPLIER_LIMIT, **options: Any
    ) -> None:
        super().__init__(source, **options)
        check_option("limit", limit, ABOVE_ONE)
        self.limit = limit
        self.log_multiplier = nn.Parameter(torch.zeros_like(self.variances))

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,)."""
        return super().forward(components) * bounded_multiplier(self.log_multiplier, self.limit)
