"""One forward pass over the images of many streams, each adapted to by itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca.adaptation.adapter import Adapter, StreamOutcome
from ttapca.adaptation.auto_mode import judged
from ttapca.adaptation.expected_error import sums_after
from ttapca.adaptation.health import Health
from ttapca.adaptation.optimisation import Predictor
from ttapca.adaptation.shift_alarm import ShiftAlarm
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import AttachError, LayerOutputError
from ttapca.methods.wiener import Wiener
from ttapca.networks.evaluation import EvaluatedKind
from ttapca.serving.request_queue import Answer
from ttapca.serving.stream_record import Mode, StreamRecord, StreamStatus
from ttapca.spectral.stream_batch import ImageRows
from ttapca.support.modules import device_and_dtype, find_layer
from ttapca.support.outputs import FindLogits

# Share of an image's variance that may be left when its pixels are found from the filter's input.
UNEXPLAINED = 1e-3
Pixels = NDArray[np.uint8]


class FilteredImage(NamedTuple):
    """An image, and the input and output of the filter for it, each (channels, height, width)."""

    image: Tensor
    given: Tensor
    made: Tensor

    def pictures(self) -> tuple[Pixels, Pixels] | None:
        """Return a picture before and after the filter, uint8, (height, width, 3), or None."""
        # The filter sees normalised images; least squares for each channel find the way back.
        if self.image.dim() != 3 or self.image.shape[0] not in (1, 3):
            return None
        pixels, given, made = (each.detach().double().flatten(1) for each in self)
        mean, centre = pixels.mean(1, keepdim=True), given.mean(1, keepdim=True)
        variance = (given - centre).square().sum(1, keepdim=True).clamp(min=1e-12)
        slope = ((given - centre) * (pixels - mean)).sum(1, keepdim=True) / variance
        left = pixels - mean - slope * (given - centre)
        if float(left.square().sum()) > UNEXPLAINED * float((pixels - mean).square().sum()) + 1e-9:
            return None
        after = mean + slope * (made - centre)
        return _picture(pixels.reshape(self.image.shape)), _picture(after.reshape(self.image.shape))


def _picture(pixels: Tensor) -> Pixels:
    levels = (255 * pixels.clamp(0, 1)).round().to(torch.uint8).expand(3, -1, -1)
    return np.ascontiguousarray(levels.permute(1, 2, 0).numpy())


# Of one request: the record of its stream after the pass, the answer, and its first image, or None
# if the filter acts on something else.
Predicted: TypeAlias = tuple[StreamRecord, Answer, FilteredImage | None]
Copy: TypeAlias = tuple[bool, bool]  # does the stream remember the image, and is it filtered?
# The copies of an image that go through the network. The first one is answered, the last one is
# remembered: in shadow and auto these are two, and a stream that is off is watched.
COPIES: dict[Mode, tuple[Copy, ...]] = {
    "off": ((True, False),),
    "shadow": ((False, False), (True, True)),
    "auto": ((False, False), (True, True)),
    "on": ((True, True),),
}


class BatchedNetwork:
    """A network that adapts to many streams as `wiener` does; one thread at a time may call it."""

    def __init__(
        self,
        model: nn.Module,
        method: Wiener,
        *,
        logits: FindLogits | None = None,
        outputs: EvaluatedKind | None = None,
    ) -> None:
        made = method.for_outputs(outputs).assemble()
        predictor = made.predictor or Predictor()
        if predictor.reads == "nothing":
            predictor.reads = "probabilities"
        self._adapter = Adapter(
            model,
            made.surfaces,
            predictor,
            forgetting="online",
            logits=logits,
            outputs=outputs,
            memory=made.memory,
            on_shift=ShiftAlarm(lambda _: None),  # the alarm is kept in the state of a stream
        )
        self.kind = self._adapter.kind  # that only pools and adapters with this filter share
        surface = next(each for each in made.surfaces if isinstance(each, SpectralGains))
        gain = surface.closed_form
        if gain is None or surface.filter is None:  # for type checkers
            raise AttachError("The filter has lost its gains.")
        self._layer, self._gain = surface.layer, gain
        self._given: Tensor | None = None  # input and output of the filter in the first pass
        self._made: Tensor | None = None
        layer = find_layer(model, surface.layer)
        self._hooks = [
            layer.register_forward_pre_hook(self._keep_given, prepend=True, with_kwargs=True),
            surface.filter.register_forward_hook(self._keep_made),
        ]

    def new_record(self, mode: Mode) -> StreamRecord:
        """Return the record of a new stream."""
        return StreamRecord(self._adapter.new_state(), mode=mode)

    def warm_up(self, largest: int) -> None:
        """Calibrate the gains for every number of images that a stream may come to count."""
        gain = self._gain
        most = int(gain.stream.memory) + largest  # older images fade
        for size in range(1, most + 1):
            gain.normal.batches_of(size).normal_range(gain.threshold)

    @torch.inference_mode()
    def predict(self, requests: Sequence[tuple[str, StreamRecord, Tensor]]) -> list[Predicted]:
        """Answer requests of different streams, given names, records and finite images."""
        copies = [
            (number, images, copy)
            for number, (_, record, images) in enumerate(requests)
            for copy in COPIES[record.mode]
        ]
        model = self._adapter.model
        device, dtype = device_and_dtype(model, model)
        self._given = self._made = None
        batch = torch.cat([images for _, images, _ in copies]).to(device, dtype)
        states = [record.state for _, record, _ in requests]
        logits, outcomes = self._adapter.predict_streams(states, batch, _rows(copies, device))
        rows, outputs = len(batch), self._adapter.predictor.outputs
        if outputs.of_pixels(logits) or len(logits) != rows:
            shape = tuple(outputs.as_returned(logits).shape)
            raise LayerOutputError(
                "A pool serves models that return logits of shape (images, classes) or (images,); "
                f"found {shape} for {rows} images. Say where they are with `logits=`."
            )
        if not all(each.seen for each in outcomes):
            raise LayerOutputError(
                f"A model must call the layer of its filter, `{self._layer}`, in every pass."
            )
        logits, first, found = logits.float().cpu(), 0, []
        for (name, record, images), outcome in zip(requests, outcomes, strict=True):
            count = len(COPIES[record.mode]) * len(images)
            own = logits[first : first + count]
            after, differ = self._after(record, len(images), own, outcome)
            kept = None if after.skipped > record.skipped else self._image(images, first + count)
            # Numbers of the adapted network that are not finite differ from nothing.
            adapting = after.adapting and (record.mode == "on" or differ is not None)
            chosen = own[-len(images) :] if adapting else own[: len(images)]
            answer = Answer(
                logits=outputs.as_returned(chosen).clone(),
                outputs=outputs.found,
                adapted=outcome.filtered and adapting,
                differ=differ,
                glance=after.glance(name),
                _status=partial(self.status, name, after),
            )
            found.append((after, answer, kept))
            first += count
        return found

    def _after(
        self, record: StreamRecord, size: int, logits: Tensor, outcome: StreamOutcome
    ) -> tuple[StreamRecord, int | None]:
        answered, remembered = logits[:size], logits[-size:]
        if not torch.isfinite(remembered).all():
            return dataclasses.replace(record, skipped=record.skipped + 1), None
        differ, compared = None, record.mode in ("shadow", "auto")
        if compared:  # images with another class, or another label
            others = answered.argmax(1) != remembered.argmax(1)
            differ = int(others.reshape(size, -1).any(1).sum())
        state, auto = outcome.state, None
        temperature = self._adapter.temperature
        if compared and temperature is not None and answered.dim() > 1:
            kept = outcome.plausible(size)
            both = remembered[kept], answered[kept]
            errors = torch.stack([state.errors[0], sums_after(state.errors, *both, temperature)[1]])
            if record.mode == "auto" and answered.dim() == 2:
                auto = judged(state.auto, *both, temperature)
            state = dataclasses.replace(state, errors=errors)
        since, now = record.shifted_since, time.time()
        if outcome.state.alarm.shifted != record.shifted:
            since = now if outcome.state.alarm.shifted else None
        record = dataclasses.replace(record, state=dataclasses.replace(state, auto=auto))
        after = dataclasses.replace(
            record,
            images=record.images + size,
            requests=record.requests + 1,
            adapted=record.adapted + size * (outcome.filtered and record.adapting),
            shadowed=record.shadowed + size * (differ is not None),
            differed=record.differed + (differ or 0),
            shifted_since=since,
            last_seen=now,
        )
        return after, differ

    def status(self, name: str, record: StreamRecord) -> StreamStatus:
        """Return how a stream is; any thread may call this."""
        facts = {"shift": 0.0} | self._adapter.facts_of(record.state)
        return StreamStatus(
            health=Health(name, record.images, record.skipped, **facts),
            gains=tuple(self._gain.band_gains(record.state).tolist()),
            **record.counts(),
        )

    def _keep_given(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._given is None:  # of the first pass, which has all images
            self._given = args[0] if args else kwargs["input"]

    def _keep_made(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._made is None:
            self._made = output

    def _image(self, images: Tensor, end: int) -> FilteredImage | None:
        given, made, row = self._given, self._made, end - len(images)
        if given is None or made is None or given.shape[1:] != images.shape[1:]:
            return None
        kept = (each[row].float().cpu().clone() for each in (given, made))
        return FilteredImage(images[0].clone(), *kept)

    def detach(self) -> nn.Module:
        """Take the filter off the model, and return the model as it was."""
        for hook in self._hooks:
            hook.remove()
        return self._adapter.detach()


def _rows(copies: Sequence[tuple[int, Tensor, Copy]], device: torch.device) -> ImageRows:
    sizes = torch.tensor([len(images) for _, images, _ in copies])
    columns = zip(*((number, *copy) for number, _, copy in copies), strict=True)
    return ImageRows(*(torch.tensor(each).repeat_interleave(sizes).to(device) for each in columns))
