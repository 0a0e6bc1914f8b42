"""`Adapter`: a model that adapts to its data, and can stop doing so at any moment."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, check_option
from ttapca.adaptation.expected_error import sums_after
from ttapca.adaptation.guards import CollapseGuard, GuardAction, GuardEvent, check_can_collapse
from ttapca.adaptation.health import Health, facts_of, health_of
from ttapca.adaptation.named_streams import DEFAULT_STREAM, NamedStream, Streams
from ttapca.adaptation.optimisation import Predictor
from ttapca.adaptation.shift_alarm import ShiftAlarm, ShiftWatch
from ttapca.adaptation.surfaces import SpectralGains, Surface
from ttapca.adaptation.surfaces.filter_gains import known_classes
from ttapca.errors import AttachError, OptionError, SavedStreamError
from ttapca.fitting.attachment import detach_filter
from ttapca.spectral.stream import Attributes, Stream, tensors_in
from ttapca.spectral.stream_batch import ImageRows, StreamBatch
from ttapca.spectral.stream_state import StreamState
from ttapca.support.inputs import explained_inputs, first_samples, mapped_tensors
from ttapca.support.modules import (
    check_model,
    device_and_dtype,
    restore_training_flags,
    training_flags,
)
from ttapca.support.norm_layers import make_gradients_safe
from ttapca.support.outputs import FindLogits, OutputKind, Outputs
from ttapca.support.tensors import not_below_float32
from ttapca.support.wrapping import EvaluationMode, Patches, finally_do, surely, wrappers_of

Forgetting = Literal["episodic", "online", "continual"]


@dataclass(frozen=True, eq=False)
class StreamOutcome:
    """The result of a batch of several streams for one of them."""

    state: StreamState  # of the stream after the batch
    batch: StreamBatch  # of its last pass
    number: int  # of the stream in that batch

    @property
    def seen(self) -> bool:
        """Whether images of the stream have reached a filter."""
        return 0 in self.batch.scalings

    @property
    def filtered(self) -> bool:
        """Whether a filter has changed images of the stream."""
        groups = enumerate(self.batch.groups)
        own = [group for group, (stream, _) in groups if stream == self.number]
        return any(
            bool((each.gains[own] != 1).any())
            or (each.offset is not None and bool(each.offset[own].any()))
            for each in self.batch.scalings.values()
        )

    def plausible(self, samples: int) -> Tensor:
        """Return which of the last samples of the stream some shift explains, (samples,)."""
        implausible, rows = self.batch.implausible, self.batch.rows
        if implausible is None or rows is None:
            return torch.ones(samples, dtype=torch.bool)
        return ~implausible[rows.stream == self.number][-samples:].cpu()


class Adapter(nn.Module):
    """Surfaces on a model, a predictor that may move them, and when they forget.

    Calling it predicts and adapts. While it is attached, the model itself predicts with the
    adapted surfaces too; inside `disabled()` both give the untouched model's outputs, bit for bit.
    Logits have no gradients. Training mode has no effect: the model stays in evaluation mode, and
    `detach()` restores its own flags.

    Several threads may call one adapter, and take turns; to compute in parallel, give each thread
    a copy (`copy.deepcopy(adapted)`). Call the model itself from one thread only.

    An interrupt (Ctrl-C) at any line leaves the adapter in place and working, or the model as it
    was; a batch that it cuts off leaves no mark. One adapter can serve any number of independent
    streams: see `stream`. `state_dict()` holds all of them, and restores them bit for bit.

    Args:
        model: Any module; most predictors want logits of shape (batch, classes, ...).
        surfaces: The parts of the model that may change.
        predictor: Runs the model and may move the surfaces; by default nothing moves them.
        forgetting: `episodic` starts afresh at each batch, `online` when `start_condition()` is
            called, `continual` never. `reset()` always does.
        guard: Watches for collapse and intervenes; not for episodic adaptation.
        logits: Finds the logits in any other output: `lambda output: output.logits`.
        outputs: Their meaning; by default one logit is binary, and more exclude each other.
        memory: Number of samples after which older ones count 1 / e in a stream.
        compare: Whether the untouched network predicts every batch as well, for `health`.
        on_shift: A function that is given the `Health` of a stream when its data begin to shift,
            and when that is over; or a `ShiftAlarm`. For surfaces with closed-form gains.

    Example:
        >>> from ttapca.adaptation.surfaces import BatchNormStatistics
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> adapted = Adapter(model, [BatchNormStatistics(alpha=1.0)])
        >>> adapted(torch.randn(5, 4)).shape
        torch.Size([5, 3])
        >>> adapted.detach() is model
        True
    """

    def __init__(
        self,
        model: nn.Module,
        surfaces: Sequence[Surface] = (),
        predictor: Predictor | None = None,
        *,
        forgetting: Forgetting = "episodic",
        guard: CollapseGuard | GuardAction | None = None,
        logits: FindLogits | None = None,
        outputs: OutputKind | None = None,
        memory: float = math.inf,
        on_shift: ShiftAlarm | Callable[[Health], object] | None = None,
        compare: bool = False,
    ) -> None:
        super().__init__()
        check_model(model)
        if on_shift is not None and not isinstance(on_shift, ShiftAlarm):
            on_shift = ShiftAlarm(on_shift)
        guard = CollapseGuard(guard) if isinstance(guard, str) else guard
        check_option("forgetting", forgetting, OneOf(get_args(Forgetting)))
        for surface in surfaces:
            if not isinstance(surface, Surface):
                raise OptionError(f"A surface is a `Surface`; found a {type(surface).__name__}.")
        predictor = predictor or Predictor()
        predictor.outputs = Outputs(outputs, logits, predictor.reads)
        if guard is not None:
            check_can_collapse(predictor, forgetting)
        self.model, self.predictor, self.guard = model, predictor, guard
        self.surfaces = nn.ModuleList(surfaces)
        self.forgetting: Forgetting = forgetting
        self.events: list[GuardEvent] = []  # interventions of the guard, in order
        self.training = False
        self._surfaces = list(surfaces)  # the same, with their type
        self._streams = Streams(memory)
        self._calls, self._enabled, self._attached = 0, True, True
        self._flags = training_flags(model)
        self._patches = Patches()
        stream = self.hub
        try:
            # First, so that `ttapca.detach` finds the adapter however far this comes.
            self._patches.wrap(model, EvaluationMode([module for module, _ in self._flags], self))
            with torch.inference_mode(False):  # gradients need tensors that are made outside of it
                for surface in surfaces:
                    surface.attach(model, stream)
            stream.end_batch()  # from here on, only passes within calls of the adapter count
            self._surface_parts = stream.parts  # a guard undoes these, not the parts that follow
            if predictor.needs_gradients:
                make_gradients_safe(model, self._patches)
            predictor.bind(model, list(self.surfaces.parameters()))
            predictor.join(stream)
            filters = [each for each in surfaces if isinstance(each, SpectralGains)]
            gains = [each.closed_form for each in filters if each.closed_form is not None]
            classes = known_classes(each.fitted for each in filters)
            self.watch = ShiftWatch(on_shift, gains, None if classes is None else classes.shares)
            known = (each.fitted.temperature_ for each in filters)
            self.temperature = next((each for each in known if each is not None), None)
            self.compare = compare
            if compare and (self.temperature is None or stream.start is None):
                raise OptionError(
                    "`compare=True` estimates how often both networks are wrong, and needs "
                    "closed-form gains of a filter that was fitted with `labelled=`. Fit it again "
                    "with labelled samples, or leave `compare` out."
                )
            if guard is not None:
                stream.keep("guard", Attributes(guard, guard.keeps))
                stream.keep("good states", Attributes(guard, ("_good",)))
            model.eval()
        except BaseException:
            self.detach()
            raise

    @property
    def n_parameters(self) -> int:
        """Number of parameters that gradient steps move."""
        if not self.predictor.needs_gradients:
            return 0
        return sum(parameter.numel() for parameter in self.surfaces.parameters())

    @property
    def updates(self) -> int:
        """Number of gradient steps since the adapter was made."""
        return self.predictor.updates

    @property
    def skipped(self) -> int:
        """Number of batches that led to NaN or infinity, and so changed no state."""
        return self.predictor.skipped

    @property
    def health(self) -> Health:
        """The health of the default stream, computed now; named streams have their own."""
        return health_of(self, DEFAULT_STREAM)

    @property
    def hub(self) -> Stream:
        """The stream that is in place, which surfaces and predictor read and write."""
        return self._streams.stream

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Predict, and adapt: return logits, without gradients, for the arguments of the model."""
        return self.predict_for(DEFAULT_STREAM, inputs, options)

    def predict_for(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """Predict, and adapt the stream of this name."""
        if not self._attached:
            raise AttachError("This adapter was detached. Make a new one with `ttapca.adapt`.")
        # An exported program is frozen: it predicts with the surfaces as they are now. One that
        # goes on adapting is made by `ttapca.serving.export_onnx`.
        if torch.compiler.is_exporting():
            return self._run_plain(*inputs, **options)
        answer = functools.partial(self._answer, name, inputs, options)
        # However a call ends, modes of torch are as before, and a batch that is cut off has left no
        # mark.
        for undo in (
            self.hub.undo_batch,
            functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        ):
            answer = functools.partial(surely, answer, then=undo)
        with self._streams.lock:
            return answer()

    def _answer(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        if not self._enabled:
            return self._run_plain(*inputs, **options)
        samples = first_samples((*inputs, *options.values()))
        size = None if samples is None else len(samples)
        if size == 0:  # there is nothing to learn from it, and no mean that could be taken
            with self.disabled(), torch.no_grad():
                return self._run_plain(*inputs, **options)
        if name != self._streams.current:
            self._streams.switch_to(name)
        untouched = None
        if self.compare:
            with self.disabled(), torch.no_grad():
                untouched = self._run(*inputs, **options)
        stream = self.hub
        if self.forgetting == "episodic":
            with torch.inference_mode(False):
                stream.forget()
        stream.start_batch(size or 0)
        skipped, updates = self.predictor.skipped, self.predictor.updates
        logits = self._predict(inputs, options)
        left_out = stream.left_out or (stream.batch is not None and stream.batch.left_out)
        skip = self.predictor.skipped > skipped or left_out or not _is_finite(logits)
        if skip:
            self.predictor.skipped = skipped + 1  # a method may have counted single images
        news = not skip and self._looked(logits)
        if not skip and stream.batch is not None and self.temperature is not None:
            seen, plain = (self._seen(stream.batch, each) for each in (logits, untouched))
            self._note_errors(stream.batch, 0, seen, plain)
        returned: Tensor = self.predictor.outputs.as_returned(logits)
        stream.end_batch(skipped=skip)
        stepped = self.predictor.updates > updates
        spoilt = skip and not _are_finite(stream.contents()["parts"])
        if spoilt or (skip and stepped and _are_finite((inputs, options))):
            # Not the batch was broken, a step went too far, this one's or that of the batch before.
            # Undone, it may go too far again at every later batch; the source is a safe place.
            with torch.inference_mode(False):
                stream.forget()
        if news:  # only now: whatever the function does, the batch is part of the stream
            self.watch.tell(health_of(self, name))
        return returned

    def _looked(self, logits: Tensor) -> bool:
        """Let the alarm look at a batch; return whether a shift began or ended."""
        batch = self.hub.batch
        if batch is None or self.watch.alarm is None:
            return False
        return self.watch.look(batch, 0, self._seen(batch, logits))

    def _seen(self, batch: StreamBatch, logits: Tensor | None) -> Tensor | None:
        """Return the logits of samples that count, if classes exclude each other."""
        if logits is None or not self.predictor.outputs.exclusive:
            return None
        if batch.rows is None:
            return logits
        return logits[batch.rows.counted] if len(logits) == batch.size else None

    def _note_errors(
        self, batch: StreamBatch, number: int, logits: Tensor | None, untouched: Tensor | None
    ) -> None:
        """Let a stream note how sure the adapted predictions of its samples are."""
        temperature = self.temperature
        if temperature is not None and logits is not None and logits.dim() > 1:
            before = batch.states[number].errors
            batch.errors[number] = sums_after(before, logits, untouched, temperature)

    def _predict(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        if not self.predictor.needs_gradients:
            with torch.no_grad():
                return self.predictor.predict(self._run, *inputs, **options)
        # Gradients need tensors that were made outside of inference mode.
        with torch.inference_mode(False):
            inputs = mapped_tensors(inputs, _without_inference)
            options = mapped_tensors(options, _without_inference)
            # Autocast would keep its casts until its block ends, and so run the model with weights
            # as they were before they were moved, or exchanged.
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(False)
            with torch.enable_grad():
                logits = self.predictor.predict(self._run, *inputs, **options).detach()
            if self.guard is not None:
                call, self._calls = self._calls, self._calls + 1
                event = self.guard.intervene(self.hub, logits, call, self._surface_parts)
                if event is not None:
                    self.events.append(event)
                    with torch.no_grad():
                        logits = self.predictor.output(self._run(*inputs, **options))
        return logits

    def _run(self, *inputs: Any, **options: Any) -> Tensor:
        """Run the model with its surfaces in place; return logits as the predictor reads them."""
        logits: Tensor = self.predictor.outputs(self._output(*inputs, **options))
        return logits

    def _run_plain(self, *inputs: Any, **options: Any) -> Tensor:
        logits: Tensor = self.predictor.outputs.plain(self._output(*inputs, **options))
        return logits

    def _output(self, *inputs: Any, **options: Any) -> Any:
        try:
            return self.model(*inputs, **options)
        except Exception:
            with explained_inputs((*inputs, *options.values())):
                raise

    def new_state(self) -> StreamState:
        """Return the state of a stream before its first image."""
        if self.hub.start is None:
            raise OptionError(
                "Streams have states if a filter has closed-form gains; this method has none. "
                "Adapt with `wiener`, `match` or `two-sided`."
            )
        return self.hub.start

    def predict_streams(
        self, states: Sequence[StreamState], images: Tensor, rows: ImageRows
    ) -> tuple[Tensor, list[StreamOutcome]]:
        """Predict images of several streams in one pass, and adapt to each stream.

        For methods without gradient steps, whose streams are states. These come in and go out: the
        named streams of the adapter are not touched. Images of one stream are in order of arrival;
        `rows` has the stream of each, and how it counts. Logits are as the predictor reads them.
        """
        stream = self.hub
        alike = len(states) == 1 and bool((rows.counted & rows.filtered).all())
        batch = StreamBatch(
            states,
            self.new_state(),
            memory=stream.memory,
            size=len(images),
            rows=None if alike else rows,  # a single stream is served in less time
        )

        def run(chosen: Tensor | None) -> Tensor:
            return self._run(images if chosen is None else images[chosen])

        gradients = functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())
        with self._streams.lock, finally_do(gradients), finally_do(stream.undo_batch):
            torch.set_grad_enabled(False)
            stream.batch = batch
            logits, last = self.predictor.predict_streams(run, batch)
            # Of other outputs, such as several for each image, an alarm sees no classes.
            exclusive = self.predictor.outputs.exclusive and len(logits) == batch.size
            for number, (own, place) in enumerate(last):
                counted = (rows.stream == number) & rows.counted
                if batch.implausible is not None:
                    counted &= ~batch.implausible
                self.watch.look(own, place, logits[counted] if exclusive else None)
                if exclusive:
                    self._note_errors(own, place, logits[counted & rows.filtered], None)
            finished = {own: own.finish() for own in {own for own, _ in last}}
        return logits, [StreamOutcome(finished[own][place], own, place) for own, place in last]

    def facts_of(self, state: StreamState | None) -> dict[str, Any]:
        """Return the facts about a stream of this state, under names of `Health`."""
        return facts_of(self, state)

    def stream(self, name: str) -> NamedStream:
        """Return one of several streams, which share only the model and the filter.

        A stream with a new name starts where this adapter started.

        Example:
            >>> from ttapca.adaptation.surfaces import BatchNormStatistics
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            >>> adapted = Adapter(model, [BatchNormStatistics()], forgetting="online")
            >>> camera = adapted.stream("camera-7")
            >>> logits = camera(torch.randn(5, 4))
            >>> adapted.streams, camera.samples
            (('default', 'camera-7'), 5)
        """
        if not isinstance(name, str) or not name:
            raise OptionError(f"The name of a stream must be text, not empty; found {name!r}.")
        return NamedStream(self, self._streams, name)

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of all streams, the adapter's default stream first."""
        return self._streams.names

    def reset(self) -> None:
        """Let the default stream start anew, bit for bit; named streams stay as they are."""
        self.stream(DEFAULT_STREAM).reset()

    def start_condition(self) -> None:
        """Say that the data change from here on; unless it is `continual`, adaptation forgets."""
        self.stream(DEFAULT_STREAM).start_condition()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Give the outputs of the untouched model in the block; calls of other threads wait."""
        with self._streams.lock:
            before = self._enabled, [surface.enabled for surface in self._surfaces]
            with finally_do(functools.partial(self._switch, *before)):
                self._switch(False, [False] * len(self._surfaces))
                yield

    def _switch(self, enabled: bool, surfaces: Sequence[bool]) -> None:
        self._enabled = enabled
        for surface, each in zip(self._surfaces, surfaces, strict=True):
            surface.enabled = each

    def detach(self) -> nn.Module:
        """Take everything away and return the model as it was; the adapter cannot be used again."""
        with self._streams.lock:
            surely(self._take_away, then=self._take_away)
        return self.model

    def _take_away(self) -> None:
        if self._attached:
            for surface in self._surfaces:
                # One that is on another model was refused, and stays there.
                if getattr(surface, "stream", None) is self.hub:
                    surface.detach()
            restore_training_flags(self._flags)
            self._patches.remove()  # last, so that `ttapca.detach` finds the adapter until the end
            self._attached = False

    def __enter__(self) -> Self:
        """Adapt within a `with` block; after it the model is as it was."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Detach."""
        self.detach()

    def train(self, mode: bool = True) -> Self:
        """Accept the call and change nothing: training mode has no effect here."""
        del mode
        return self

    def extra_repr(self) -> str:
        """Return what `print(adapter)` shows."""
        how = f", {self.predictor!r}" if self.predictor.needs_gradients else ""
        return f"forgetting={self.forgetting}{how}"

    @property
    def kind(self) -> str:
        """A digest that two adapters share only if they can exchange streams."""
        parts = [self.predictor.kind, *(type(each).__name__ for each in self._surfaces)]
        for module in (self.model, *self._surfaces):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                parts.append(f"{name} {tuple(tensor.shape)}")
        for surface in self._surfaces:
            if isinstance(surface, SpectralGains):
                fitted = surface.fitted
                own = [fitted.layer, str(fitted.shape)]
                for tensor in (fitted.center_, fitted.singular_values_):
                    own.append(hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest())
                parts.append(_digest(own))
        return _digest(parts)

    def kept_tensors(self) -> list[Tensor]:
        """Return all floating-point tensors kept between batches beyond the model itself."""
        own = (*self.surfaces.parameters(), *self.surfaces.buffers(), *self.predictor.tensors())
        streams = tensors_in([self.hub.contents(), self._streams.parked])
        return [each for each in (*own, *streams) if each.is_floating_point()]

    def get_extra_state(self) -> dict[str, Any]:
        """Return all streams, whole, for `state_dict`."""
        with self._streams.lock:
            return {
                "kind": self.kind,
                "streams": self._streams.to_tensors(self.kind),
                "current": self._streams.current,
                "updates": self.predictor.updates,
                "skipped": self.predictor.skipped,
                "calls": self._calls,
            }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue, bit for bit, where another adapter of the same kind was saved."""
        if state.get("kind") != self.kind:
            raise SavedStreamError(
                "The state must be of an adapter of the same kind; found that of another. Load it "
                "with the method, the filter and the network it was saved with."
            )
        with self._streams.lock:
            device, _ = device_and_dtype(self.model, self.model)
            self._streams.put_tensors(state["streams"], state["current"], self.kind, device)
            self.predictor.updates, self.predictor.skipped = state["updates"], state["skipped"]
            self._calls = state["calls"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the tensors of streams and predictor along when the adapter is moved or cast."""
        with self._streams.lock:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self.predictor.apply(fn)
            self._streams.apply(not_below_float32(fn))
        return self


def detach(model: nn.Module) -> nn.Module:
    """Take everything off a model: adapters, surfaces, filters.

    Return the model as it was. It may be any module, adapted or not, also in parts. If the adapter
    is there still, use `Adapter.detach`.

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
        >>> x = torch.randn(5, 4)
        >>> plain = model(x)
        >>> logits = ttapca.adapt(model, "tent")(x)  # and the adapter is not kept
        >>> torch.equal(ttapca.detach(model)(x), plain)
        True
    """

    def detach_all() -> None:
        for module in model.modules():
            for wrapper in wrappers_of(module):
                if isinstance(wrapper, EvaluationMode) and isinstance(wrapper.owner, Adapter):
                    wrapper.owner.detach()
        # Surfaces and filters that were put on without an adapter.
        for module in model.modules():
            # Either kind; nn.Module offers no public way to list its hooks.
            for found in (*wrappers_of(module), *list(module._forward_pre_hooks.values())):
                surface = getattr(found, "surface", None)
                if isinstance(surface, Surface):
                    surface.detach()
            detach_filter(module)

    surely(detach_all, then=detach_all)
    return model


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_finite(logits: Any) -> bool:
    return not isinstance(logits, Tensor) or bool(torch.isfinite(logits).all())


def _are_finite(tree: Any) -> bool:
    return all(map(_is_finite, tensors_in(tree)))


def _without_inference(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
