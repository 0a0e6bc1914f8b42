"""Gains in closed form: nothing is learned, they follow from the spectrum of the test data.

`ClosedFormGain` keeps what one stream has shown and applies the rule of
`ttapca.spectral.closed_form_rule` to it. `PulledGain` multiplies the result by a factor that
gradient steps may learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import Number, Whole, check_option
from ttapca.spectral.class_plan import SPECTRUM
from ttapca.spectral.closed_form_rule import (
    LARGE,
    ClosedFormRule,
    Evidence,
    Shown,
    independent_images,
)
from ttapca.spectral.conditions import ConditionStates
from ttapca.spectral.gains import (
    ABOVE_ONE,
    MULTIPLIER_LIMIT,
    SourceComponents,
    bounded_multiplier,
    register_gain,
)
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.stream import CONDITION_STATES, Stream, surest_condition
from ttapca.spectral.textures import textures

MEMORY = 200.0  # samples; chosen by scripts/tune_memory.py
# The exponents that the name stands for, chosen by scripts/tune_closed_form.py.
WIENER = {"shrink": 1.0, "restore": 0.6}


@register_gain("wiener", **WIENER)
@register_gain("match", shrink=0.5, restore=0.5)
@register_gain("two-sided")
class ClosedFormGain(ClosedFormRule):
    """Gains in closed form from the energies of a stream.

    A call with components adds their energies to the stream, if this pass counts, and returns the
    gains for all that was seen. Older samples count less and less.

    Where normalisation layers restore a lost scale by themselves, only the rest of it is restored
    here.

    Args:
        source: Deviations and energies of the source components.
        memory: Samples after which what was seen counts 1 / e. A stream that the gain joins has its
            own.
        states: How many conditions of images are told apart at most, each with gains of its own;
            see `ttapca.spectral.conditions`.
        **options: Options of `ClosedFormRule`.

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

    last_batch: Tensor | None = None

    def __init__(
        self, source: SourceComponents, *, memory: float = MEMORY, states: int = 1, **options: Any
    ) -> None:
        check_option("memory", memory, Number(above=0))
        check_option("states", states, Whole(1))
        super().__init__(source, **options)
        self.conditions = ConditionStates.of_source(source.energies, source.textures, states)
        self._with_textures = source.textures is not None
        self.join(Stream(memory), "gain")

    def join(self, stream: Stream, name: str) -> None:
        """Keep what is seen in this stream, under names that begin with `name`."""
        self.stream = stream
        self._energies, self._samples = f"{name}/energies", f"{name}/samples"
        self._independent = f"{name}/independent samples"
        self._gains, self._certainty = f"{name}/gains", f"{name}/certainty"
        self._mean, self._offset = f"{name}/mean", f"{name}/offset"
        self._rest, self._rest_gain = f"{name}/rest", f"{name}/rest gain"
        self._unusual, self._leeway = f"{name}/unusual", f"{name}/leeway"
        ones = torch.ones_like(self.variances)
        by_condition = {self._energies: ones, self._samples: 0.0, self._gains: ones}
        by_condition[self._independent] = 0.0
        by_condition[self._leeway] = self.no_leeway()
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

    @property
    def leeway(self) -> Tensor:
        """What resizing may have done to the images of the stream; see `leeway_of`."""
        leeway: Tensor = self.stream.now(self._leeway)
        return leeway

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
        if not self.stream.counts(CONDITION_STATES):
            return
        energies = self._energies_of_each(components)
        looks = conditions.describe(energies, textures(samples) if self._with_textures else None)
        # A broken batch is left out below, where its energies are added.
        if bool(torch.isfinite(looks).all()):
            states = conditions.route(looks)
            if self.stream.conditions > 1:
                self.stream.route(states)

    def _energies_of_each(self, components: Tensor) -> Tensor:
        """Return the band energies of each sample, (batch, components) to (batch, bands)."""
        if components.shape[1] < LARGE:
            return components.square() @ (self.averages / self.variances[:, None])
        found = [self.band_means(each.square().div_(self.variances)) for each in components]
        return torch.stack(found)

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
            mean, square = _moments(components)
            energies = square / self.variances
            if math.isfinite(float(energies.sum())):  # energies are never negative
                self._add(energies, mean, len(components), rest, size)
            else:
                stream.left_out = True
        gains: Tensor = stream.now(self._gains)
        return gains.to(self.variances)

    def _add(
        self,
        energies: Tensor,
        mean: Tensor,
        count: int,
        rest: Tensor | None,
        size: OtherSize | None,
    ) -> None:
        """Update the energies of the stream, how surely it has shifted, and the gains."""
        stream = self.stream
        newer = self._newly_shown(energies, mean, count, rest)
        shown = self._shown_before(newer).joined(newer, stream.memory)
        samples = float(shown.samples)
        independent = self._independent_after(count)
        given_back = stream.given_back
        restore = self.restore * (1 - (given_back.by(samples) if given_back else 0.0))
        leeway = self.leeway_of(size)
        leeway = stream.past(self._leeway).to(leeway).lerp(leeway, count / samples)
        found = self.verdict(shown, shown.samples.new_tensor([independent]), restore, leeway)
        stream.write(self._energies, shown.energies[0])
        stream.write(self._samples, samples)
        stream.write(self._independent, independent)
        stream.write(self._leeway, leeway)
        stream.write(self._certainty, float(found.certainty))
        stream.write(self._unusual, float(found.unusual))
        stream.write(self._gains, found.gains[0])
        if shown.mean is not None:
            stream.write(self._mean, shown.mean[0])
        if shown.rest_energy is not None and shown.rest_mean is not None:
            stream.write(self._rest, (float(shown.rest_energy), shown.rest_mean[0]))
        if found.offset is not None:
            outside = found.rest_offset
            if outside is not None:
                outside = outside[0] if bool(outside.any()) else None
            moved = int(outside is not None or bool(found.offset.abs().max()))
            stream.write(self._offset, (moved, found.offset[0], outside))
        if found.rest_gain is not None:
            stream.write(self._rest_gain, float(found.rest_gain))

    def _newly_shown(
        self, energies: Tensor, mean: Tensor, samples: int, rest: Tensor | None
    ) -> Shown:
        """Return what a batch shows, given with energies and mean of its components."""
        count = torch.tensor([samples], dtype=torch.float64)
        wanted = mean[None] if self.center else None
        if rest is None:
            return Shown(count, energies[None], wanted)
        energy = float(rest.square().sum(1).mean()) / (self.rest_energy or 1.0)
        return Shown(
            count, energies[None], wanted, count.new_tensor([energy]), rest.mean(0, keepdim=True)
        )

    def _shown_before(self, like: Shown) -> Shown:
        """Return what the stream has shown before this batch, as far as the batch shows it."""
        past = self.stream.past
        samples = torch.tensor([past(self._samples)], dtype=torch.float64)
        mean = past(self._mean)[None] if self.center else None
        if like.rest_mean is None:
            return Shown(samples, past(self._energies)[None], mean)
        energy, away = past(self._rest)
        away = torch.zeros_like(like.rest_mean) if away is None else away[None]
        return Shown(samples, past(self._energies)[None], mean, samples.new_tensor([energy]), away)

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
        energies = self.stream.now(self._energies)
        rest = self.stream.now(self._rest)[0] if self.watches_rest else 1.0
        return self.log_energies(energies, torch.tensor(rest, dtype=torch.float64))

    def settle(self) -> None:
        """Count the independent samples of the batch again: by now more is known of its classes."""
        stream = self.stream
        for number, rows in stream.groups:
            size = stream.samples - stream.past("samples") if rows is None else len(rows)
            with stream.in_condition(number):
                if stream.now(self._samples) != stream.past(self._samples):
                    stream.write(self._independent, self._independent_after(size))

    def _independent_after(self, count: int) -> float:
        """Return how many independent samples there are after so many of this batch."""
        stream, plan = self.stream, self.stream.plan
        new = float(count)
        if plan is not None:
            new = plan.images(SPECTRUM, stream.rows(count), stream.condition, count)
        return stream.aged(stream.past(self._independent), count) + new

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
            skew: How surely its images are of few classes, from 0 to 1, if that was not known when
                they came.
        """
        # Where conditions are told apart, that of the one that has shifted most surely.
        condition = surest_condition(values, self._certainty)
        samples = float(values[self._samples + condition])
        if not samples:
            return None
        outside = float(values[self._rest + condition][0]) if self.watches_rest else 1.0
        energies = self.by_band(values[self._energies + condition])
        leeway = values[self._leeway + condition]
        independent = float(values[self._independent + condition])
        independent = min(independent, independent_images(samples, skew))
        return self.evidence(energies, samples, independent, outside, leeway)

    def shift_in(self, values: Mapping[str, Any]) -> float:
        """Return `shift` for the values of a stream: the surest of its conditions."""
        return float(values[self._certainty + surest_condition(values, self._certainty)])

    def band_gains(self) -> Tensor:
        """Return the gains in the middle of every band, shape (bands,).

        Where conditions are told apart, those of the one that has shifted most surely, as
        `evidence_in` and `shift_in` say.
        """
        values = self.stream.values
        return self.gains_by_band(values[self._gains + surest_condition(values, self._certainty)])


def _moments(components: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of components and of their squares, (batch, n) to (n,) and (n,)."""
    samples, size = components.shape
    if samples == 1:
        return components[0], components[0].square()
    if size < LARGE:
        return components.mean(0), components.square().mean(0)
    # One large image after the other: squares of a whole batch would not fit in the cache.
    mean, square = torch.zeros_like(components[0]), torch.zeros_like(components[0])
    for each in components:
        mean += each
        square.addcmul_(each, each)
    return mean.div_(samples), square.div_(samples)


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
