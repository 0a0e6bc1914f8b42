"""`ChainPasses`: predictions in order of arrival, by statistics that go with their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Mover, Run
from ttapca.adaptation.surfaces.filter_gains import SpectralGains
from ttapca.adaptation.surfaces.statistics import MixedStatistics
from ttapca.errors import LayerOutputError
from ttapca.spectral.chain import ChainReading, ChainState, ClassChain
from ttapca.spectral.class_plan import ClassPlan
from ttapca.spectral.constants import CONSTANTS, ChainConstants
from ttapca.spectral.source_classes import SourceClasses
from ttapca.spectral.stream import CHAIN, Stream

Order = Literal["auto", "shuffled", "video"]

SMALLEST = 1e-12  # probability: it has a logarithm

# Share of the statistics below which what a pass went by and what it found are the same.
SETTLED = 0.005


class ChainPasses(Mover):
    """Predicts with what a chain knows of the classes of a stream.

    A pass goes by a plan: which classes to take out of the statistics of the batch, and for how
    many independent images it counts. At first that is what the stream makes expect. What the
    predictions of the pass say, read in order, is the next plan. If the two differ, the pass is
    repeated. The outputs are those that the chain makes of the last pass.

    Args:
        classes: What is known of classes in the source.
        surfaces: The statistics.
        gains: Of the filters.
        required: Whether logits of other classes are an error; else they are left as they are.
        order: `video` for images that surely come in order.
        constants: Of the chain.
    """

    def __init__(
        self,
        classes: SourceClasses,
        surfaces: Sequence[MixedStatistics],
        gains: Sequence[SpectralGains] = (),
        *,
        required: bool = True,
        order: Order = "auto",
        constants: ChainConstants = CONSTANTS,
    ) -> None:
        super().__init__()
        if order == "video":
            constants = constants.ordered()
        self.classes = classes
        self.chain = ClassChain(classes.shares.double().numpy(), constants)
        self.reads = "classes" if required else "classes, if any"
        self._required = required
        self._surfaces, self._gains = list(surfaces), list(gains)
        self._of_places = False  # whether the model predicts every place of an image

    def join(self, stream: Stream) -> None:
        """Declare what a stream changes."""
        super().join(stream)
        self._stream = stream
        # Only now are they attached, and know whether the model has such layers.
        self._surfaces = [each for each in self._surfaces if each.follow and each.layers]
        pairs = self.classes.pairs
        if pairs is not None:
            for surface in self._surfaces:
                surface.watched = frozenset(pairs.layers)
        features = 0 if pairs is None else pairs.features
        stream.declare(CHAIN, _tensors(self.chain.start(features=features)))

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch."""
        stream, state = self._stream, _state(self._stream.past(CHAIN))
        size = stream.samples - stream.past("samples")
        plan, after, reading = self._expected(state, max(1, size)), state, None
        # A pass is repeated with other statistics: if there are none, one is enough.
        passes = self.chain.constants.passes if self._surfaces else 1
        for left in reversed(range(passes)):
            stream.plan = plan
            for surface in self._surfaces:
                surface.means = {}
            logits = run(*inputs, **options)
            if not size or stream.left_out or not self._usable(logits, size):
                return logits
            self._of_places = logits.dim() > 2
            if self._of_places:
                found = ClassPlan.of_shares(self.classes, _shares_of(logits))
            else:
                after, reading = self._read(state, logits)
                found = self._plan_of(reading, state, size)
            change = max((each.change(plan, found) for each in self._surfaces), default=0.0)
            if not left or change <= self.chain.constants.change:
                break
            stream.restart_batch()
            plan = found
        self._settle(found, change)
        if reading is None:
            return logits
        stream.write(CHAIN, _tensors(after))
        alone = size == 1 and not state.place[0]
        return logits if alone else _with_outputs(logits, reading, self.chain.constants.plain)

    def _expected(self, state: ChainState, size: int) -> ClassPlan:
        """Return the plan for a batch of which nothing was seen yet."""
        if self._of_places:  # of an image, which are in no order of arrival
            shares = self.classes.shares.expand(size, -1)
            return ClassPlan.of_shares(self.classes, shares)
        return self._plan_of(self.chain.expected(state, size), state, size)

    def _settle(self, found: ClassPlan, change: float) -> None:
        """Remember the batch by what was found, not by what the pass went by."""
        self._stream.plan = found
        for gain in self._gains:
            if gain.closed_form is not None:
                gain.closed_form.settle()
        for surface in self._surfaces if change > SETTLED else ():
            surface.settle()

    def facts_in(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the classes of a stream and its order; see `Health`."""
        state = _state(values[CHAIN])
        if not state.place[0]:
            return {}
        expected, counts = self.chain.expected(state, 1), state.recent[0, 0]
        return {
            "composition": tuple((counts / counts.sum()).tolist()),
            "ordered": float(expected.ordered[0]),
            "run_length": float(expected.run_length[0]),
        }

    def _plan_of(self, reading: ChainReading, state: ChainState, size: int) -> ClassPlan:
        renewed = (1 - self._stream.aged(1.0, size)) / size
        return ClassPlan.of_reading(self.classes, reading, float(state.images[0]), renewed)

    def _read(self, state: ChainState, logits: Tensor) -> tuple[ChainState, ChainReading]:
        """Return what the chain makes of the logits of a batch."""
        predicted = logits.detach().double().softmax(1)[None].cpu().numpy()
        features, log_pairs = self._features(), None
        if features is not None and self.classes.pairs is not None:
            log_pairs = self.classes.pairs.log_ratio(state.features, features, self.chain.constants)
            if not state.place[0]:  # nothing came before the first image
                log_pairs[:, 0] = 0.0
        return self.chain.read(state, predicted, log_pairs, features=features)

    def _features(self) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        if self.classes.pairs is None:
            return None
        means = {path: each for surface in self._surfaces for path, each in surface.means.items()}
        found = self.classes.pairs.described(means)
        if found is None or not bool(torch.isfinite(found).all()):
            return None
        return found.double()[None].cpu().numpy()

    def _usable(self, logits: Any, size: int) -> bool:
        """Return whether logits are finite and of the classes that are known."""
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
        return len(logits) == size and bool(torch.isfinite(logits).all())


def _tensors(state: ChainState) -> tuple[Tensor, ...]:
    parts = (state.joint, state.recent, state.place, state.features)
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in parts)


def _state(tensors: Sequence[Tensor]) -> ChainState:
    return ChainState(*(each.double().cpu().numpy() for each in tensors))


def _shares_of(logits: Tensor) -> Tensor:
    """Return the mean class probabilities over all places of each image."""
    return logits.detach().softmax(1).flatten(2).mean(2).cpu()


def _with_outputs(logits: Tensor, reading: ChainReading, plain: float) -> Tensor:
    """Return logits whose softmax is what the chain makes of them.

    Args:
        logits: Of the network.
        reading: What the chain makes of them.
        plain: Probability of no order from which logits stay as they are, bit for bit.
    """
    moved = torch.from_numpy(reading.plain[0] < plain)
    if not bool(moved.any()):
        return logits
    outputs = torch.from_numpy(reading.outputs[0]).clamp(min=SMALLEST)
    said = logits.detach().double().log_softmax(1).cpu()
    change = torch.where(moved[:, None], outputs.log() - said, 0.0)
    return logits + change.to(logits)
