"""`ChainPasses`: predictions in order of arrival, by statistics that go with their classes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Predictor, Run, RunSome
from ttapca.adaptation.surfaces.stream_statistics import StreamStatistics
from ttapca.errors import LayerOutputError
from ttapca.spectral.chain import ChainReading, ChainState, ClassChain
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.source_classes import (
    ClassPlan,
    LayerClasses,
    SourceClasses,
    by_stream,
    in_batch,
)
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import StreamState

Order = Literal["auto", "shuffled", "video"]

SMALLEST = 1e-12  # probability: it has a logarithm
LEAST_SUM = 1e-30  # in float32


class ChainPasses(Predictor):
    """Predicts in order of arrival, by a chain that models the classes of a stream.

    A pass goes by a plan: which classes to take out of the statistics of the batch, and for how
    many independent images the batch counts. The predictions of the pass, read in order, give the
    next plan; if the two differ, the pass is repeated for the images of this stream.
    Logits of other classes are an error if these are `required`, and else left as they are.
    """

    def __init__(
        self,
        classes: SourceClasses,
        statistics: StreamStatistics | None = None,
        *,
        required: bool = True,
        order: Order = "auto",
        constants: Constants = CONSTANTS,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.chain = ClassChain(
            classes.shares.double().numpy(), constants, ordered=order == "video"
        )
        self.reads = "classes" if required else "classes, if any"
        self.single = False  # whether a pass is never repeated
        self._required, self._statistics = required, statistics
        self._known = LayerClasses(classes, {}, constants)
        self._of_places = False  # whether the model predicts every place of an image
        self._watched: frozenset[str] = frozenset()

    def traceable(self) -> ChainPasses:
        """Return a copy for exporters: in float32, by torch alone, and with a single pass."""
        found = copy.copy(self)
        found.chain = self.chain.computing_with(
            torch, lambda array: torch.from_numpy(array).float(), LEAST_SUM
        )
        found.single = True
        return found

    def join(self, stream: Stream) -> None:
        """Declare the state of the chain."""
        super().join(stream)
        # Only now are the statistics attached, and know whether the model has such layers.
        if self._statistics is not None and self._statistics.classes is not None:
            self._known = self._statistics.classes
            self.classes = self._known.classes  # by the paths of this model
        pairs = self.classes.pairs
        # Of the layers whose channel means tell classes apart.
        self._watched = frozenset(() if pairs is None else pairs.layers)
        features = 0 if pairs is None else pairs.features
        stream.declare_state(chain=self.chain.start(features=features))

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch of one stream."""
        batch = self.stream.batch
        if batch is None or not batch.size:
            return run(*inputs, **options)

        # Of a single stream, a pass is always over the whole batch.
        found = self.predict_streams(lambda _images: run(*inputs, **options), batch)
        logits, [(self.stream.batch, _)] = found
        return logits

    def predict_streams(
        self, run: RunSome, batch: StreamBatch
    ) -> tuple[Tensor, list[tuple[StreamBatch, int]]]:
        """Return the logits for one batch of any streams, and the last pass of each stream."""
        batch.plan = self._expected(batch)
        last = [(batch, number) for number in range(len(batch.states))]
        streams, images = list(range(len(last))), None  # of this pass, by those of the first
        logits: Tensor | None = None
        passes = self.chain.constants.passes if self._repeats and not self.single else 1
        for left in reversed(range(passes)):
            self.stream.batch = batch
            batch.watched = self._watched
            found = run(images)
            for place, number in enumerate(streams):
                last[number] = batch, place
            if batch.left_out or not self._usable(found, batch):
                return (found if logits is None else logits), last
            plan, outputs = self._read(batch, found, trial=left == passes - 1 > 0)
            if logits is not None and images is not None:
                outputs = logits.index_copy(0, images.to(logits.device), outputs)
            logits = outputs
            repeated = self._surprised(batch, plan) if left else []
            batch.plan = plan
            if not repeated:
                break
            batch, some = batch.only(repeated)
            streams = [streams[place] for place in repeated]
            if len(streams) < len(last):
                images = some if images is None else images[some]
        return found if logits is None else logits, last

    @property
    def _repeats(self) -> bool:
        return self._statistics is not None and bool(self._statistics.layers)

    def _surprised(self, batch: StreamBatch, plan: ClassPlan) -> list[int]:
        """Return the streams whose pass was wrong, judged by the plan that follows from it."""
        places, most = batch.counted_images(), self.chain.constants.change
        if isinstance(places, int):
            return []  # of each stream one image, which hardly changes any statistics
        changes = enumerate(self._changes(batch, plan))
        return [each for each, change in changes if change > most and len(places[each]) > 1]

    def _changes(self, batch: StreamBatch, plan: ClassPlan) -> list[float]:
        return [] if self._statistics is None else self._statistics.change(batch, plan)

    def _expected(self, batch: StreamBatch) -> ClassPlan:
        places = batch.counted_images()
        if self._of_places and not isinstance(places, int):  # of an image, which have no order
            shares = self.classes.shares.expand(batch.size or 0, -1)
            return ClassPlan.of_shares(self._known, shares, places)
        state = batch.chains_before()
        most = places if isinstance(places, int) else max(1, *map(len, places))
        return self._plan_of(batch, self.chain.expected(state, most), state)

    def _plan_of(self, batch: StreamBatch, reading: ChainReading, state: ChainState) -> ClassPlan:
        places, size = batch.counted_images(), batch.size or 0
        return ClassPlan.of_reading(self._known, reading, state.images, batch.memory, places, size)

    def _read(
        self, batch: StreamBatch, logits: Tensor, *, trial: bool = False
    ) -> tuple[ClassPlan, Tensor]:
        """Return the plan and the outputs that follow from a pass.

        The first images of a stream may show one class, or a network that is confused. In a `trial`
        they are taken for one class, and the predictions of the next pass must bear it out.
        """
        places = batch.counted_images()
        self._of_places = logits.dim() > 2
        if self._of_places and not isinstance(places, int):
            shares = logits.detach().softmax(1).flatten(2).mean(2).cpu()
            return ClassPlan.of_shares(self._known, shares, places), logits
        state = batch.chains_before()
        sizes = None if isinstance(places, int) else [len(own) for own in places]
        predicted = by_stream(batch.as_numbers(logits.detach()).softmax(1), places)
        described, pairs = self._features(batch), self.classes.pairs
        features, log_pairs, past = None, None, state.past_features
        confused: Any = 0.0
        if described is not None and pairs is not None:
            features, how = by_stream(described, places), (self.chain.constants, self.chain.xp)
            past = pairs.past_after(past, features, sizes, *how)
            alike = self.chain.alike_after(state, predicted, sizes)
            log_pairs = pairs.log_ratio(state.features, features, *how)
            confused = pairs.said_by_any(past, alike, *how)
            if trial and not isinstance(places, int):
                begun = -np.expm1(-state.past_features[:, 0] / self.chain.constants.block)
                again = np.array([len(own) > 1 for own in places])
                confused = np.where(again, begun, 1) * confused
            log_pairs -= confused[:, None]
            # Nothing came before the first image.
            log_pairs[:, 0] = log_pairs[:, 0] * (state.place > 0)
        after, reading = self.chain.read(state, predicted, log_pairs, sizes, features, confused)
        batch.chains_after(dataclasses.replace(after, past_features=past))
        plan = self._plan_of(batch, reading, state)
        return plan, self._outputs(batch, logits, reading, state)

    def _features(self, batch: StreamBatch) -> Tensor | None:
        """Return features of late layers that tell whether images have one class."""
        pairs = self.classes.pairs
        found = None if pairs is None else pairs.described(batch.means)
        if found is None or not (batch.traced or bool(torch.isfinite(found).all())):
            return None
        return batch.as_numbers(found)

    def _outputs(
        self, batch: StreamBatch, logits: Tensor, reading: ChainReading, state: ChainState
    ) -> Tensor:
        """Return logits whose softmax are the probabilities of the chain.

        Logits of a stream that has no order, more likely than not, stay as they are, bit for bit,
        and so do those of the first image of a stream if it comes alone.
        """
        places, size = batch.counted_images(), batch.size or 0
        few: Any = places == 1
        if not isinstance(places, int):
            few = np.array([len(own) <= 1 for own in places])
        moved = (reading.plain < 1 / 2) & ~((state.place == 0) & few)[:, None]
        change = in_batch(moved * 1.0, places, size) > 0
        if batch.rows is not None:
            change = change & batch.rows.filtered.to(change.device)
        if not batch.traced and not bool(change.any()):
            return logits
        outputs = in_batch(reading.outputs, places, size).clamp(min=SMALLEST).log()
        said = batch.as_numbers(logits.detach()).log_softmax(1)
        return logits + torch.where(change[:, None], outputs - said, 0.0).to(logits)

    def facts_in(self, state: StreamState) -> dict[str, Any]:
        """Return the classes of a stream and its order; see `Health`."""
        if state.chain is None or not state.chain.place[0]:
            return {}
        expected, counts = self.chain.expected(state.chain, 1), state.chain.recent[0, 0]
        return {
            "composition": tuple((counts / counts.sum()).tolist()),
            "ordered": float(expected.ordered[0]),
            "run_length": float(expected.run_length[0]),
        }

    def _usable(self, logits: Any, batch: StreamBatch) -> bool:
        classes = len(self.classes.shares)
        if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[1] != classes:
            if not self._required:
                return False
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise LayerOutputError(
                f"The filter was fitted on a model that predicts {classes} classes, as logits of "
                f"shape (batch, {classes}, ...); found {found}. Say where they are with `logits=`, "
                'fit again, or leave the classes aside with `order="shuffled"`.'
            )
        if batch.traced:
            return True
        if len(logits) != batch.size:
            return False
        # In a batch of several streams, one that is broken is found by itself.
        return batch.rows is not None or bool(torch.isfinite(logits).all())


class RunCounts(ChainPasses):
    """Takes no classes out of statistics, but counts the images of a run as fewer.

    That is safe if nothing tells a run of one class from a network that collapses. Outputs stay
    those of the network.
    """

    kind = "ChainPasses"  # in saved streams

    def __init__(self, classes: SourceClasses, constants: Constants = CONSTANTS) -> None:
        super().__init__(classes, required=False, constants=constants)

    @property
    def _repeats(self) -> bool:
        return True

    def _changes(self, batch: StreamBatch, plan: ClassPlan) -> list[float]:
        found = [0.0] * len(batch.states)
        if batch.plan is not None:
            here, there = (batch.summed(each.counts[:, -1:])[:, 0] for each in (batch.plan, plan))
            changes = (here - there).abs() / torch.maximum(here, there).clamp(min=SMALLEST)
            for (stream, _), each in zip(batch.groups, changes.tolist(), strict=True):
                found[stream] = max(found[stream], each)
        return found

    def _outputs(
        self, batch: StreamBatch, logits: Tensor, reading: ChainReading, state: ChainState
    ) -> Tensor:
        del batch, reading, state
        return logits

    def facts_in(self, state: StreamState) -> dict[str, Any]:
        """Return nothing: the order is used for nothing that a person would ask for."""
        del state
        return {}
