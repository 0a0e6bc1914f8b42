"""Gains that follow the test data: modules that compute them in the forward pass.

`ClosedFormGain` compares the band energies of the batch, or of the stream so far, with those of
source batches of the same size, and scales every component by what `ttapca.spectral.bands` makes of
the difference. `PulledGain` multiplies that by a factor which gradient steps may learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypedDict

import torch
from torch import Tensor

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
from ttapca.spectral.gains import MULTIPLIER_LIMIT, Gain, bounded_multiplier

Listening = Literal["everything", "one batch", "nothing"]
ClosedFormName = Literal["wiener", "match", "two-sided", "pulled"]

# Chosen by scripts/tune_closed_form.py; so are the constants below.
# Exponents (shrink, restore) of `two_sided_gain`.
EXPONENTS: dict[str, tuple[float, float]] = {
    "wiener": (1.0, 0.6),
    "match": (0.5, 0.5),
    "two-sided": (1.0, 0.5),
    "pulled": (1.0, 0.6),
}
LIMIT = 64.0
THRESHOLD = 0.8  # share of source batches that are left exactly alone
MEMORY = 200.0  # images
TINY = 1e-12  # no energy has no logarithm


class ClosedFormOptions(TypedDict, total=False):
    """What a user may choose of `ClosedFormGain`, which explains them."""

    shrink: float
    restore: float
    limit: float
    threshold: float
    memory: float
    center: float
    window: int
    floor: float


class ClosedFormGain(Gain):
    """Gains in closed form from the energies of the stream.

    A call with components takes their energies in, and gives gains for all of it. (On a model, only
    the first pass of each batch of the adapter does: see `listens_to`.) What was seen before counts
    less and less; an episodic adapter resets the gain before each batch, so that nothing but the
    batch counts.

    Of each band's log energy, only what lies beyond the range of source batches of the same size
    counts. So a single image, whose energies vary much by nature, changes little unless it is far
    off, and clean batches change hardly at all.

    Args:
        deviations: Standard deviation of the components in the source data, shape (components,).
        energies: Of source samples, shape (samples, bands), see `ttapca.spectral.calibration`.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less.
        limit: The largest ratio of variances that is believed.
        threshold: Share of source batches whose gains are exactly 1; 0 trusts every batch.
        memory: After so many images, what was seen counts 1 / e.
        center: What part of a batch's sure distance from the source mean is taken away, 0 to 1;
            see `ttapca.spectral.bands.mean_shift`.
        window: Smooth the spectrum over this odd number of neighbouring components instead of over
            bands. A source batch has no range then; all of the difference counts, times `shift`.
        floor: Variance of noise that every image has, of each component, shape (components,), or
            of all; what is restored is restored as far as it exceeds that, see
            `ttapca.spectral.bands.signal_share`.

    Attributes:
        seen: Energies of the stream, shape (components,).
        count: Images behind them.
        current: The gains of the last call, shape (components,).
        shift: How surely the data have shifted, from 0 (as the source) to 1.
        left_out: Whether the last batch was not taken in because it was not finite.
        relief: Tells for a number of images what part of a lost scale something else gives back,
            as BatchNorm does with statistics of the batch; `restore` is taken times the rest.

    Raises:
        OptionError: When an option makes no sense.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> source = torch.randn(500, 3, generator=generator)
        >>> energies = torch.stack([source[:, 0].square(), source[:, 1:].square().mean(1)], 1)
        >>> gain = ClosedFormGain(torch.ones(3), energies)
        >>> bool((gain(3 * source[:50]) < 0.2).all())  # nine times the variance
        True
    """

    keeps_rest = True
    seen: Tensor
    count: Tensor
    current: Tensor
    spread: Tensor
    averages: Tensor
    certainty: Tensor
    floor: Tensor

    def __init__(
        self,
        deviations: Tensor,
        energies: Tensor,
        *,
        shrink: float = EXPONENTS["two-sided"][0],
        restore: float = EXPONENTS["two-sided"][1],
        limit: float = LIMIT,
        threshold: float = THRESHOLD,
        memory: float = MEMORY,
        center: float = 0.0,
        window: int | None = None,
        floor: Tensor | float = 0.0,
    ) -> None:
        super().__init__(deviations, normalise=False)
        if not 0.0 <= threshold < 1.0:
            raise OptionError(f"`threshold` is a share from 0 to below 1; found {threshold}.")
        for name, value in (("shrink", shrink), ("restore", restore)):
            if not 0.0 <= value < math.inf:
                raise OptionError(f"`{name}` is finite and not below 0; found {value}.")
        if not 1.0 < limit < math.inf:
            raise OptionError(f"`limit` is a finite number above 1; found {limit}.")
        if not 0.0 < memory < math.inf:
            raise OptionError(f"`memory` is a number of images above 0; found {memory}.")
        self.shrink, self.restore, self.limit = shrink, restore, limit
        if not 0.0 <= center <= 1.0:
            raise OptionError(f"`center` is between 0 and 1; found {center}.")
        self.threshold, self.memory, self.center = threshold, memory, center
        if window is not None:
            smoothed(deviations, window)  # refuses what is no window
        self.window = window
        floors = torch.as_tensor(floor).to(deviations).expand_as(deviations)
        if not bool((torch.isfinite(floors) & (floors >= 0)).all()):
            raise OptionError("`floor`, a variance, is finite and not below 0.")
        self.has_floor = bool((floors > 0).any())
        self.register_buffer("floor", floors / deviations.square())
        self.source = SourceSpectrum(energies)
        self.edges = band_edges(len(deviations))
        self.register_buffer("spread", across_bands(self.edges).to(deviations))
        averages = over_bands(self.edges).to(deviations)
        self.register_buffer("averages", averages, persistent=False)
        self.register_buffer("seen", torch.ones_like(self.spectrum))
        self.register_buffer("count", torch.zeros_like(self.seen[0]))
        self.register_buffer("current", torch.ones_like(self.spectrum))
        self.relief: Callable[[float], float] | None = None
        self.register_buffer("certainty", torch.zeros_like(self.count))
        self.listens_to("everything")
        self.shift = 0.0  # the same as a number: reading it must not wait for a device

    def listens_to(self, what: Listening) -> None:
        """Say which calls take their components in; the others leave the gains as they are.

        Args:
            what: `everything`, as at first; `one batch`, the next one; `nothing`.
        """
        self._listening: Listening = what
        self.left_out = False
        self._before: list[Tensor] = []

    @torch.no_grad()
    def forget_batch(self) -> None:
        """Be what it was before it heard the last `one batch`."""
        if self._before:
            for value, kept in zip(self.state(), self._before, strict=True):
                value.copy_(kept)
            self._before = []
            self.restored()

    def state(self) -> list[Tensor]:
        """What a stream changes."""
        return [self.seen, self.count, self.current, self.certainty]

    def restored(self) -> None:
        """Follow a change of the state from outside."""
        self.shift = float(self.certainty)

    @torch.no_grad()
    def forward(self, components: Tensor | None = None) -> Tensor:
        """Take a batch in, and give the gains; without a batch, those of the last one.

        Args:
            components: Shape (batch, components).

        Returns:
            Shape (components,).
        """
        # An exported program is frozen.
        deaf = self._listening == "nothing" or torch.compiler.is_exporting()
        if components is None or not len(components) or deaf:
            return self.current.clone()
        if self._listening == "one batch":
            self._listening = "nothing"
            self._before = [value.clone() for value in self.state()]
        self.left_out = not self._take_in(components)
        if not self.left_out:
            count = float(self.count)
            self._follow(self.source.batches_of(count), count)
        return self.current.clone()

    def _follow(self, normal: Normality, count: float) -> None:
        """Set the gains, and how surely the data have shifted, by what was seen."""
        log_energy = self.log_energy()
        self.certainty.fill_(float(normal.certainty(log_energy)))
        self.restored()
        if self.window is None:
            excess = normal.excess(log_energy, self.threshold).to(self.spread) @ self.spread
        else:
            usual = normal.mean.to(self.spread) @ self.spread
            excess = smoothed(self.seen.clamp(min=TINY).log() - usual, self.window) * self.shift
        relief = 0.0 if self.relief is None else self.relief(count)
        restore = self.restore * (1 - relief)
        gains = two_sided_gain(-excess, shrink=self.shrink, restore=restore, limit=self.limit)
        if self.has_floor:
            share = signal_share(excess.exp(), self.floor)
            gains = torch.where(excess < 0, gains * share ** (1 - restore), gains)
        self.current.copy_(gains)

    @torch.no_grad()
    def offset(self, components: Tensor) -> Tensor | None:
        """What is to be subtracted from the components before they are scaled."""
        if not self.center or not len(components):
            return None
        return self.center * mean_shift(components, self.spectrum)

    def band_energies(self) -> Tensor:
        """What was seen, in float64 on the CPU, shape (bands,)."""
        return (self.seen @ self.averages).to("cpu", torch.float64)

    def log_energy(self) -> Tensor:
        """Its logarithm, shape (bands,)."""
        return self.band_energies().clamp(min=TINY).log()

    def band_gains(self) -> Tensor:
        """The gains of the last call in the middle of every band, shape (bands,)."""
        return (self.current.log() @ self.averages).exp()

    def _take_in(self, components: Tensor) -> bool:
        """Count a batch in; a broken one must not spoil the stream, and is left out."""
        energies = components.square().mean(0) / self.spectrum.square()
        if not math.isfinite(float(energies.sum())):  # none of them is below zero
            return False
        before = float(self.count) * math.exp(-len(components) / self.memory)
        count = before + len(components)
        self.seen.lerp_(energies, len(components) / count)
        self.count.fill_(count)
        return True

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"shrink={self.shrink}, restore={self.restore}, bands={len(self.edges) - 1}"


class PulledGain(Gain):
    """The closed form times a factor for each component, learned in log space and bounded.

    It starts at the closed form; `ttapca.methods.closed_form` pulls it back there.

    Args:
        closed: The closed form.
        limit: Factors stay between 1 / limit and limit.
    """

    keeps_rest = True

    def __init__(self, closed: ClosedFormGain, *, limit: float = MULTIPLIER_LIMIT) -> None:
        super().__init__(closed.spectrum, normalise=False)
        if not 1.0 < limit < math.inf:
            raise OptionError(f"`limit` is a finite number above 1; found {limit}.")
        self.closed = closed
        self.limit = limit
        self.log_multiplier = self._start_at(0.0, "log_multiplier")

    def state(self) -> list[Tensor]:
        """What a stream changes."""
        return self.closed.state()

    def restored(self) -> None:
        """Follow a change of the state from outside."""
        self.closed.restored()

    def offset(self, components: Tensor) -> Tensor | None:
        """As that of the closed form."""
        return self.closed.offset(components)

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,)."""
        gains: Tensor = self.closed(components)
        return gains * bounded_multiplier(self.log_multiplier, self.limit)


def make_closed_gain(
    name: ClosedFormName, deviations: Tensor, energies: Tensor | None, **options: object
) -> Gain:
    """Build a closed-form gain by its name.

    Args:
        name: `wiener`, `match` or `two-sided`, which differ in their exponents, or `pulled`.
        deviations: Standard deviation of the components in the source data, shape (components,).
        energies: Of source samples, shape (samples, bands).
        **options: Of `ClosedFormGain`.

    Raises:
        OptionError: When the filter has no energies, or an option makes no sense.

    Example:
        >>> make_closed_gain("match", torch.ones(1), torch.rand(9, 1)).restore
        0.5
    """
    if energies is None:
        raise OptionError(
            "Closed-form gains need the band energies of source samples; this filter was saved "
            "without. Fit it again with `ttapca.fit`, which keeps them."
        )
    shrink, restore = EXPONENTS[name]
    given = {"shrink": shrink, "restore": restore} | options
    closed = ClosedFormGain(deviations, energies, **given)  # type: ignore[arg-type]
    return PulledGain(closed) if name == "pulled" else closed
