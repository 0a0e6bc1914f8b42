"""One forward pass over the images of many streams, each adapted to by itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ttapca.adaptation.adapter import Adapter, StreamOutcome
from ttapca.adaptation.health import Health
from ttapca.adaptation.shift_alarm import ShiftAlarm
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import AttachError, LayerOutputError
from ttapca.methods.wiener import Wiener
from ttapca.networks.evaluation import EvaluatedKind
from ttapca.serving.answers import Mode, StreamStatus
from ttapca.serving.stream_record import StreamRecord
from ttapca.spectral.stream_batch import Rows
from ttapca.support.modules import device_and_dtype, find_layer
from ttapca.support.outputs import FindLogits, OutputKind


@dataclass(frozen=True, eq=False)
class Served:
    """What a pass made of one request.

    Attributes:
        record: Of the stream, after it.
        logits: What is answered.
        adapted: Whether a filter changed the images that are answered for.
        differ: In shadow, how many images have another class when adapted; None in other modes, and
            where the adapted network has no finite numbers.
        look: The first image, and what the filter was given and made of it; None where it does not
            act on images of this shape.
    """

    record: StreamRecord
    logits: Tensor
    adapted: bool
    differ: int | None
    look: Look | None


# An image, what the filter was given of it, and what it made of that, each (channels, h, w).
Look = tuple[Tensor, Tensor, Tensor]


class GatheredNetwork:
    """A network that adapts to many streams by `wiener`; one thread at a time may call it.

    What it answers to a stream is what `ttapca.adapt(model, method)` answers to it alone.

    Args:
        model: Returns logits for a batch of images.
        method: With its filter.
        logits: Finds the logits in what the model returns, where that is more than one tensor.
        outputs: What the outputs mean; by default one logit is `binary`, and more are `multiclass`.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Wiener,
        *,
        logits: FindLogits | None = None,
        outputs: EvaluatedKind | None = None,
    ) -> None:
        made = method.for_outputs(outputs).assemble()
        if made.mover is not None and made.mover.reads == "nothing":
            made.mover.reads = "probabilities"
        self._adapter = Adapter(
            model,
            made.surfaces,
            made.mover,
            forgetting="online",
            logits=logits,
            outputs=outputs,
            memory=made.memory,
            on_shift=ShiftAlarm(_nobody),
        )
        gains = (each for each in made.surfaces if isinstance(each, SpectralGains))
        surface = next(gains)
        gain = surface.closed_form
        if gain is None or surface.filter is None:  # for type checkers
            raise AttachError("The filter has lost its gains.")
        self._layer, self._gain = surface.layer, gain
        self._given: Tensor | None = None
        self._made: Tensor | None = None
        layer = find_layer(model, surface.layer)
        self._hooks = [
            layer.register_forward_pre_hook(self._see_given, prepend=True, with_kwargs=True),
            surface.filter.register_forward_hook(self._see_made),
        ]

    @property
    def outputs(self) -> OutputKind:
        """What the outputs of the last pass mean."""
        return self._adapter.mover.outputs.found

    @property
    def kind(self) -> str:
        """A digest that only pools and adapters with the same filter share."""
        return self._adapter.kind

    def new_record(self, mode: Mode) -> StreamRecord:
        """Return what is kept of a stream that has shown nothing."""
        return StreamRecord(self._adapter.new_state(), mode=mode)

    def warm_up(self, largest: int) -> None:
        """Find out what is usual for every number of images that a stream may come to count.

        Args:
            largest: Images in a request, at most.
        """
        gain = self._gain
        # So many count at most, since older ones fade.
        for size in range(1, int(gain.stream.memory) + largest + 1):
            gain.normal.batches_of(size).usual(gain.threshold)

    @torch.inference_mode()
    def serve(self, requests: Sequence[tuple[StreamRecord, Tensor]]) -> list[Served]:
        """Answer requests of different streams in one pass, or in a few.

        Args:
            requests: The record of each stream and its images, which are finite.
        """
        copies = [
            (number, images, copy)
            for number, (record, images) in enumerate(requests)
            for copy in _COPIES[record.mode]
        ]
        model = self._adapter.model
        device, dtype = device_and_dtype(model, model)
        rows = _rows(copies, device)
        self._given = self._made = None
        batch = torch.cat([images for _, images, _ in copies]).to(device, dtype)
        states = [record.state for record, _ in requests]
        logits, outcomes = self._adapter.predict_streams(states, batch, rows)
        self._check(logits, len(batch), outcomes)
        return self._served(requests, logits.float().cpu(), outcomes)

    def _check(self, logits: Tensor, rows: int, outcomes: Sequence[StreamOutcome]) -> None:
        outputs = self._adapter.mover.outputs
        if outputs.of_pixels(logits) or len(logits) != rows:
            found = tuple(outputs.as_returned(logits).shape)
            raise LayerOutputError(
                "A pool serves models that return logits of shape (images, classes), (images, "
                f"labels) or (images,); found {found} for {rows} images. Say where they are with "
                "`logits=`."
            )
        if not all(each.seen for each in outcomes):
            raise LayerOutputError(
                f"A pool needs a model that calls the layer of its filter, `{self._layer}`, "
                "in every pass; this one has not."
            )

    def _served(
        self,
        requests: Sequence[tuple[StreamRecord, Tensor]],
        logits: Tensor,
        outcomes: Sequence[StreamOutcome],
    ) -> list[Served]:
        found, first, now = [], 0, time.time()
        for (record, images), outcome in zip(requests, outcomes, strict=True):
            size, copies = len(images), len(_COPIES[record.mode])
            last = first + (copies - 1) * size  # where the copies begin that are remembered
            answered, best = logits[first : first + size], logits[last : last + size]
            first += copies * size
            finite = bool(torch.isfinite(best).all())
            differ = _differing(answered, best) if copies > 1 and finite else None
            answered = self._adapter.mover.outputs.as_returned(answered).clone()
            adapted = outcome.filtered and record.mode == "on"
            if not finite:
                after = dataclasses.replace(record, skipped=record.skipped + 1)
                found.append(Served(after, answered, adapted, differ, None))
                continue
            since = record.shifted_since
            if outcome.state.alarm.shifted != record.shifted:
                since = now if outcome.state.alarm.shifted else None
            after = dataclasses.replace(
                record,
                state=outcome.state,
                images=record.images + size,
                requests=record.requests + 1,
                adapted=record.adapted + size * adapted,
                shadowed=record.shadowed + size * (differ is not None),
                differed=record.differed + (differ or 0),
                shifted_since=since,
                last_seen=now,
            )
            found.append(Served(after, answered, adapted, differ, self._look(images, last)))
        return found

    def status(self, name: str, record: StreamRecord) -> StreamStatus:
        """Say how a stream is; any thread may call this."""
        return StreamStatus(
            health=self._health(name, record),
            mode=record.mode,
            gains=tuple(self._gain.band_gains(record.state).tolist()),
            requests=record.requests,
            adapted_share=record.adapted_share,
            disagreement=record.disagreement,
            shifted_since=record.shifted_since,
            last_seen=record.last_seen,
        )

    def _health(self, name: str, record: StreamRecord) -> Health:
        facts = {"shift": 0.0} | self._adapter.facts_of(record.state)
        return Health(name, record.images, record.skipped, **facts)

    def _see_given(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._given is None:  # of the first pass, which has all images
            self._given = args[0] if args else kwargs["input"]

    def _see_made(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._made is None:
            self._made = output

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
        return self._adapter.detach()


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
