"""Closed-form gains of many streams in one batch: each sample has the gains of its own stream.

A service gathers images of many cameras into one forward pass. `ManyStreamsGain` does for all of
their streams at once what `ttapca.spectral.closed_form` does for one, by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca._checks import Number, check_option
from ttapca.spectral.closed_form import MEMORY
from ttapca.spectral.closed_form_rule import ClosedFormRule, Shown, Verdict
from ttapca.spectral.gains import SourceComponents
from ttapca.spectral.other_sizes import OtherSize


@dataclass(frozen=True, eq=False)
class Rows:
    """Whose samples a batch holds.

    Attributes:
        stream: Number of the stream of each sample, shape (samples,).
        counted: Whether the stream is to remember the sample, shape (samples,).
        filtered: Whether the sample is to be filtered; others pass bit for bit, shape (samples,).
    """

    stream: Tensor
    counted: Tensor
    filtered: Tensor


class ManyStreamsGain(ClosedFormRule):
    """Gains for each sample of a batch, from what its stream has shown.

    Before a batch, `begin` says what the streams have shown so far and whose samples come. After
    it, `shown` is what they have shown by then, and `verdict_` what follows from it. Nothing is
    written into what was given: a batch that fails leaves no mark.

    Args:
        source: Deviations and energies of the source components.
        memory: Samples after which what was seen counts 1 / e.
        **options: Options of `ClosedFormRule`.

    Attributes:
        shown: What each stream has shown, with this batch.
        newly_shown: What the batch alone shows of each.
        verdict_: What follows from `shown`.

    Example:
        >>> data = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> energies = torch.stack([data[:, 0].square(), data[:, 1:].square().mean(1)], 1)
        >>> ones, true = torch.ones(3), torch.ones(100, dtype=torch.bool)
        >>> gain = ManyStreamsGain(SourceComponents(ones, ones, energies, lambda: ones))
        >>> streams = torch.arange(2).repeat_interleave(50)
        >>> gain.begin(gain.nothing_shown(2), Rows(streams, true, true))
        >>> gains = gain(torch.cat([data[:50], 3 * data[50:100]]))  # the second has a shift
        >>> gains[0].tolist(), bool((gains[-1] < 0.3).all())
        ([1.0, 1.0, 1.0], True)
    """

    def __init__(
        self, source: SourceComponents, *, memory: float = MEMORY, **options: float
    ) -> None:
        check_option("memory", memory, Number(above=0))
        super().__init__(source, **options)  # type: ignore[arg-type]
        self.memory = memory
        self._leeway = self.no_leeway()
        self.begin(self.nothing_shown(0), None)

    @property
    def leeway(self) -> Tensor:
        """That of the last batch: all streams are to have images of one size."""
        return self._leeway

    def nothing_shown(self, streams: int, sample_size: int = 0) -> Shown:
        """Return what new streams have shown.

        Args:
            streams: How many.
            sample_size: Numbers in a sample, where what lies outside the basis is watched.
        """
        like = self.variances
        ones = like.new_ones(streams, len(like))
        mean = torch.zeros_like(ones) if self.center else None
        samples = torch.zeros(streams, dtype=torch.float64)
        if not self.watches_rest:
            return Shown(samples, ones, mean)
        rest = like.new_zeros(streams, sample_size)
        return Shown(samples, ones, mean, torch.ones_like(samples), rest)

    def begin(self, shown: Shown, rows: Rows | None) -> None:
        """Say what streams have shown, and whose samples the next batch holds.

        Args:
            shown: One row for each stream.
            rows: None for samples that are nobody's: they pass as they are.
        """
        self.shown = shown
        self.newly_shown: Shown | None = None
        self.verdict_: Verdict | None = None
        self._rows = rows

    @torch.no_grad()
    def forward(
        self,
        components: Tensor | None = None,
        rest: Tensor | None = None,
        size: OtherSize | None = None,
    ) -> Tensor:
        """Add the batch to its streams, and return the gains of each sample.

        Shape (samples, components); see `Gain`.
        """
        rows = self._rows
        if components is None or rows is None:
            return self.variances.new_ones(1, len(self.variances))
        if self.verdict_ is None:
            self.newly_shown = self._show(components, rest, rows)
            self.shown = self.shown.joined(self.newly_shown, self.memory)
            self._leeway = self.leeway_of(size)
            counts = self.shown.samples.clamp(min=1)
            self.verdict_ = self.verdict(self.shown, counts, leeway=self.leeway)
        return torch.where(rows.filtered[:, None], self.verdict_.gains[rows.stream], 1.0)

    def _show(self, components: Tensor, rest: Tensor | None, rows: Rows) -> Shown:
        """Return what the counted samples of this batch show of their streams."""
        weights = rows.counted.to(components)
        streams = len(self.shown.samples)
        counts = weights.new_zeros(streams).index_add(0, rows.stream, weights)
        least = counts.clamp(min=1)[:, None]

        def mean(values: Tensor) -> Tensor:
            sums = values.new_zeros(streams, values.shape[1])
            return sums.index_add(0, rows.stream, values * weights[:, None]) / least

        energies = mean(components.square()) / self.variances
        means = mean(components) if self.center else None
        if rest is None or self.rest_energy is None:
            return Shown(counts.double(), energies, means)
        energy = mean(rest.square().sum(1, keepdim=True))[:, 0].double() / self.rest_energy
        return Shown(counts.double(), energies, means, energy, mean(rest))

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        """Return what to subtract from each sample; see `Gain`."""
        rows, found = self._rows, self.verdict_
        if rows is None or found is None or found.offset is None:
            return None
        outside = found.rest_offset
        if not bool(found.offset.any()) and (outside is None or not bool(outside.any())):
            return None
        chosen = rows.filtered[:, None]
        inside = torch.where(chosen, found.offset[rows.stream], 0.0)
        return inside, None if outside is None else torch.where(chosen, outside[rows.stream], 0.0)

    def rest_gain(self) -> Tensor | None:
        """Return the gain of what lies outside the basis, for each sample; see `Gain`."""
        rows, found = self._rows, self.verdict_
        if rows is None or found is None or found.rest_gain is None:
            return None
        gains = torch.where(rows.filtered, found.rest_gain[rows.stream].to(self.variances), 1.0)
        return gains[:, None]
