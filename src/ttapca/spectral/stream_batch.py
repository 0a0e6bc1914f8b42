"""`StreamBatch`: the state that parts of a model share while a batch goes through it.

Filters, normalisation layers and repairs of images read here the moments that their streams had
before, and leave those of this batch. `finish` makes the new states; the old ones are never written
into, and a batch that fails is simply dropped. Images of one stream that have one condition, and
share gains and statistics, are a *group*: most batches have a single one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ttapca.errors import LayerOutputError
from ttapca.spectral.chain import ChainState, design_effect
from ttapca.spectral.conditions import ConditionStates
from ttapca.spectral.source_classes import ClassPlan, StreamPositions
from ttapca.spectral.stream_state import AlarmState, LayerMoments, Spectrum, StreamState, is_finite

if TYPE_CHECKING:
    from ttapca.spectral.closed_form_rule import Scaling

# Makes the moments of layers after a batch, a row for each group, with the groups that have any.
SettleLayers = Callable[["StreamBatch"], tuple[LayerMoments, Sequence[bool]] | None]


@dataclass(frozen=True, eq=False)
class ImageRows:
    """The stream of each image of a batch, and the use that is made of it; shape (images,)."""

    stream: Tensor  # number of the stream
    counted: Tensor  # whether the stream is to remember the image
    filtered: Tensor  # whether the image is adapted to; others pass bit for bit


class StreamBatch:
    """A batch of images on its way through a model; `rows` tells the streams of its images."""

    # Whether all streams are rows of tables, for an exporter; see
    # `ttapca.serving.onnx_export`.
    traced = False

    def __init__(
        self,
        states: Sequence[StreamState],
        empty: StreamState,
        *,
        memory: float = math.inf,
        size: int | None = None,
        rows: ImageRows | None = None,
        counts: bool = True,
        plan: ClassPlan | None = None,
    ) -> None:
        self.states, self.empty, self.memory = list(states), empty, memory
        # `size` is None until it is known, `rows` if all are of one stream, counted and filtered.
        self.size, self.rows, self.counts, self.plan = size, rows, counts, plan
        # Stream and condition of each group, and the group of each image; None if there is one.
        self.groups = [(number, state.latest) for number, state in enumerate(self.states)]
        self.group_of = None if rows is None else rows.stream
        self.looking = False  # whether a pass leaves no mark
        self.left_out = False  # whether the batch holds NaN or infinity
        self.version = 0  # grows whenever groups or shifts change
        # By number of a filter, with a row for each group: the spectrum of this batch, that of the
        # streams including it, and the scaling by the latter.
        self.newer: dict[int, Spectrum] = {}
        self.spectra: dict[int, Spectrum] = {}
        self.scalings: dict[int, Scaling] = {}
        # By number of a normalisation layer: mean, from that of the source, and variance, in a row
        # for each group, and whether it has feature maps.
        self.layers: dict[int, tuple[Tensor, Tensor, bool]] = {}
        # By path of a layer that tells classes apart, the channel means of each image.
        self.watched: frozenset[str] = frozenset()
        self.means: dict[str, Tensor] = {}
        # By stream: share of values astray and number of images, and what is known afterwards.
        self.outliers: dict[int, tuple[float, int]] = {}
        self.chains: list[ChainState] | None = None
        self.alarms: dict[int, AlarmState] = {}
        self.errors: dict[int, Tensor] = {}  # `StreamState.errors` afterwards, by stream
        self.resemblance: dict[int, float] = {}  # of its images, from 0 to 1
        self.alike: Tensor | None = None  # the same by group, (groups,); None if nothing resembles
        self.settle_layers: SettleLayers | None = None  # set by statistics that follow streams
        self.implausible: Tensor | None = (
            None  # images that no shift explains; None if there are none
        )
        self._conditions = [state.conditions for state in self.states]
        self._latest = [state.latest for state in self.states]
        self._begun: set[tuple[int, int]] = set()  # conditions that this batch brought
        self._told_apart = False
        self._counted_images: list[Tensor] | None = None
        self._before: dict[str, Any] = {}

    @property
    def wants_conditions(self) -> bool:
        """Whether conditions are still to be told apart, as they are in the first pass."""
        return self.records and not self._told_apart

    @property
    def all_filtered(self) -> bool:
        """Whether no image passes as it is."""
        return self.rows is None or bool(self.rows.filtered.all())

    @property
    def records(self) -> bool:
        """Whether the pass leaves a mark on its streams."""
        return self.counts and not self.looking

    def leave_aside(self, images: Tensor) -> None:
        """Let some images pass as they are, and leave no mark, before any layer sees them."""
        if self.rows is None:
            every = torch.ones_like(images)
            self.rows = ImageRows(torch.zeros_like(images, dtype=torch.long), every, every)
            self.group_of = self.rows.stream
        counted, filtered = self.rows.counted & ~images, self.rows.filtered & ~images
        self.rows = replace(self.rows, counted=counted, filtered=filtered)
        self.implausible, self._counted_images = images, None

    def tell_apart(self, conditions: ConditionStates, looks: Tensor) -> None:
        """Find the condition of each image by descriptions of the images, (images, numbers)."""
        if not self.wants_conditions or len(looks) != self.size:
            return
        self._told_apart = True
        sound, appearances = torch.isfinite(looks).all(1).numpy(), looks.numpy()
        if self.rows is None:
            streams, counted = np.zeros(len(looks), dtype=np.int64), sound
        else:
            streams = self.rows.stream.cpu().numpy()
            counted = sound & self.rows.counted.cpu().numpy()
        # An image that does not count, or has no finite description, goes with the last one.
        condition_of = np.zeros(len(looks), dtype=np.int64)
        for number, state in enumerate(self.states):
            own = np.flatnonzero(streams == number)
            chosen, known = own[counted[own]], self._conditions[number]
            condition_of[own] = state.latest
            if known is not None and len(chosen):
                known, found, begun = conditions.told_apart(known, appearances[chosen])
                self._conditions[number] = known
                condition_of[own], condition_of[chosen] = found[-1], found
                self._latest[number] = int(found[-1])
                self._begun |= {(number, condition) for condition in begun}
                self.resemblance[number] = conditions.resemblance(known)
        # In the order of streams, each of which has a group even if the batch has none of its.
        keys = list(zip(streams.tolist(), condition_of.tolist(), strict=True))
        groups = sorted({*keys, *enumerate(self._latest)})
        if groups != self.groups or self._begun:
            self.groups, self._before = groups, {}
            self.version += 1
        if len(groups) > 1:
            place = {key: row for row, key in enumerate(groups)}
            device = None if self.rows is None else self.rows.stream.device
            self.group_of = torch.tensor([place[key] for key in keys], device=device)

    def group_of_each(self, length: int) -> Tensor | None:
        """Return the group of each sample of a layer; None if there is one group."""
        if len(self.groups) == 1:
            return None
        return self._of_samples(self.group_of, length)

    def chosen(self, what: str, length: int) -> Tensor | None:
        """Return whether each sample of a layer is `counted` or `filtered`; None for all."""
        if self.rows is None:
            return None
        return self._of_samples(getattr(self.rows, what), length)

    def _of_samples(self, values: Tensor | None, length: int) -> Tensor:
        images = 0 if values is None else len(values)
        if values is None or not images or length % images:
            raise LayerOutputError(
                "Samples of several streams or conditions can share a pass if every layer has as "
                f"many rows of each; found a layer with {length} rows for {images} samples. "
                "Adapt with `states=1`, and serve one stream at a time."
            )
        return values if length == images else values.repeat_interleave(length // images)

    def summed(self, values: Tensor, *, adapted: bool = False) -> Tensor:
        """Return sums over the counted samples of each group: (samples, n) to (groups, n)."""
        length = values.shape[0]
        for use in ("counted", "filtered") if adapted else ("counted",):
            chosen = self.chosen(use, length)
            if chosen is not None:
                values = values * chosen.to(values)[:, None]
        return sums_by_group(values, self.group_of_each(length), self.group_count)

    @property
    def is_plain(self) -> bool:
        """Whether all images are of one group, and counted."""
        return self.rows is None and self.group_of is None

    def counted_samples(self, length: int) -> Tensor:
        """Return how many of a layer's samples each group counts, float64, shape (groups,)."""
        if self.is_plain:
            return torch.full((1,), float(length), dtype=torch.float64)
        if self.traced:
            return self.sizes()
        return self.summed(torch.ones(length, 1, dtype=torch.float64))[:, 0]

    def group_means(self, values: Tensor, counts: Tensor) -> Tensor:
        """Return means over the counted samples of each group, (samples, n) to (groups, n)."""
        if self.is_plain:
            return values.mean(0, keepdim=True)
        return self.summed(values) / counts.clamp(min=1).to(values)[:, None]

    @property
    def group_count(self) -> int:
        """Number of groups."""
        return len(self.groups)

    def sizes(self, *, adapted: bool = False) -> Tensor:
        """Return the number of counted images of each group, float64, shape (groups,)."""
        if self.is_plain:
            return torch.tensor([float(self.size or 0)], dtype=torch.float64)
        ones = torch.ones(self.size or 0, 1, dtype=torch.float64)
        return self.summed(ones, adapted=adapted)[:, 0]

    def spectrum_before(self, number: int) -> Spectrum:
        """Return the spectrum of each group for a filter before the batch."""
        found: Spectrum = self._rows_before(f"{number}", lambda state: state.spectra[number])
        return found

    def layers_before(self) -> LayerMoments:
        """Return the moments of normalisation layers of each group before the batch."""
        found: LayerMoments = self._rows_before("layers", lambda state: state.layers)
        return found

    def _rows_before(self, name: str, table: Callable[[StreamState], Any]) -> Any:
        if name not in self._before:
            found = []
            for stream, condition in self.groups:
                own = table(self.states[stream])
                # Another condition may have had the same number before.
                some = condition < len(own) and (stream, condition) not in self._begun
                found.append(own.row(condition) if some else table(self.empty).row(0))
            self._before[name] = type(found[0]).of_each(found)
        return self._before[name]

    @property
    def shift(self) -> Tensor:
        """How surely each group has shifted, float64, shape (groups,); 1 without a filter."""
        if not self.empty.spectra:
            return torch.ones(self.group_count, dtype=torch.float64)
        return self.spectra[0].shift if 0 in self.spectra else self.spectrum_before(0).shift

    @property
    def unusual(self) -> Tensor:
        """How unusual each group is, float64, shape (groups,); 0 without a filter."""
        if not self.empty.spectra:
            return torch.zeros(self.group_count, dtype=torch.float64)
        return self.spectra[0].unusual if 0 in self.spectra else self.spectrum_before(0).unusual

    def show(self, number: int, newer: Spectrum, joined: Spectrum, scaling: Scaling) -> None:
        """Keep the spectra of a filter, of this batch and in all, and their scaling."""
        self.newer[number], self.spectra[number], self.scalings[number] = newer, joined, scaling
        self.version += number == 0

    def counted_images(self) -> StreamPositions:
        """Return for each stream its counted images, in order of arrival."""
        if self._counted_images is None:
            if self.rows is None:
                self._counted_images = [torch.arange(self.size or 0)]
            else:
                of, counted = self.rows.stream.cpu(), self.rows.counted.cpu()
                self._counted_images = [
                    ((of == number) & counted).nonzero()[:, 0] for number in range(len(self.states))
                ]
        return self._counted_images

    def chains_before(self) -> ChainState:
        """Return the state of the class chains of all streams before the batch."""
        found = [state.chain for state in self.states]
        return ChainState.of_each([each for each in found if each is not None])

    def chains_after(self, after: ChainState) -> None:
        """Keep the state of the class chains of all streams after the batch."""
        self.chains = [after.of_stream(number) for number in range(len(self.states))]

    def as_numbers(self, values: Tensor) -> Tensor:
        """Return values as they are computed with beside the network: float64, on the CPU."""
        return values.double().cpu()

    def only(self, streams: Sequence[int]) -> tuple[StreamBatch, Tensor]:
        """Return a new batch of some streams by the plan of this one, and which images it has."""
        states = [self.states[number] for number in streams]
        images, rows = torch.arange(self.size or 0), None
        if self.rows is not None:
            number_of = torch.full((len(self.states),), -1)
            number_of[list(streams)] = torch.arange(len(streams))
            numbers = number_of.to(self.rows.stream.device)[self.rows.stream]
            images = (numbers >= 0).nonzero()[:, 0]
            rows = ImageRows(numbers[images], self.rows.counted[images], self.rows.filtered[images])
        plan = None if self.plan is None else self.plan.some(images.cpu(), streams)
        size = len(images)
        again = StreamBatch(states, self.empty, memory=self.memory, size=size, rows=rows, plan=plan)
        if self.implausible is not None:
            again.implausible = self.implausible[images]
        return again, images

    def finish(self) -> list[StreamState]:
        """Return the states after the batch."""
        if not self.counts or self.left_out:
            return self.states
        spectra = {number: self._settled(number) for number in self.spectra}
        layers = None if self.settle_layers is None else self.settle_layers(self)
        found = []
        for number, before in enumerate(self.states):
            places = [
                (place, condition)
                for place, (stream, condition) in enumerate(self.groups)
                if stream == number
            ]
            implausible = 0
            if self.implausible is not None and self.rows is not None:
                implausible = int((self.implausible & (self.rows.stream == number)).sum())
            state = replace(
                before,
                spectra=tuple(
                    _with_rows(table, spectra.get(which), places, self.empty.spectra[which])
                    for which, table in enumerate(before.spectra)
                ),
                conditions=self._conditions[number],
                latest=self._latest[number],
                outliers=self._outliers_after(number),
                alarm=self.alarms.get(number, before.alarm),
                implausible=before.implausible + implausible,
                errors=self.errors.get(number, before.errors),
                chain=before.chain if self.chains is None else self.chains[number],
            )
            if layers is not None and before.layers is not None and self.empty.layers is not None:
                moments, seen = layers
                # A condition that begins has nothing left of another one of its number.
                some = [
                    (place, condition)
                    for place, condition in places
                    if seen[place] or (number, condition) in self._begun
                ]
                after = _with_rows(before.layers, moments, some, self.empty.layers)
                state = replace(state, layers=after)
            found.append(state if is_finite(state) else before)
        return found

    def _settled(self, number: int) -> Spectrum:
        """Count independent images by the last plan, which knows more of their classes."""
        spectrum, newer = self.spectra[number], self.newer[number]
        if self.plan is None:
            return spectrum
        before = self.spectrum_before(number).independent
        before = before * torch.exp(-newer.samples / self.memory)
        independent = self.independent_samples(newer.samples)
        return self.as_resembling(replace(spectrum, independent=before + independent))

    def as_resembling(self, spectrum: Spectrum) -> Spectrum:
        """Count images of streams for less if they resemble each other; a row for each group."""
        if self.alike is None:
            return spectrum
        most = design_effect(spectrum.samples, self.alike)
        return replace(spectrum, independent=spectrum.independent.minimum(most))

    def note_resemblance(self, possible: Callable[[], Tensor]) -> None:
        """Note how far images resemble each other; of groups like a source image only."""
        self.alike = None
        # If no source image could look like a group, its images are alike by what has happened.
        if any(self.resemblance.values()):
            found = [self.resemblance.get(stream, 0.0) for stream, _ in self.groups]
            alike = torch.tensor(found, dtype=torch.float64)
            self.alike = torch.where(possible(), alike, 0.0)

    def independent_samples(self, samples: Tensor) -> Tensor:
        """Return how many of a filter's samples of each group are independent, shape (groups,)."""
        if self.plan is None:
            return samples
        if not self.traced and len(self.plan.counts) != self.size:
            return samples
        images = self.sizes().clamp(min=1)
        # A filter may see several samples of each image.
        return self.summed(self.plan.counts[:, -1:])[:, 0] * samples / images

    def _outliers_after(self, number: int) -> Tensor:
        before = self.states[number].outliers
        if number not in self.outliers:
            return before
        new, images = self.outliers[number]
        share, samples = before.tolist()
        samples = samples * math.exp(-images / self.memory) + images
        found = [share + (new - share) * images / samples, samples]
        return torch.tensor(found, dtype=torch.float64)


def sums_by_group(values: Tensor, of: Tensor | None, groups: int) -> Tensor:
    """Return the sums of rows by the group `of` each, (rows, n) to (groups, n)."""
    if of is None:
        return values.sum(0, keepdim=True)
    if torch.compiler.is_exporting():  # there, each group has as many rows
        return values.reshape(groups, -1, values.shape[1]).sum(1)
    return values.new_zeros(groups, values.shape[1]).index_add(0, of.to(values.device), values)


AnyTable = TypeVar("AnyTable", Spectrum, LayerMoments)


def _with_rows(
    table: AnyTable, rows: AnyTable | None, places: Sequence[tuple[int, int]], empty: AnyTable
) -> AnyTable:
    """Return a table with some rows in the places of their conditions."""
    if rows is not None:
        for place, condition in places:
            table = table.with_row(condition, rows.row(place), empty.row(0))
    return table
