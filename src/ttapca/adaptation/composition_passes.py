"""`CompositionPasses`: as many passes over a batch as its classes are surprising."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ttapca.adaptation.agreement import affinities_of, agreed
from ttapca.adaptation.optimisation import Mover, Run, log_predictions
from ttapca.adaptation.surfaces.statistics import MixedStatistics
from ttapca.errors import LayerOutputError
from ttapca.spectral.composition import JUDGED, ROWS, ClassMoments, Composition, Estimate
from ttapca.spectral.stream import Stream
from ttapca.support.logits import log_softmax

# Chosen on held-out conditions; docs/closed-form-evidence.md has the measurements.
SURPRISE = 0.25  # share of the batch whose class was not expected, from which a pass is repeated
ALIKE = 0.75  # cosine from which two looks at a stream find the same classes too often
ALIKE_IF_SURER = 0.5  # the same, where the network is surer of itself at a glance
HIDDEN = 0.5  # certainty at a glance from which the whole weight may have hidden classes
SURE_OF_ITSELF = 0.85  # mean probability of the predicted classes, from which none is hidden
CERTAIN = 0.6  # certainty from which the whole weight shows the classes better than half of it
ORDERED = 0.3  # certainty from which a stream counts as ordered by class
ENOUGH = 32.0  # samples after which the past of a stream serves as its statistics

Look = Callable[..., Tensor | None]  # see `CompositionPasses._look`


class CompositionPasses(Mover):
    """Runs the model until the classes it predicts are those that its statistics were cleaned of.

    - Of a new stream nothing is known. It is normalised by itself, which mends a shift and makes
      few classes look like many. Where the network still finds few, either the batch has few, or
      the shift is beyond mending. So there is a glance at some of the batch with half the weight of
      its statistics. A batch of few classes shows the same ones in both; another pass takes
      out what they explain. A shift that is half mended shows others.
    - Such a batch may also hide its classes altogether. But then the network is unsure of what it
      sees, and surer at the glance.
    - The next large batches of such a stream are looked at alone. Where one shows no classes, it is
      looked at again, normalised by what was seen before. If that shows no new classes either, the
      judgement was wrong: the stream starts afresh with this batch.
    - A stream whose batches have classes of their own is normalised by what was seen before the
      batch; what the batch adds is cleaned by its own classes afterwards. One pass is enough.
    - Otherwise the batch is normalised by itself and the past in one pass, as if its classes were
      those of the last one. Where they turn out to be others, the pass is repeated.

    Where the classes surely are not those of the source, they are a prior on the outputs as well,
    and samples that look alike agree on theirs.

    Args:
        moments: What classes do to statistics.
        surfaces: The statistics.
        passes: How many there may be for one batch. With fewer than three, a new stream is trusted
            to be shuffled.
        required: Whether logits of other classes are an error; else they are left as they are.
    """

    def __init__(
        self,
        moments: ClassMoments,
        surfaces: Sequence[MixedStatistics],
        passes: int,
        *,
        required: bool = True,
    ) -> None:
        super().__init__()
        self.composition = Composition(moments)
        self.passes = passes
        self.reads = "classes" if required else "classes, if any"
        self._required = required
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
        # A pass is repeated with other statistics: where there are none, one is enough.
        passes = self.passes if self._surfaces else 1
        enough = stream.past("samples") >= min(size, ENOUGH)
        composition.past_only = enough and composition.ordered > ORDERED
        # To judge a new stream takes a pass, a glance, and a pass that goes by what was found.
        can_judge = passes > 2
        new = can_judge and not composition.known
        if can_judge and size >= JUDGED and composition.on_probation:
            new = True
            composition.start_afresh()
        for left in reversed(range(passes - new)):  # the glance counts as one of them
            logits = run(*inputs, **options)
            if not size or stream.left_out or not self._usable(logits):
                return logits
            if new:
                look = functools.partial(self._look, run, size, inputs, options)
                judge = self._bears_out if composition.afresh else self._has_own_classes
                again = judge(logits, look)
                if again is None:
                    return logits  # the stream is still new when its next batch comes
                # Not what the logits say: where a stream has no classes of its own, those that it
                # seems to hold are the doing of the shift.
                new, found = False, composition.expected
            else:
                found = composition.estimate(logits)
                again = self._is_surprised(found, enough=enough)
            if not left or not again:
                break
            stream.restart_batch()
        self._settle(found)
        return logits if found.certainty == 0.0 else _with_prior(logits, found)

    def _has_own_classes(self, logits: Tensor, look: Look) -> bool | None:
        """Return whether a new stream has classes of its own, and go by them in that case.

        Args:
            logits: Of the batch, with the whole weight of its statistics.
            look: Returns those of some of it, if they can be used.

        Returns:
            None where there are too few samples to tell.
        """
        composition, stream = self.composition, self.composition.stream
        if stream.samples == 1:
            return None  # an image that comes first has no statistics that could mislead
        together = _some_places(logits.detach())
        before = stream.past("composition/young")
        if before is not None:
            together = torch.cat([before.to(together), together])
        stream.write("composition/young", together)
        own = self._own_classes(logits, look, together)
        if own is None:
            return None if stream.samples < JUDGED else False
        composition.believe(own)
        return True

    def _own_classes(
        self, logits: Tensor, look: Look, together: Tensor | None = None
    ) -> Estimate | None:
        """Return the classes that a batch surely has of its own; None where there are none.

        Two looks tell: with the whole weight of the batch's statistics, and with half of it.

        Args:
            logits: Of the batch, with the whole weight.
            look: Returns those of some of it, if they can be used.
            together: Of the batch and of samples before it that are still to be judged.
        """
        composition = self.composition
        together = logits if together is None else together
        found = composition.estimate(together, len(together))
        if not found.certainty and not self._may_hide_classes(logits):
            return None
        half = look(glance=True)
        if half is None:
            return None
        seen = composition.estimate(half, len(together))
        if found.certainty and seen.like(found) >= ALIKE:
            # Half the weight hides less, but the glance is at this batch alone.
            hides_less = found.certainty <= CERTAIN and len(together) == len(logits)
            return seen if hides_less else found
        # To mend a shift makes a network surer, to take away its classes makes it less sure.
        seen = composition.estimate(half, len(half))
        hidden = seen.skew >= HIDDEN and seen.like(found) >= ALIKE_IF_SURER
        return seen if hidden and _confidence(half) >= _confidence(logits) else None

    def _may_hide_classes(self, logits: Tensor) -> bool:
        """Return whether a batch can have classes of its own although it does not show them."""
        composition, stream = self.composition, self.composition.stream
        mended = stream.shift_in(stream.values) > 0  # else it was not normalised by itself
        enough = composition.most_certain(len(logits)) >= HIDDEN
        return mended and enough and _confidence(logits) < SURE_OF_ITSELF

    def _bears_out(self, logits: Tensor, look: Look) -> bool:
        """Return whether a batch bears out that its stream is ordered, and go on in that case.

        By itself, a batch of a single class can look like one of all classes. Normalised by what
        was seen before, it shows its class. If that is another one than before, it is no collapse:
        a shift that makes the network see few classes makes it see the same ones again.

        Args:
            logits: Of the batch, with the whole weight of its statistics.
            look: Returns those of some of it, if they can be used.
        """
        composition = self.composition
        own = self._own_classes(logits, look) is not None
        if not own:
            composition.go_on()
            seen = look()
            own = seen is not None and self._is_another(composition.estimate(seen))
        (composition.go_on if own else composition.start_afresh)()
        return own

    def _is_another(self, seen: Estimate) -> bool:
        """Return whether a batch surely has classes, and others than were there before it."""
        return seen.skew > 0 and seen.like(self.composition.remembered) < ALIKE

    def _look(
        self,
        run: Run,
        size: int,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        *,
        glance: bool = False,
    ) -> Tensor | None:
        """Return the logits of some of the batch, if usable; at a glance, with half the weight."""
        composition = self.composition
        chosen = _spread(size, JUDGED)
        composition.glancing = glance
        try:
            with composition.stream.aside():
                logits = run(
                    *(_rows(value, size, chosen) for value in inputs),
                    **{name: _rows(value, size, chosen) for name, value in options.items()},
                )
                usable = not composition.stream.left_out and self._usable(logits)
        finally:
            composition.glancing = False
        return logits.detach() if usable else None

    def _is_surprised(self, found: Estimate, *, enough: bool) -> bool:
        """Return whether a batch has other classes than were expected, and expect those then."""
        composition = self.composition
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

    def _usable(self, logits: Any) -> bool:
        """Return whether logits are finite and of the classes that are known."""
        classes = len(self.composition.moments.shares)
        if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[1] != classes:
            if not self._required:
                return False
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise LayerOutputError(
                f"The filter was fitted on a model that predicts {classes} classes, as logits of "
                f"shape (batch, {classes}, ...); found {found}. Say where they are with `logits=`, "
                "fit again, or leave the classes aside with `composition=False`."
            )
        return bool(torch.isfinite(logits).all())


def _some_places(logits: Tensor) -> Tensor:
    """Return predictions of so many places of an image, whatever its size; one stays as it is."""
    if logits.dim() == 2:
        return logits
    places = logits.flatten(2)
    chosen = torch.linspace(0, places.shape[2] - 1, ROWS // JUDGED, device=logits.device)
    return places[:, :, chosen.round().long()]


def _spread(size: int, most: int) -> slice:
    """Return some rows of a batch, evenly spread over it."""
    return slice(None, None, math.ceil(size / most))


def _rows(value: Any, size: int, chosen: slice) -> Any:
    """Return some rows of an argument that has one for each sample."""
    if isinstance(value, Tensor) and value.dim() and len(value) == size:
        return value[chosen]
    return value


def _confidence(logits: Tensor) -> float:
    """Return the mean probability of the predicted classes."""
    return float(log_softmax(logits.detach()).amax(1).exp().mean())


def _with_prior(logits: Tensor, found: Estimate) -> Tensor:
    """Return logits that count on the classes that the stream holds.

    They are a prior on each prediction. And where batches have classes of their own, samples that
    look alike most likely share one: they agree on theirs, the more the surer that is. Predictions
    of every pixel, and of a single sample, have no others to agree with.
    """
    logits = logits + found.prior.to(logits).view(1, -1, *[1] * (logits.dim() - 2))
    if logits.dim() > 2 or len(logits) == 1:
        return logits
    own = log_predictions(logits)
    return agreed(own, found.certainty * affinities_of(own - own.mean(1, keepdim=True))).to(logits)
