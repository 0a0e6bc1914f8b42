"""Closed-form gains as exporters need them: the same operations whatever the numbers.

`TraceableGain` does what `ttapca.spectral.many_streams` does, by the same rule, but never looks at
a number to decide what to do. What is usual for source batches is in a table of all sizes, and
everything is float32, because many accelerators know nothing else. All streams of a batch have the
same number of samples, so that their samples need no numbers of streams beside them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ttapca.errors import ShapeError
from ttapca.spectral.calibration import Usual
from ttapca.spectral.closed_form import MEMORY
from ttapca.spectral.closed_form_rule import ClosedFormRule, Shown, Verdict
from ttapca.spectral.gains import SourceComponents
from ttapca.spectral.other_sizes import OtherSize


class TraceableGain(ClosedFormRule):
    """Gains for the samples of some streams, from what each stream has shown.

    Before a batch, `begin` says what the streams have shown so far, and how many samples of each
    come: first those of the first stream, then as many of the second, and so on. After it, `shown`
    is what the streams have shown by then, and `verdict_` what follows from it.

    Args:
        source: Deviations and energies of the source components.
        memory: Samples after which what was seen counts 1 / e.
        **options: Options of `ClosedFormRule`.

    Attributes:
        shown: What each stream has shown, with this batch; None before the first one.
        verdict_: What follows from `shown`.

    Example:
        >>> data = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> energies = torch.stack([data[:, 0].square(), data[:, 1:].square().mean(1)], 1)
        >>> ones, zeros = torch.ones(3), torch.zeros(2, 3)
        >>> gain = TraceableGain(SourceComponents(ones, ones, energies, lambda: ones))
        >>> gain.begin(Shown(torch.zeros(2), zeros, zeros), 50)
        >>> gains = gain(torch.cat([data[:50], 3 * data[50:100]]))  # the second has a shift
        >>> gains[0].tolist(), bool((gains[-1] < 0.3).all())
        ([1.0, 1.0, 1.0], True)
    """

    def __init__(
        self, source: SourceComponents, *, memory: float = MEMORY, **options: float
    ) -> None:
        super().__init__(source, **options)  # type: ignore[arg-type]
        self.memory = memory
        self._white_noise = self._white_noise.to(self.variances)
        self._rows, table = self.normal.usual_of_all(self.threshold)
        self._table = Usual(
            *(getattr(table, each.name).to(self.variances) for each in dataclasses.fields(table))
        )
        self.begin(None)

    def begin(self, shown: Shown | None, each: int = 0) -> None:
        """Say what streams have shown, and what the next batch holds.

        Args:
            shown: In float32, one row for each stream. Of a stream without samples, the rest may be
                any finite numbers, such as zeros. None for samples that are nobody's: they pass as
                they are.
            each: How many samples come of each stream.
        """
        self.shown = shown
        self.verdict_: Verdict | None = None
        self._each = each

    def forward(
        self,
        components: Tensor | None = None,
        rest: Tensor | None = None,
        size: OtherSize | None = None,
    ) -> Tensor:
        """Add the batch to its streams, and return the gains of each sample; see `Gain`.

        Raises:
            ShapeError: The samples have another size than those of the fit.
        """
        if components is None or self.shown is None:
            return self.variances.new_ones(1, len(self.variances))
        if size is not None:
            raise ShapeError(
                "A filter is exported for images of the size that it was fitted on; found samples "
                f"of shape {size.shape}. Fit a filter on images of this size."
            )
        if self.verdict_ is None:
            outside = None if rest is None else self._by_stream(rest)
            newer = self._show(self._by_stream(components), outside)
            self.shown = self.shown.joined(newer, self.memory)
            self.verdict_ = self.verdict(self.shown, self.shown.samples.clamp(min=1))
        return self._by_sample(self.verdict_.gains)

    def _show(self, components: Tensor, rest: Tensor | None) -> Shown:
        """Return what samples show of their streams, given as (streams, samples, numbers)."""
        counts = torch.ones_like(components[:, :, 0]).sum(1)
        energies = components.square().mean(1) / self.variances
        mean = components.mean(1) if self.center else None
        if rest is None or self.rest_energy is None:
            return Shown(counts, energies, mean)
        energy = rest.square().sum(2).mean(1) / self.rest_energy
        return Shown(counts, energies, mean, energy, rest.mean(1))

    def _by_stream(self, values: Tensor) -> Tensor:
        """Return the rows of each stream: (samples, n) to (streams, samples of each, n)."""
        return values.reshape(-1, self._each, values.shape[1])

    def _by_sample(self, values: Tensor) -> Tensor:
        """Return for each sample the row of its stream: (streams, n) to (samples, n)."""
        return values[:, None].expand(-1, self._each, -1).flatten(0, 1)

    def usual(self, independent: Tensor, leeway: Tensor | None = None) -> Usual:  # noqa: ARG002
        """Return what is usual for streams of so many images of the fitted size."""
        whole = independent.round().clamp(max=len(self._rows) - 1).long()
        return self._table.of_streams(self._rows.index_select(0, whole))

    def by_band(self, energies: Tensor) -> Tensor:
        """Return the energies of bands, given those of components, in the same precision."""
        return self.band_means(energies)

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        """Return what to subtract from each sample; see `Gain`."""
        found = self.verdict_
        if found is None or found.offset is None:
            return None
        outside = found.rest_offset
        return self._by_sample(found.offset), None if outside is None else self._by_sample(outside)

    def rest_gain(self) -> Tensor | None:
        """Return the gain of what lies outside the basis, for each sample; see `Gain`."""
        found = self.verdict_
        if found is None or found.rest_gain is None:
            return None
        return self._by_sample(found.rest_gain[:, None])
