"""`Adapter`: a model that adapts to what it is given, and can stop doing so at any moment."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, check_option
from ttapca.adaptation.guards import CollapseGuard, GuardEvent
from ttapca.adaptation.optimisation import Mover
from ttapca.adaptation.saved_streams import read_stream, write_stream
from ttapca.adaptation.surfaces import Surface
from ttapca.errors import AttachError, LayerOutputError, OptionError, SavedStreamError
from ttapca.fitting.fitted_filter import detach_filter
from ttapca.spectral.stream import Attributes, Stream, map_tensors, tensors_in
from ttapca.support.group_norm import make_gradients_safe
from ttapca.support.modules import (
    device_and_dtype,
    explained_inputs,
    restore_training_flags,
    training_flags,
)
from ttapca.support.wrapping import Wrapper, WrapperHandle, wrap_forward, wrappers_of

Forgetting = Literal["episodic", "online", "continual"]

# Finds the logits in what a model returns.
FindLogits = Callable[[Any], Tensor]

DEFAULT_STREAM = "default"


class Adapter(nn.Module):
    """Surfaces on a model, what moves them, and when they forget.

    Calling it predicts and adapts. While it is attached, the model itself predicts with the
    adapted surfaces too; inside `disabled()` both give the untouched model's outputs, bit for bit.

    Several threads may call one adapter: they take turns, since a batch changes what the next one
    meets. That is a lock around each call, so it brings no speed; give each thread a copy
    (`copy.deepcopy(adapted)`) to compute at once. While an adapter is attached, call the model
    itself from one thread only.

    It works inside `torch.no_grad()` and `torch.inference_mode()`, and returns logits without
    gradients. Training mode plays no part: the model is put in evaluation mode, `train()` and
    `eval()` on the adapter leave it there, and `detach()` gives it its own flags back.

    One adapter can serve any number of streams, such as cameras, that share the model and know
    nothing of each other: see `stream`. `state_dict()` holds all of them, so that a restored
    adapter goes on bit for bit.

    Args:
        model: Any module that returns logits of shape (batch, classes, ...).
        surfaces: What may change.
        mover: What moves them; by default nothing does, and surfaces that compute their own state
            in the forward pass are all there is.
        forgetting: `episodic` starts afresh at each batch, `online` when `start_condition()` is
            called, `continual` never. `reset()` always does.
        guard: Watches for collapse and intervenes; episodic adaptation has no use for it.
        logits: Finds the logits in what the model returns, where that is more than one tensor:
            `lambda output: output.logits`. The adapter then returns what it finds.
        memory: After so many samples, what was seen of a stream counts 1 / e; for surfaces that
            follow a stream.

    Attributes:
        events: What the guard did, in order.

    Raises:
        OptionError: When an option makes no sense.
        AttachError: When a surface does not fit the model; the model is then as it was.

    Example:
        >>> from ttapca.adaptation.surfaces import BatchNormStatistics
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> adapted = Adapter(model, [BatchNormStatistics(alpha=1.0)])
        >>> adapted(torch.randn(5, 4)).shape
        torch.Size([5, 3])
        >>> adapted.detach() is model
        True
        >>> with Adapter(model, [BatchNormStatistics(alpha=1.0)]) as adapted:  # detached after it
        ...     logits = adapted(torch.randn(5, 4))
    """

    def __init__(
        self,
        model: nn.Module,
        surfaces: Sequence[Surface] = (),
        mover: Mover | None = None,
        *,
        forgetting: Forgetting = "episodic",
        guard: CollapseGuard | None = None,
        logits: FindLogits | None = None,
        memory: float = math.inf,
    ) -> None:
        super().__init__()
        check_option("forgetting", forgetting, OneOf(get_args(Forgetting)))
        if logits is not None and not callable(logits):
            raise OptionError(
                "`logits` is a function that finds the logits in what the model returns; found "
                f"{logits!r}."
            )
        learns = mover is not None and mover.needs_gradients
        if guard is not None and (forgetting == "episodic" or not learns):
            why = "what forgets after each batch" if learns else "what nothing learns"
            raise OptionError(
                f"A guard watches a stream for collapse, and would have no effect on {why}. Leave "
                'out `guard`, or adapt with gradients and forgetting="online".'
            )
        for surface in surfaces:
            if not isinstance(surface, Surface):
                raise OptionError(f"A surface is a `Surface`; found a {type(surface).__name__}.")
        self.model = model
        self.surfaces = nn.ModuleList(surfaces)
        self.mover = mover or Mover()
        self.forgetting: Forgetting = forgetting
        self.guard = guard
        self.events: list[GuardEvent] = []
        self._calls = 0
        self._good: tuple[dict[str, Any], ...] = ()  # states a window has confirmed, or will
        self._find_logits = logits
        self._stream = Stream(memory)
        self._current: str | None = DEFAULT_STREAM  # None only where a switch was interrupted
        self._parked: dict[str, dict[str, Any]] = {}  # the contents of all other streams
        self._enabled = True
        self._attached = True
        self._turn = _Turn()
        self._flags = training_flags(model)
        self._handles: list[WrapperHandle] = []
        self.training = False
        done: list[Surface] = []
        try:
            for surface in surfaces:
                surface.attach(model, self._stream)
                done.append(surface)
            self._stream.end_batch()  # passes count within calls of the adapter alone
            self._surface_parts = self._stream.parts  # what a guard takes back
            self._handles = [wrap_forward(model, _OwnedBy(self))]
            if self.mover.needs_gradients:
                self._handles += make_gradients_safe(model)
            self.mover.bind(model, list(self.surfaces.parameters()))
            self.mover.join(self._stream)
            if guard is not None:
                self._stream.keep("guard", Attributes(guard, guard.keeps))
                self._stream.keep("good states", Attributes(self, ("_good",)))
            model.eval()
        except BaseException:
            self._take_away(done)
            raise

    @property
    def n_parameters(self) -> int:
        """Number of parameters that gradient steps move."""
        if not self.mover.needs_gradients:
            return 0
        return sum(parameter.numel() for parameter in self.surfaces.parameters())

    @property
    def updates(self) -> int:
        """Gradient steps taken since the adapter was made."""
        return self.mover.updates

    @property
    def skipped(self) -> int:
        """Batches with NaN or infinity in them, or in what they lead to: they change no state."""
        return self.mover.skipped

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Predict, and adapt.

        Args:
            *inputs: Whatever the model takes; left as it was.
            **options: Likewise.

        Returns:
            Logits, without gradients.
        """
        return self._call(DEFAULT_STREAM, inputs, options)

    def _call(self, stream: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        if not self._attached:
            raise AttachError("This adapter was detached. Make a new one with `ttapca.adapt`.")
        # An exported program is frozen: it predicts with the surfaces as they are now.
        if torch.compiler.is_exporting():
            return self._run(*inputs, **options)
        with self._turn.lock:
            if not self._enabled:
                return self._run(*inputs, **options)
            self._switch_to(stream)
            return self._adapt_to(inputs, options)

    def _adapt_to(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """Predict and adapt; a batch that is broken, or cut off, leaves no mark on the stream."""
        if self.forgetting == "episodic":
            self._reset_current()
        for surface in self._each_surface():
            surface.start_batch()
        self._stream.start_batch(_batch_size(inputs, options))
        skipped = self.mover.skipped
        broken = True
        try:
            logits = self._predict(inputs, options)
            if self.mover.skipped == skipped and self._is_broken(logits):
                self.mover.skipped += 1
            broken = self.mover.skipped > skipped
        finally:
            self._stream.end_batch(broken=broken)
        return logits

    def _is_broken(self, logits: Tensor) -> bool:
        if self._stream.left_out:
            return True
        return isinstance(logits, Tensor) and not bool(torch.isfinite(logits).all())

    def _predict(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        if not self.mover.needs_gradients:
            with torch.no_grad():
                return self.mover.predict(self._run, *inputs, **options)
        # Gradients need tensors that were made outside of inference mode.
        with torch.inference_mode(False):
            inputs = tuple(_without_inference(value) for value in inputs)
            options = {name: _without_inference(value) for name, value in options.items()}
            with torch.enable_grad():
                logits = self.mover.predict(self._run, *inputs, **options).detach()
            if self.guard is not None and self._intervened(self.guard, logits):
                with torch.no_grad():
                    logits = self.mover.output(self._run(*inputs, **options))
        return logits

    def stream(self, name: str) -> NamedStream:
        """One of several streams that share the model, the filter and nothing else.

        Args:
            name: Of a stream; a new one starts where this adapter started.

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
            raise OptionError(f"A stream has a name, which is text; found {name!r}.")
        return NamedStream(self, name)

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of all streams, the one of the adapter itself first."""
        current = () if self._current is None else (self._current,)
        return tuple(dict.fromkeys((DEFAULT_STREAM, *self._parked, *current)))

    @property
    def kind(self) -> str:
        """Tells apart adapters whose streams cannot take each other's place."""
        parts = [type(self.mover).__name__, *(type(each).__name__ for each in self.surfaces)]
        for module in (self.model, self.surfaces):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                parts.append(f"{name} {tuple(tensor.shape)}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def kept_tensors(self) -> list[Tensor]:
        """All numbers that are kept between batches beyond the model itself."""
        own = (*self.surfaces.parameters(), *self.surfaces.buffers(), *self.mover.tensors())
        streams = tensors_in([self._stream.contents(), self._parked])
        return [each for each in (*own, *streams) if each.is_floating_point()]

    def _switch_to(self, name: str) -> None:
        if name == self._current:
            return
        with torch.inference_mode(False):
            self._park()
            if name in self._parked:
                self._stream.put(self._parked[name])
            else:
                self._stream.reset()
            self._current = name
            self._parked.pop(name, None)

    def _park(self) -> None:
        """Set the contents of the current stream apart; from here on there is none."""
        if self._current is not None:
            self._parked[self._current] = self._stream.contents()
            self._current = None

    def reset(self) -> None:
        """Forget all adaptation: every surface returns, bit for bit, to where it started.

        Named streams stay as they are; each has a `reset` of its own.
        """
        with self._turn.lock:
            self._switch_to(DEFAULT_STREAM)
            self._reset_current()

    def _reset_current(self) -> None:
        with torch.inference_mode(False):
            self._stream.reset()

    def start_condition(self) -> None:
        """Say that the data change from here on: `online` adaptation forgets, `continual` not."""
        if self.forgetting != "continual":
            self.reset()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch adaptation off for a while: outputs are those of the untouched model.

        Other threads that call the adapter wait until the block is over.
        """
        with self._turn.lock:
            enabled = self._enabled
            before = [surface.enabled for surface in self._each_surface()]
            self._enabled = False
            for surface in self._each_surface():
                surface.enabled = False
            try:
                yield
            finally:
                self._enabled = enabled
                for surface, value in zip(self._each_surface(), before, strict=True):
                    surface.enabled = value

    def detach(self) -> nn.Module:
        """Take everything away and return the model as it was; the adapter is of no use then."""
        with self._turn.lock:
            if self._attached:
                self._take_away(self._each_surface())
                self._attached = False
        return self.model

    def __enter__(self) -> Self:
        """Adapt within a `with` block; the model is as it was after it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Detach."""
        self.detach()

    def _take_away(self, surfaces: Sequence[Surface]) -> None:
        for surface in surfaces:
            surface.detach()
        for handle in self._handles:
            handle.remove()
        restore_training_flags(self._flags)

    def train(self, mode: bool = True) -> Self:
        """Accept the call and change nothing: training mode is no switch here."""
        del mode
        return self

    def extra_repr(self) -> str:
        """What `print(adapter)` shows."""
        how = f", {self.mover!r}" if self.mover.needs_gradients else ""
        return f"forgetting={self.forgetting}{how}"

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` holds beside parameters and buffers: all of all streams."""
        with self._turn.lock:
            current = self._current or DEFAULT_STREAM
            self._switch_to(current)
            streams = {**self._parked, current: self._stream.contents()}
            return {
                "kind": self.kind,
                "streams": copy.deepcopy(streams),
                "current": current,
                "updates": self.mover.updates,
                "skipped": self.mover.skipped,
                "calls": self._calls,
            }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on, bit for bit, where another adapter of the same kind was saved.

        Raises:
            SavedStreamError: It was of another kind.
        """
        if state.get("kind") != self.kind:
            raise SavedStreamError(
                "The state must be of an adapter of the same kind; found that of another. Load it "
                "with the method, the filter and the network it was saved with."
            )
        with self._turn.lock:
            self._current, self._parked = None, copy.deepcopy(state["streams"])
            self._switch_to(state["current"])
            self.mover.updates, self.mover.skipped = state["updates"], state["skipped"]
            self._calls = state["calls"]

    def _run(self, *inputs: Any, **options: Any) -> Tensor:
        """The model with its surfaces in place; where it fails, say what its inputs are."""
        with explained_inputs((*inputs, *options.values())):
            output = self.model(*inputs, **options)
        if self._find_logits is None:
            return cast(Tensor, output)
        return _found(self._find_logits, output)

    def _intervened(self, guard: CollapseGuard, logits: Tensor) -> bool:
        """Let the guard look; go back when it sees a collapse, and keep good states when not."""
        call, self._calls = self._calls, self._calls + 1
        if guard.collapsed(logits):
            self.events.append(
                GuardEvent(call, guard.action, guard.effective_classes, guard.mean_entropy)
            )
            good = self._good[:1]
            self._reset_current()
            if guard.action == "rollback" and good:
                self._stream.put(copy.deepcopy(good[0]))
            return True
        if guard.full and self._stream.batches % guard.window == 0:
            # Two are kept: the newer may lie on the way to a collapse that is not seen yet.
            state = self._stream.contents()
            moved = {name: state["parts"][name] for name in self._surface_parts}
            self._good = (*self._good, copy.deepcopy({**state, "parts": moved}))[-2:]
        return False

    def _each_surface(self) -> list[Surface]:
        return cast("list[Surface]", list(self.surfaces))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move what streams and mover hold along when the adapter is moved or cast."""
        with self._turn.lock:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self.mover.apply(fn)
            self._stream.apply(fn)
            self._parked = map_tensors(self._parked, fn)
        return self


class NamedStream:
    """One stream of an adapter that serves several; calling it predicts and adapts.

    It takes turns with all other streams of the adapter.

    Attributes:
        name: Of the stream.
    """

    def __init__(self, adapter: Adapter, name: str) -> None:
        self._adapter = adapter
        self.name = name

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """Predict, and adapt this stream; see `Adapter.forward`."""
        return self._adapter._call(self.name, inputs, options)

    def __repr__(self) -> str:
        """One line for a person."""
        seen = f"{self.samples:,} samples in {self.batches:,} batches"
        return f"NamedStream({self.name!r}, {seen}, shift {self.shift:.2f})"

    @property
    def samples(self) -> int:
        """How many samples it has seen since it started."""
        return int(self._values()["samples"])

    @property
    def batches(self) -> int:
        """How many batches."""
        return int(self._values()["batches"])

    @property
    def shift(self) -> float:
        """How surely its data have shifted, from 0 to 1; 1 where the method cannot tell."""
        return self._adapter._stream.shift_in(self._values())

    def reset(self) -> None:
        """Start it anew."""
        self._do(lambda stream: stream.reset())

    def start_condition(self) -> None:
        """Say that its data change from here on; see `Adapter.start_condition`."""
        if self._adapter.forgetting != "continual":
            self.reset()

    def drop(self) -> None:
        """Forget the stream and its name; the adapter's own starts anew instead."""
        with self._adapter._turn.lock:
            self._adapter._switch_to(DEFAULT_STREAM)
            if self.name == DEFAULT_STREAM:
                self._adapter.reset()
            self._adapter._parked.pop(self.name, None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that the stream is to a file, in one step: it is never half there.

        Args:
            path: Of the file; one that is there is replaced.
        """
        contents = self._do(lambda stream: copy.deepcopy(stream.contents()))
        write_stream(contents, self._adapter.kind, Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on, bit for bit, where a stream of this kind of adapter was saved.

        Raises:
            SavedStreamError: The file is missing, damaged, or of another kind of adapter.
        """
        with self._adapter._turn.lock:
            like = self._adapter._stream.contents()
            found = read_stream(Path(path), self._adapter.kind, like)
            device, _ = device_and_dtype(self._adapter.model, self._adapter.model)
            found = map_tensors(found, lambda tensor: tensor.to(device))
            before = self._do(lambda stream: stream.contents())
            try:
                self._do(lambda stream: stream.put(found))
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                self._do(lambda stream: stream.put(before))
                raise SavedStreamError(f"{path} is no saved stream: {error!r}.") from error

    def _values(self) -> dict[str, Any]:
        """What it holds; to look makes no stream, and leaves the current one where it is."""
        adapter = self._adapter
        with adapter._turn.lock:
            if self.name == adapter._current:
                return adapter._stream.values
            parked = adapter._parked.get(self.name)
            return adapter._stream.starts if parked is None else dict(parked["values"])

    def _do(self, what: Callable[[Stream], Any]) -> Any:
        with self._adapter._turn.lock, torch.inference_mode(False):
            self._adapter._switch_to(self.name)
            return what(self._adapter._stream)


class _OwnedBy(Wrapper):
    """Keeps an adapter where it can be found again: with its model."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Change nothing."""
        return forward(*args, **kwargs)


def detach(model: nn.Module) -> nn.Module:
    """Take off whatever is on a model: adapters, surfaces, filters.

    For when the adapter itself is lost, in a notebook say. `Adapter.detach` is the same for one.

    Args:
        model: Any module, adapted or not; parts of it may be adapted as well.

    Returns:
        The model, as it was.

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
        >>> x = torch.randn(5, 4)
        >>> plain = model(x)
        >>> logits = ttapca.adapt(model, "tent")(x)  # and nobody keeps the adapter
        >>> torch.equal(ttapca.detach(model)(x), plain)
        True
    """
    for module in model.modules():
        for wrapper in wrappers_of(module):
            if isinstance(wrapper, _OwnedBy):
                wrapper.adapter.detach()
    # Surfaces and filters that were put on without an adapter.
    for module in model.modules():
        for wrapper in wrappers_of(module):
            surface = getattr(wrapper, "surface", None)
            if isinstance(surface, Surface):
                surface.detach()
        detach_filter(module)
    return model


class _Turn:
    """Holds a lock that copies and pickles do not share: each has one of its own."""

    def __init__(self) -> None:
        # Used by `with` as it is: a context manager in Python could be interrupted with it taken.
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[_Turn], tuple[()]]:
        return _Turn, ()


def _batch_size(inputs: tuple[Any, ...], options: dict[str, Any]) -> int:
    """How many samples a model is given: the rows of the first tensor."""
    for value in (*inputs, *options.values()):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return 0


def _found(find: FindLogits, output: Any) -> Tensor:
    try:
        logits = find(output)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise LayerOutputError(
            f"`logits` finds the logits in what the model returns, a {type(output).__name__}; it "
            f"failed: {error!r}."
        ) from error
    if not isinstance(logits, Tensor):
        raise LayerOutputError(
            "`logits` finds one tensor in what the model returns; it found a "
            f"{type(logits).__name__} in a {type(output).__name__}."
        )
    return logits


def _without_inference(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
