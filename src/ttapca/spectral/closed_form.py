"""Gains in closed form: they follow from the spectrum of the test data, and nothing is learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import Number, Whole, check_option
from ttapca.errors import ShapeError
from ttapca.spectral.closed_form_rule import (
    LARGE,
    ClosedFormRule,
    Evidence,
    Scaling,
    independent_images,
)
from ttapca.spectral.conditions import ConditionStates, KnownConditions
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.gains import (
    ABOVE_ONE,
    MULTIPLIER_LIMIT,
    SourceComponents,
    bounded_multiplier,
    register_gain,
)
from ttapca.spectral.image_statistics import textures
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import Spectrum, StreamState

# The exponents that the name stands for: Wiener's filter, which also restores.
WIENER = {"shrink": 1.0, "restore": CONSTANTS.restore}


@register_gain("wiener", **WIENER)
@register_gain("match", shrink=0.5, restore=0.5)
@register_gain("two-sided")
class ClosedFormGain(ClosedFormRule):
    """Gains in closed form from the energies of streams, one of an adapter or many of a service.

    A call with components adds these to their streams, if this pass counts, and returns the gains
    for all samples so far. If normalisation layers restore a lost scale by themselves, only the
    rest of it is restored here. Up to `states` conditions are told apart; other options are
    `ClosedFormRule`'s.
    """

    def __init__(
        self,
        source: SourceComponents,
        *,
        memory: float = CONSTANTS.memory,
        states: int = 1,
        **options: Any,
    ) -> None:
        check_option("memory", memory, Number(above=0))
        check_option("states", states, Whole(1))
        super().__init__(source, **options)
        self.conditions = ConditionStates.of_source(
            source.energies, source.textures, states, self.constants
        )
        self._with_textures = source.textures is not None
        self._sample_size = source.sample_size
        self._batch: StreamBatch | None = None  # of the last call ...
        self._length = 0  # ... and how many samples it had
        self._loaded: tuple[StreamState, Scaling] | None = None
        self.join(Stream(memory))

    def join(self, stream: Stream) -> None:
        """Belong to this stream, or to all streams that take turns in it."""
        self.stream = stream
        self.number = stream.add_filter(self._empty_spectrum(), self._take)
        if self.conditions is not None:
            known = KnownConditions.none(self.conditions.describe.size)
            stream.declare_state(conditions=known)

    def _empty_spectrum(self) -> Spectrum:
        ones = self.variances.new_ones(1, len(self.variances))
        none = torch.zeros(1, dtype=torch.float64)
        mean = torch.zeros_like(ones) if self.center else None
        found = Spectrum(none, none, ones, none, none, self.leeway_of(None)[None], mean)
        if not self.watches_rest:
            return found
        rest = ones.new_zeros(1, self._sample_size)
        return replace(found, rest_energy=torch.ones_like(none), rest_mean=rest)

    @property
    def _is_frozen(self) -> bool:
        """Whether a program without a batch is exported: its gains do not change any more."""
        return torch.compiler.is_exporting() and self.stream.batch is None

    @property
    def closed_form(self) -> ClosedFormGain:
        """The gain itself."""
        return self

    def look_at(self, samples: Tensor, components: Tensor) -> None:
        """Tell the conditions of samples apart, before any of them is scaled; see `Gain`."""
        if self.conditions is None or torch.compiler.is_exporting() or not len(samples):
            return
        batch = self.stream.opened(len(samples))
        if not batch.wants_conditions:
            return
        with torch.no_grad():
            if components.shape[1] < LARGE:
                energies = components.square() @ (self.averages / self.variances[:, None])
            else:
                squares = (each.square().div_(self.variances) for each in components)
                energies = torch.stack([self.band_means(each) for each in squares])
            looks = textures(samples) if self._with_textures else None
            batch.tell_apart(self.conditions, self.conditions.describe(energies, looks))
        self._batch = batch  # as long as every pass counts, there is one for each call

    def forward(
        self,
        components: Tensor | None = None,
        rest: Tensor | None = None,
        size: OtherSize | None = None,
    ) -> Tensor:
        """Add a batch to its streams if this pass counts, and return the gains; see `Gain`."""
        if components is None or self._is_frozen or not components.shape[0]:
            return self._gains_now()
        if size is not None and torch.compiler.is_exporting():
            raise ShapeError(
                "A filter is exported for images of the size that it was fitted on; found samples "
                f"of shape {size.shape}. Fit a filter on images of this size."
            )
        batch, length = self._batch, components.shape[0]
        if batch is None or self.stream.batch is not None or self.number in batch.scalings:
            batch = self.stream.opened(length)
        self._batch, self._length = batch, length
        with torch.no_grad():
            if self.number not in batch.scalings:
                self._show(batch, components, rest, size)
            gains = self._of_each(batch.scalings[self.number].gains, 1.0)
        if self.stream.batch is None and batch.counts:
            [self.stream.state] = batch.finish()
        return gains.to(self.variances)

    def _gains_now(self) -> Tensor:
        """Return the gains of the latest condition of the stream, without any samples."""
        stream = self.stream
        if torch.compiler.is_exporting():
            found = self._last_scaling()
            gains = torch.ones_like(self.variances) if found is None else found.gains[0]
            return gains.to(self.variances)
        if stream.state is None or stream.state is stream.start:
            return torch.ones_like(self.variances)
        return self.gains_of(stream.state, stream.state.latest)

    def gains_of(self, state: StreamState, condition: int) -> Tensor:
        """Return the gains of one condition of a stream, shape (components,)."""
        table = state.spectra[self.number]
        if condition >= len(table):
            return torch.ones_like(self.variances)
        return self._scaling(table.row(condition)).gains[0].to(self.variances)

    def _scaling(self, seen: Spectrum) -> Scaling:
        """Return the scaling of groups; those without samples pass as they are."""
        given_back, restore = self.stream.given_back, None
        if given_back is not None:
            restore = self.restore * (1 - given_back.by(seen.samples))
        found = self.scaling(replace(seen, independent=seen.independent.clamp(min=1)), restore)
        if torch.compiler.is_exporting() or bool((seen.samples > 0).all()):
            return found
        some = seen.samples > 0
        masked = {}
        for name, each in found.tensors().items():
            chosen = some.to(each.device).reshape(-1, *[1] * (each.dim() - 1))
            masked[name] = each.where(chosen, 1.0 if name in ("gains", "rest_gain") else 0.0)
        return Scaling(**masked)

    def _show(
        self, batch: StreamBatch, components: Tensor, rest: Tensor | None, size: OtherSize | None
    ) -> None:
        """Add samples to their streams, and find the scaling."""
        before = batch.spectrum_before(self.number)
        newer = self._shown(batch, components, rest, size)
        # In a batch of several streams, each is looked at by itself when its logits are there.
        if batch.rows is None and not batch.traced:
            batch.left_out |= not bool(torch.isfinite(newer.energies.sum()))
        if batch.left_out or not batch.counts:
            batch.show(self.number, newer, before, self._scaling(before))
            return
        joined = before.joined(newer, batch.memory)
        if self.number == 0:
            batch.note_resemblance(lambda: self.like_one_image(joined))
        joined = batch.as_resembling(joined)
        found = self._scaling(joined)
        joined = replace(joined, shift=found.shift, unusual=found.unusual)
        batch.show(self.number, newer, joined, found)

    def _shown(
        self, batch: StreamBatch, components: Tensor, rest: Tensor | None, size: OtherSize | None
    ) -> Spectrum:
        """Return the spectra of samples by group."""
        counts = batch.counted_samples(components.shape[0])
        mean, square = _moments(batch, components, counts)
        none, leeway = torch.zeros_like(counts), self.leeway_of(size).to(counts)
        found = Spectrum(
            counts,
            batch.independent_samples(counts),
            square / self.variances,
            none,
            none,
            leeway.expand(counts.shape[0], -1, -1),
            mean if self.center else None,
        )
        if rest is None or self.rest_energy is None:
            return found
        lengths = rest.square().sum(1, keepdim=True).clamp(*self.rest_range)
        energy = (batch.group_means(lengths, counts)[:, 0] / self.rest_energy).to(counts)
        return replace(found, rest_energy=energy, rest_mean=batch.group_means(rest, counts))

    def _of_each(self, values: Tensor, passed: float) -> Tensor:
        """Return the row of the only group, or of each sample; `passed` for those that pass."""
        batch, length = self._batch, self._length
        if batch is None or self._is_frozen:
            return values[0]
        group_of = batch.group_of_each(length)
        filtered = None if batch.all_filtered else batch.chosen("filtered", length)
        if group_of is None and filtered is None:
            return values[0]
        if group_of is not None:
            values = values[group_of.to(values.device)]
        if filtered is None:
            return values
        return torch.where(filtered.to(values.device)[:, None], values, passed)

    def _last_scaling(self) -> Scaling | None:
        """Return the scaling of the last call; in a frozen program, that of the stream so far."""
        batch, stream = self._batch, self.stream
        found = None if batch is None else batch.scalings.get(self.number)
        if not self._is_frozen:
            return found
        # An exporter computes nothing but what depends on its input: this was computed before.
        if stream.state is None or stream.state is stream.start:
            return None
        if self._loaded is not None and self._loaded[0] is stream.state:
            return self._loaded[1]
        if batch is None or found is None:
            return None
        return found.row(batch.groups.index((0, stream.state.latest)))

    def _take(self, state: StreamState) -> None:
        """Compute the scaling of a stream that was put in place, for an exporter."""
        table = state.spectra[self.number]
        self._loaded = state, self._scaling(table.row(min(state.latest, len(table) - 1)))

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        """See `Gain`."""
        found = self._last_scaling()
        if found is None or found.offset is None:
            return None
        outside = found.rest_offset
        if not torch.compiler.is_exporting():
            # If no mean has moved, samples may stay as they are, bit for bit.
            outside = outside if outside is not None and bool(outside.any()) else None
            if outside is None and not bool(found.offset.any()):
                return None
        inside = self._of_each(found.offset, 0.0)
        return inside, None if outside is None else self._of_each(outside, 0.0)

    def rest_gain(self) -> Tensor | float | None:
        """See `Gain`."""
        if not self.watches_rest:
            return None
        found = self._last_scaling()
        if found is None or found.rest_gain is None:
            return 1.0
        return self._of_each(found.rest_gain.to(self.variances)[:, None], 1.0)

    def evidence_in(self, state: StreamState, skew: float = 0.0) -> Evidence | None:
        """Return the evidence of a stream's surest condition; None before its first batch."""
        seen = state.spectra[self.number].row(state.surest)
        samples = float(seen.samples)
        if not samples:
            return None
        outside = 1.0 if seen.rest_energy is None else float(seen.rest_energy)
        independent = min(
            float(seen.independent), independent_images(samples, skew, self.constants)
        )
        energies = self.by_band(seen.energies[0])
        return self.evidence(energies, samples, independent, outside, seen.leeway[0])

    def band_gains(self, state: StreamState) -> Tensor:
        """Return the gains in the middle of every band, shape (bands,); see `evidence_in`."""
        gains = self.gains_of(state, state.surest)
        return self.band_means(gains.to(self.averages).log()).exp()


def _moments(batch: StreamBatch, values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and mean squares of groups, (samples, n) to twice (groups, n)."""
    samples, size = values.shape
    if size < LARGE or samples == 1 or not batch.is_plain:
        return batch.group_means(values, counts), batch.group_means(values.square(), counts)
    # One large image after the other: squares of a whole batch would not fit in the cache.
    mean, square = torch.zeros_like(values[:1]), torch.zeros_like(values[:1])
    for each in values:
        mean += each
        square.addcmul_(each, each)
    return mean.div_(samples), square.div_(samples)


@register_gain("pulled", **WIENER)
class PulledGain(ClosedFormGain):
    """The closed form times learned factors between 1 / `limit` and `limit`, starting at 1."""

    def __init__(
        self, source: SourceComponents, *, limit: float = MULTIPLIER_LIMIT, **options: Any
    ) -> None:
        super().__init__(source, **options)
        check_option("limit", limit, ABOVE_ONE)
        self.limit = limit
        self.log_multiplier = nn.Parameter(torch.zeros_like(self.variances))

    def forward(self, *seen: Any, **named: Any) -> Tensor:
        """Return the gains; see `Gain`."""
        return super().forward(*seen, **named) * bounded_multiplier(self.log_multiplier, self.limit)
