"""`CompositionPasses`: as many passes over a batch as its classes are surprising."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Mover, Run
from ttapca.adaptation.surfaces.statistics import MixedStatistics
from ttapca.errors import LayerOutputError
from ttapca.spectral.composition import ClassMoments, Composition, Estimate
from ttapca.spectral.stream import Stream
from ttapca.support.logits import softmax_entropy

# Chosen on held-out conditions; docs/closed-form.md has the measurements.
SURPRISE = 0.25  # share of the batch whose class was not expected, from which a pass is repeated
LESS_SURE = 1.2  # ratio of mean entropies from which batch statistics have hidden the classes
ORDERED = 0.3  # certainty from which a stream counts as ordered by class
ENOUGH = 32.0  # samples after which the past of a stream serves as its statistics


class CompositionPasses(Mover):
    """Runs the model until the classes it predicts are those that its statistics were cleaned of.

    - Of a new stream nothing is known, and batch statistics make a batch of one class look like any
      other. So the first look is by the statistics of the source, and the second by those of the
      batch. If the network is less sure of itself in the second than in the first, the batch has
      classes of its own, those that the first look found, and a third pass takes them out.
    - A stream whose batches have classes of their own is normalised by what was seen before the
      batch; what the batch adds is cleaned by its own classes afterwards. One pass is enough.
    - Otherwise the batch is normalised by itself and the past in one pass, as if its classes were
      those of the last one. Where they turn out to be others, the pass is repeated.

    Where the classes surely are not those of the source, they are a prior on the outputs as well.

    Args:
        moments: What classes do to statistics.
        surfaces: The statistics.
        passes: How many there may be for one batch. With fewer than three, a new stream is trusted
            to be shuffled.
    """

    def __init__(
        self, moments: ClassMoments, surfaces: Sequence[MixedStatistics], passes: int
    ) -> None:
        super().__init__()
        self.composition = Composition(moments)
        self.passes = passes
        self._surfaces = list(surfaces)

    def join(self, stream: Stream) -> None:
        """Declare what a stream changes."""
        super().join(stream)
        self.composition.join(stream)
        # Only now are they attached, and know whether the model has such layers.
        self._surfaces = [each for each in self._surfaces if each.follow and each.layers]

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch."""
        composition, stream = self.composition, self.composition.stream
        size = stream.samples - stream.past("samples")
        composition.start_batch(size)
        # Without statistics nothing would change; and one image by itself is no composition.
        passes = self.passes if self._surfaces and (size > 1 or composition.known) else 1
        # A single image has no statistics that could mislead.
        composition.source_only = passes > 2 and size > 1 and not composition.known
        self._first_look: tuple[Estimate, float] | None = None
        enough = stream.past("samples") >= min(size, ENOUGH)
        composition.past_only = enough and composition.ordered > ORDERED
        try:
            for number in range(1, passes + 1):
                logits = run(*inputs, **options)
                if stream.left_out or not self._finite_classes(logits):
                    return logits
                found = composition.estimate(logits)
                if number == passes or not self._again(found, logits, enough=enough):
                    break
                stream.restart_batch()
        finally:
            composition.source_only = False
        self._settle(found)
        if found.certainty == 0.0:
            return logits
        return logits + found.prior.to(logits).view(1, -1, *[1] * (logits.dim() - 2))

    def _again(self, found: Estimate, logits: Tensor, *, enough: bool) -> bool:
        """Prepare another pass, if one is called for."""
        composition = self.composition
        if composition.source_only:
            composition.source_only = False
            self._first_look = (found, float(softmax_entropy(logits).mean()))
            return True
        if self._first_look is not None:
            (seen, entropy), self._first_look = self._first_look, None
            if float(softmax_entropy(logits).mean()) <= LESS_SURE * entropy:
                return False
            composition.expect(seen)
            return True
        if composition.past_only or found.unlike(composition.expected) < SURPRISE:
            return False
        if enough:
            composition.past_only = True
        else:
            composition.expect(found)
        return True

    def _settle(self, found: Estimate) -> None:
        """Remember the batch, without what its classes explain."""
        composition = self.composition
        if found.certainty or composition.expected.certainty:
            composition.expect(found)
            for surface in self._surfaces:
                surface.settle()
        composition.settle(found)

    def _finite_classes(self, logits: Any) -> bool:
        """Return whether logits are finite; raise if they are not of the classes that are known."""
        classes = len(self.composition.moments.shares)
        if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[1] != classes:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise LayerOutputError(
                f"The filter was fitted on a model that predicts {classes} classes, as logits of "
                f"shape (batch, {classes}, ...); found {found}. Say where they are with `logits=`, "
                "fit again, or leave the classes aside with `composition=False`."
            )
        return bool(torch.isfinite(logits).all())
