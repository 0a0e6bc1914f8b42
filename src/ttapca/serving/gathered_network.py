"""One forward pass over the images of many streams, each with its own gains."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ttapca.adaptation.health import Health, shift_facts
from ttapca.adaptation.shift_alarm import ShiftAlarm, classes_after, skew_of
from ttapca.adaptation.surfaces.outlier_repair import InputRepair
from ttapca.errors import AttachError, LayerOutputError, OptionError
from ttapca.fitting.fitted_filter import FittedFilter, attach
from ttapca.networks.evaluation import EvaluatedKind
from ttapca.serving.answers import Mode, StreamStatus
from ttapca.serving.stream_state import StreamState
from ttapca.spectral.closed_form import MEMORY, WIENER
from ttapca.spectral.closed_form_rule import independent_images
from ttapca.spectral.many_streams import ManyStreamsGain, Rows, StreamOutcome
from ttapca.spectral.outliers import SourceOutliers
from ttapca.support.modules import (
    device_and_dtype,
    find_layer,
    restore_training_flags,
    training_flags,
)
from ttapca.support.outputs import FindLogits, OutputKind, Outputs


@dataclass(frozen=True, eq=False)
class Served:
    """What a pass made of one request.

    Attributes:
        state: Of the stream, after it.
        logits: What is answered.
        adapted: Whether a filter changed the images that are answered for.
        differ: In shadow, how many images have another class when adapted; None in other modes, and
            where the adapted network has no finite numbers.
        look: The first image, and what the filter was given and made of it; None where it does not
            act on images of this shape.
    """

    state: StreamState
    logits: Tensor
    adapted: bool
    differ: int | None
    look: Look | None


# An image, what the filter was given of it, and what it made of that, each (channels, h, w).
Look = tuple[Tensor, Tensor, Tensor]


class GatheredNetwork:
    """A network with a filter that serves many streams; one thread at a time may call it.

    The filter has closed-form gains, of their own for each condition of a stream, and pixels that
    have gone wrong are repaired before it. Normalisation layers keep the statistics of the source:
    those of single images of a stream that may be sorted by class would do more harm than good
    (docs/production-evidence.md has the measurements).

    Args:
        model: Returns logits for a batch of images.
        fitted: A filter of it.
        logits: Finds the logits in what the model returns, where that is more than one tensor.
        outputs: What the outputs mean; by default one logit is `binary`, and more are `multiclass`.
        memory: After so many images, what was seen of a stream counts 1 / e.
        states: How many conditions of a stream are told apart at most.
        outliers: Whether to repair pixels that have gone wrong; by default where the filter acts on
            images and knows how many source images have.

    Raises:
        OptionError: Outliers are to be repaired, and the filter does not know them.
    """

    def __init__(
        self,
        model: nn.Module,
        fitted: FittedFilter,
        *,
        logits: FindLogits | None = None,
        outputs: EvaluatedKind | None = None,
        memory: float = MEMORY,
        states: int = 1,
        outliers: bool | None = None,
    ) -> None:
        if outliers and fitted.outliers_ is None:
            raise OptionError(
                f"`outliers` needs a filter that acts on images; that at `{fitted.layer}` does "
                "not, or was fitted by an older ttapca. Leave `outliers` out."
            )
        options = {"memory": memory, "states": states}
        self._outputs = Outputs(outputs, logits, reads="probabilities")
        self._model, self._fitted = model, fitted
        self._flags = training_flags(model)
        self._attachment = attach(model, fitted, ManyStreamsGain, **WIENER, **options)
        gain = self._attachment.filter.gain
        if not isinstance(gain, ManyStreamsGain):  # for type checkers: `attach` has made it
            raise AttachError("The filter has lost its gains.")
        self._gain = gain
        self._alarm = ShiftAlarm(_nobody)
        classes = fitted.classes_
        self._shares = None if classes is None else classes.shares.double()
        self._outliers = None
        if fitted.outliers_ is not None and outliers is not False:
            self._outliers = SourceOutliers(fitted.outliers_)
        self._filtered: tuple[Tensor, list[int]] | None = None  # rows, and how many of each stream
        self._given: Tensor | None = None
        self._made: Tensor | None = None
        self._hooks = [self._attachment.filter.register_forward_hook(self._see)]
        if self._outliers is not None:
            layer, hook = find_layer(model, fitted.layer), InputRepair(self._repaired)
            self._hooks.append(
                layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            )
        model.eval()

    @property
    def outputs(self) -> OutputKind:
        """What the outputs of the last pass mean."""
        return self._outputs.found

    @property
    def kind(self) -> str:
        """A digest that only pools with the same filter share, and the same kind of states."""
        parts = [self._fitted.layer, str(self._fitted.shape), str(self._gain.conditions is None)]
        for tensor in (self._fitted.center_, self._fitted.singular_values_):
            parts.append(hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def bands(self) -> int:
        """How many bands of components the alarm tells apart."""
        return len(self._gain.edges) - 1

    def new_state(self, mode: Mode) -> StreamState:
        """Return the state of a stream that has shown nothing."""
        size = math.prod(self._fitted.shape)
        return StreamState(self._gain.nothing_seen(size), mode=mode)

    def warm_up(self, largest: int) -> None:
        """Find out what is usual for every number of images that a stream may come to count.

        Args:
            largest: Images in a request, at most.
        """
        gain = self._gain
        # So many count at most, since older ones fade.
        for size in range(1, math.ceil(gain.memory) + largest):
            gain.normal.batches_of(size).usual(gain.threshold)

    @torch.inference_mode()
    def serve(self, requests: Sequence[tuple[StreamState, Tensor]]) -> list[Served]:
        """Answer requests of different streams in one pass.

        Args:
            requests: The state of each stream and its images, which are finite.
        """
        copies = [
            (number, images, copy)
            for number, (state, images) in enumerate(requests)
            for copy in _COPIES[state.mode]
        ]
        device, dtype = device_and_dtype(self._model, self._model)
        rows = _rows(copies, device)
        self._gain.begin([state.seen for state, _ in requests], rows)
        sizes = [len(images) for _, images, copy in copies if copy.filtered]
        self._filtered = (rows.filtered.nonzero()[:, 0], sizes) if sizes else None
        self._given = self._made = None
        try:
            batch = torch.cat([images for _, images, _ in copies])
            output = self._model(batch.to(device, dtype))
            logits = self._outputs(output)  # of classes, or for each label of no and yes
            outcomes = self._gain.outcomes()
            self._check(logits, len(batch), outcomes)
            return self._served(requests, logits.float().cpu(), outcomes)
        finally:
            self._gain.begin([], None)
            self._filtered = None

    def _check(self, logits: Tensor, rows: int, outcomes: Sequence[StreamOutcome]) -> None:
        if self._outputs.of_pixels(logits) or len(logits) != rows:
            found = tuple(self._outputs.as_returned(logits).shape)
            raise LayerOutputError(
                "A pool serves models that return logits of shape (images, classes), (images, "
                f"labels) or (images,); found {found} for {rows} images. Say where they are with "
                "`logits=`."
            )
        if not outcomes:
            raise LayerOutputError(
                f"A pool needs a model that calls the layer of its filter, `{self._fitted.layer}`, "
                "in every pass; this one has not."
            )

    def _served(
        self,
        requests: Sequence[tuple[StreamState, Tensor]],
        logits: Tensor,
        outcomes: Sequence[StreamOutcome],
    ) -> list[Served]:
        found, first, now = [], 0, time.time()
        for (state, images), outcome in zip(requests, outcomes, strict=True):
            size, copies = len(images), len(_COPIES[state.mode])
            last = first + (copies - 1) * size  # where the copies begin that are remembered
            answered, best = logits[first : first + size], logits[last : last + size]
            first += copies * size
            finite = bool(torch.isfinite(best).all())
            differ = _differing(answered, best) if copies > 1 and finite else None
            answered = self._outputs.as_returned(answered).clone()
            adapted = outcome.changed and state.mode == "on"
            if not finite:
                after = dataclasses.replace(state, skipped=state.skipped + 1)
                found.append(Served(after, answered, adapted, differ, None))
                continue
            after = dataclasses.replace(
                self._watched(state, outcome, best, now),
                seen=outcome.seen,
                images=state.images + size,
                requests=state.requests + 1,
                adapted=state.adapted + size * adapted,
                shadowed=state.shadowed + size * (differ is not None),
                differed=state.differed + (differ or 0),
                shift=outcome.shift,
                last_seen=now,
            )
            look = self._look(images, last)
            found.append(Served(after, answered, adapted, differ, look))
        return found

    def _watched(
        self, state: StreamState, outcome: StreamOutcome, logits: Tensor, now: float
    ) -> StreamState:
        """Return the state after the alarm has looked at a request; see `ShiftWatch`."""
        size, counts, skew = len(logits), state.counts, state.skew
        if self._outputs.exclusive:
            shares = self._known_shares(logits.shape[1])
            counts, skew = classes_after((counts, skew), logits, size, outcome.shift, shares)
        block = size * outcome.energies
        if state.block is not None:
            block = block + state.block
        images = state.block_images + size
        after = dataclasses.replace(state, counts=counts, skew=skew, block=block)
        if images < self._alarm.images:
            return dataclasses.replace(after, block_images=images)
        evidence = self._gain.evidence(
            block / images, images, independent_images(images, self.skew_of(after))
        )
        shifted, run = self._alarm.next(state.shifted, state.run, evidence.p_value)
        since = state.shifted_since if shifted == state.shifted else (now if shifted else None)
        return dataclasses.replace(
            after, block=None, block_images=0, shifted=shifted, run=run, shifted_since=since
        )

    def _known_shares(self, classes: int) -> Tensor | None:
        """Return the shares of classes in the source, where they are of so many classes."""
        known = self._shares is not None and len(self._shares) == classes
        return self._shares if known else None

    def skew_of(self, state: StreamState) -> float:
        """Return how surely the classes of a stream are not those of the source; 1 if unknown."""
        shares = None if state.counts is None else self._known_shares(len(state.counts))
        if state.counts is None or shares is None:
            return 1.0
        return max(state.skew, skew_of(state.counts, shares))

    def status(self, name: str, state: StreamState) -> StreamStatus:
        """Say how a stream is; any thread may call this."""
        return StreamStatus(
            health=self._health(name, state),
            mode=state.mode,
            gains=self._band_gains(state),
            requests=state.requests,
            adapted_share=state.adapted_share,
            disagreement=state.disagreement,
            shifted_since=state.shifted_since,
            last_seen=state.last_seen,
        )

    def _health(self, name: str, state: StreamState) -> Health:
        seen = {"stream": name, "images": state.images, "skipped": state.skipped}
        if not state.images:
            return Health(**seen, shifted=state.shifted, shift=0.0)  # type: ignore[arg-type]
        gain, skew, shown, counts = self._gain, self.skew_of(state), state.latest, state.counts
        outside = 1.0 if shown.rest_energy is None else float(shown.rest_energy)
        energies = gain.by_band(shown.energies[0])
        samples = float(shown.samples)
        independent = independent_images(samples, skew)
        evidence = gain.evidence(energies, samples, independent, outside)
        return Health(
            **seen,  # type: ignore[arg-type]
            shifted=state.shifted,
            **shift_facts([(self._fitted.layer, gain, evidence)], state.shift),
            composition=None if counts is None else tuple((counts / counts.sum()).tolist()),
            skew=skew,
        )

    def _band_gains(self, state: StreamState) -> tuple[float, ...]:
        gain = self._gain
        if not state.images:
            return tuple(1.0 for _ in gain.edges[1:])
        counts = state.latest.samples.clamp(min=1)
        found = gain.verdict(state.latest, counts, leeway=gain.leeway).gains[0]
        return tuple(gain.gains_by_band(found).tolist())

    def _repaired(self, given: Tensor) -> Tensor:
        """Return what is given to the layer without outliers, in rows that are to be filtered."""
        self._given = given
        if self._outliers is None or self._filtered is None:
            return given
        rows, sizes = self._filtered
        chosen = given[rows]
        repaired, _ = self._outliers.repaired_each(chosen, sizes)
        return given if repaired is chosen else given.index_copy(0, rows, repaired)

    def _see(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._made = output
        if self._outliers is None:
            self._given = inputs[0]

    def _look(self, images: Tensor, row: int) -> Look | None:
        shape = images.shape[1:]
        if self._given is None or self._made is None or self._given.shape[1:] != shape:
            return None
        given, made = (each[row].float().cpu().clone() for each in (self._given, self._made))
        return images[0].clone(), given, made

    def detach(self) -> nn.Module:
        """Take the filter off the model, and return the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._attachment.detach()
        restore_training_flags(self._flags)
        return self._model


class _Copy(NamedTuple):
    """How an image goes through the network: does its stream remember it, and is it filtered?"""

    counted: bool
    filtered: bool


# The copies of an image that go through the network. The first one is answered, the last one is
# remembered: in shadow these are two, and a stream that is off is watched.
_COPIES: dict[Mode, tuple[_Copy, ...]] = {
    "off": (_Copy(counted=True, filtered=False),),
    "shadow": (_Copy(counted=False, filtered=False), _Copy(counted=True, filtered=True)),
    "on": (_Copy(counted=True, filtered=True),),
}


def _rows(copies: Sequence[tuple[int, Tensor, _Copy]], device: torch.device) -> Rows:
    """Say of each row of a batch what is said of copies: number of the stream, images, and how."""
    sizes = torch.tensor([len(images) for _, images, _ in copies])
    columns = zip(*((number, *copy) for number, _, copy in copies), strict=True)
    return Rows(*(torch.tensor(each).repeat_interleave(sizes).to(device) for each in columns))


def _differing(logits: Tensor, others: Tensor) -> int:
    """Return how many images have another class, or another label, by other logits."""
    return int((logits.argmax(1) != others.argmax(1)).reshape(len(logits), -1).any(1).sum())


def _nobody(_health: Health) -> None:
    """Nobody is called: a pool keeps in the state of a stream what its alarm says."""
