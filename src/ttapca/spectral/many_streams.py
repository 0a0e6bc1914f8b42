"""Closed-form gains of many streams in one batch: each sample has the gains of its own stream.

A service gathers images of many cameras into one forward pass. `ManyStreamsGain` does for all of
their streams at once what `ttapca.spectral.closed_form` does for one, by the same rule. Where the
images of a stream have several conditions (`ttapca.spectral.conditions`), each has its own gains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ttapca._checks import Number, Whole, check_option
from ttapca.spectral.closed_form import MEMORY
from ttapca.spectral.closed_form_rule import ClosedFormRule, Shown, Verdict
from ttapca.spectral.conditions import ConditionStates, KnownConditions
from ttapca.spectral.gains import SourceComponents
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.textures import textures


@dataclass(frozen=True, eq=False)
class Seen:
    """What was seen of one stream.

    Attributes:
        shown: What its samples of each condition have shown, with one row each; at least one.
        conditions: What is known of these; None where nobody tells them apart.
        latest: Condition of the last sample.
    """

    shown: tuple[Shown, ...]
    conditions: KnownConditions | None = None
    latest: int = 0


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


@dataclass(frozen=True, eq=False)
class StreamOutcome:
    """What a batch made of one stream.

    Attributes:
        seen: What was seen of it by then.
        changed: Whether any sample of it that is filtered has other gains than 1.
        shift: How surely the condition of its last sample is a shift, from 0 to 1.
        energies: Of its counted samples in this batch, shape (bands,).
    """

    seen: Seen
    changed: bool
    shift: float
    energies: Tensor


class ManyStreamsGain(ClosedFormRule):
    """Gains for each sample of a batch, from what its stream has shown.

    Before a batch, `begin` says what was seen of the streams so far and whose samples come. After
    it, `outcomes` tells what was seen by then, and what follows from it. Nothing is written into
    what was given: a batch that fails leaves no mark.

    Args:
        source: Deviations and energies of the source components.
        memory: Samples after which what was seen counts 1 / e.
        states: How many conditions of a stream are told apart at most.
        **options: Options of `ClosedFormRule`.

    Example:
        >>> data = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> energies = torch.stack([data[:, 0].square(), data[:, 1:].square().mean(1)], 1)
        >>> ones, true = torch.ones(3), torch.ones(100, dtype=torch.bool)
        >>> gain = ManyStreamsGain(SourceComponents(ones, ones, energies, lambda: ones))
        >>> streams = torch.arange(2).repeat_interleave(50)
        >>> gain.begin([gain.nothing_seen(), gain.nothing_seen()], Rows(streams, true, true))
        >>> gains = gain(torch.cat([data[:50], 3 * data[50:100]]))  # the second has a shift
        >>> gains[0].tolist(), bool((gains[-1] < 0.3).all())
        ([1.0, 1.0, 1.0], True)
    """

    def __init__(
        self, source: SourceComponents, *, memory: float = MEMORY, states: int = 1, **options: float
    ) -> None:
        check_option("memory", memory, Number(above=0))
        check_option("states", states, Whole(1))
        super().__init__(source, **options)  # type: ignore[arg-type]
        self.memory = memory
        self.conditions = ConditionStates.of_source(source.energies, source.textures, states)
        self._with_textures = source.textures is not None
        self._leeway = self.no_leeway()
        self.begin([], None)

    @property
    def leeway(self) -> Tensor:
        """That of the last batch: all streams are to have images of one size."""
        return self._leeway

    def nothing_seen(self, sample_size: int = 0) -> Seen:
        """Return what was seen of a new stream.

        Args:
            sample_size: Numbers in a sample, where what lies outside the basis is watched.
        """
        ones = self.variances.new_ones(1, len(self.variances))
        mean = torch.zeros_like(ones) if self.center else None
        shown = Shown(torch.zeros(1, dtype=torch.float64), ones, mean)
        if self.watches_rest:
            rest = ones.new_zeros(1, sample_size)
            shown = Shown(shown.samples, ones, mean, torch.ones_like(shown.samples), rest)
        if self.conditions is None:
            return Seen((shown,))
        return Seen((shown,), KnownConditions.none(self.conditions.describe.size))

    def begin(self, seen: Sequence[Seen], rows: Rows | None) -> None:
        """Say what was seen of streams, and whose samples the next batch holds.

        Args:
            seen: Of each stream.
            rows: None for samples that are nobody's: they pass as they are.
        """
        self._before, self._rows = list(seen), rows
        # Groups of samples that share gains: a stream, and one of its conditions.
        self._groups = [(number, each.latest) for number, each in enumerate(self._before)]
        self._group_of = None if rows is None else rows.stream
        self._conditions = [each.conditions for each in self._before]
        self._latest = [each.latest for each in self._before]
        self._verdict: Verdict | None = None

    def by_condition(
        self, run: Callable[..., Tensor], samples: Tensor, components: Tensor, *others: Tensor
    ) -> Tensor:
        """Tell the conditions of samples apart in the first pass, and run; see `Gain`."""
        if self._rows is not None and self._verdict is None and self.conditions is not None:
            self._tell_apart(self.conditions, self._rows, samples, components)
        return run(samples, components, *others)

    @torch.no_grad()
    def _tell_apart(
        self, conditions: ConditionStates, rows: Rows, samples: Tensor, components: Tensor
    ) -> None:
        """Find the condition of each sample that counts; others go with their stream's last."""
        energies = self.by_band(components.square() / self.variances)
        looks = conditions.describe(energies, textures(samples) if self._with_textures else None)
        sound = torch.isfinite(looks).all(1)  # a broken sample is found when its logits are
        appearances, counted = looks.numpy(), (rows.counted.cpu() & sound).numpy()
        streams = rows.stream.cpu().numpy()
        groups: dict[tuple[int, int], int] = {}
        group_of = np.zeros_like(streams)
        for number, seen in enumerate(self._before):
            own = np.flatnonzero(streams == number)
            counts, known = counted[own], seen.conditions
            states = np.full_like(own, seen.latest)
            if known is not None and counts.any():
                some = appearances[own[counts]]
                self._conditions[number], found = conditions.told_apart(known, some)
                states[:] = found[-1]
                states[counts] = found
            for row, state in zip(own, states.tolist(), strict=True):
                group_of[row] = groups.setdefault((number, state), len(groups))
            self._latest[number] = int(states[-1])
        self._groups = list(groups)
        self._group_of = torch.from_numpy(group_of).to(rows.stream.device)

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
        rows, group_of = self._rows, self._group_of
        if components is None or rows is None or group_of is None:
            return self.variances.new_ones(1, len(self.variances))
        if self._verdict is None:
            before = Shown.of_each([self._shown_before(*group) for group in self._groups])
            self._newer = self._show(components, rest, rows, group_of)
            self._shown = before.joined(self._newer, self.memory)
            self._leeway = self.leeway_of(size)
            counts = self._shown.samples.clamp(min=1)
            self._verdict = self.verdict(self._shown, counts, leeway=self.leeway)
        return torch.where(rows.filtered[:, None], self._verdict.gains[group_of], 1.0)

    def _shown_before(self, stream: int, state: int) -> Shown:
        shown = self._before[stream].shown
        if state < len(shown):
            return shown[state]
        outside = shown[0].rest_mean
        return self.nothing_seen(0 if outside is None else outside.shape[1]).shown[0]

    def _show(self, components: Tensor, rest: Tensor | None, rows: Rows, group_of: Tensor) -> Shown:
        """Return what the counted samples of this batch show of their groups."""
        weights = rows.counted.to(components)
        groups = len(self._groups)
        counts = weights.new_zeros(groups).index_add(0, group_of, weights)
        least = counts.clamp(min=1)[:, None]

        def mean(values: Tensor) -> Tensor:
            sums = values.new_zeros(groups, values.shape[1])
            return sums.index_add(0, group_of, values * weights[:, None]) / least

        energies = mean(components.square()) / self.variances
        means = mean(components) if self.center else None
        if rest is None or self.rest_energy is None:
            return Shown(counts.double(), energies, means)
        energy = mean(rest.square().sum(1, keepdim=True))[:, 0].double() / self.rest_energy
        return Shown(counts.double(), energies, means, energy, mean(rest))

    def outcomes(self) -> list[StreamOutcome]:
        """Return what the batch made of each stream; nothing where no batch has come."""
        verdict = self._verdict
        if verdict is None:
            return []
        changes = (verdict.gains != 1).any(1)
        if verdict.offset is not None:
            changes |= (verdict.offset != 0).any(1)
        changed, certainty = changes.tolist(), verdict.certainty.tolist()
        energies, counts = self.by_band(self._newer.energies), self._newer.samples.cpu()
        groups: list[list[int]] = [[] for _ in self._before]
        for place, (number, _) in enumerate(self._groups):
            groups[number].append(place)
        found = []
        for number, own in enumerate(groups):
            states = {self._groups[place][1]: place for place in own}
            weights = counts[own] / counts[own].sum().clamp(min=1)
            found.append(
                StreamOutcome(
                    Seen(
                        self._shown_after(number, states),
                        self._conditions[number],
                        self._latest[number],
                    ),
                    changed=any(changed[place] for place in own),
                    shift=certainty[states[self._latest[number]]],
                    energies=weights @ energies[own],
                )
            )
        return found

    def _shown_after(self, number: int, states: Mapping[int, int]) -> tuple[Shown, ...]:
        """Return what a stream has shown, given where those of its states are that have changed."""
        return tuple(
            self._shown.of_stream(states[state])
            if state in states
            else self._shown_before(number, state)
            for state in range(max(len(self._before[number].shown), max(states) + 1))
        )

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        """Return what to subtract from each sample; see `Gain`."""
        rows, group_of, found = self._rows, self._group_of, self._verdict
        if rows is None or group_of is None or found is None or found.offset is None:
            return None
        outside = found.rest_offset
        if not bool(found.offset.any()) and (outside is None or not bool(outside.any())):
            return None
        chosen = rows.filtered[:, None]
        inside = torch.where(chosen, found.offset[group_of], 0.0)
        return inside, None if outside is None else torch.where(chosen, outside[group_of], 0.0)

    def rest_gain(self) -> Tensor | None:
        """Return the gain of what lies outside the basis, for each sample; see `Gain`."""
        rows, group_of, found = self._rows, self._group_of, self._verdict
        if rows is None or group_of is None or found is None or found.rest_gain is None:
            return None
        gains = torch.where(rows.filtered, found.rest_gain[group_of].to(self.variances), 1.0)
        return gains[:, None]
