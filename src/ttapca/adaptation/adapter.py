"""`Adapter`: a model that adapts to what it is given, and can stop doing so at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn

from ttapca.adaptation.guards import CollapseGuard, GuardEvent
from ttapca.adaptation.optimisation import Mover
from ttapca.adaptation.surfaces import Surface
from ttapca.errors import AttachError, OptionError
from ttapca.fitting.attachment import detach_filter
from ttapca.support.group_norm import make_gradients_safe
from ttapca.support.modules import explained_inputs, restore_training_flags, training_flags
from ttapca.support.wrapping import Wrapper, WrapperHandle, wrap_forward, wrappers_of

Forgetting = Literal["episodic", "online", "continual"]


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

    Args:
        model: Any module that returns logits of shape (batch, classes, ...).
        surfaces: What may change.
        mover: What moves them; by default nothing does, and surfaces that compute their own state
            in the forward pass are all there is.
        forgetting: `episodic` starts afresh at each batch, `online` when `start_condition()` is
            called, `continual` never. `reset()` always does.
        guard: Watches for collapse and intervenes; episodic adaptation has no use for it.

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
    ) -> None:
        super().__init__()
        if forgetting not in get_args(Forgetting):
            raise OptionError(
                f"`forgetting` is one of {', '.join(get_args(Forgetting))}; found {forgetting!r}."
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
        self._good: list[list[list[Tensor]]] = []  # states that a window has confirmed, or will
        self._enabled = True
        self._attached = True
        self._turn = _Turn()
        self._flags = training_flags(model)
        self._handles: list[WrapperHandle] = []
        self.training = False
        done: list[Surface] = []
        try:
            for surface in surfaces:
                surface.attach(model)
                done.append(surface)
            self._handles = [wrap_forward(model, _OwnedBy(self))]
            if self.mover.needs_gradients:
                self._handles += make_gradients_safe(model)
            self.mover.bind(model, list(self.surfaces.parameters()))
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
        if not self._attached:
            raise AttachError("This adapter was detached. Make a new one with `ttapca.adapt`.")
        # An exported program is frozen: it predicts with the surfaces as they are now.
        if torch.compiler.is_exporting():
            return cast(Tensor, self.model(*inputs, **options))
        with self._turn.lock:
            if not self._enabled:
                return cast(Tensor, self.model(*inputs, **options))
            return self._adapt_to(inputs, options)

    def _adapt_to(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """Predict, adapt, and see whether the batch was broken."""
        if self.forgetting == "episodic":
            self.reset()
        for surface in self._each_surface():
            surface.start_batch()
        self.mover.start_batch()
        skipped = self.mover.skipped
        logits = self._predict(inputs, options)
        if self.mover.skipped == skipped and self._is_broken(logits):
            self.mover.skipped += 1
        if self.mover.skipped > skipped:
            for surface in self._each_surface():
                surface.forget_batch()
            self.mover.forget_batch()
        return logits

    def _is_broken(self, logits: Tensor) -> bool:
        if any(surface.left_out for surface in self._each_surface()):
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
                    logits = self.mover.output(self.model(*inputs, **options))
        return logits

    def reset(self) -> None:
        """Forget all adaptation: every surface returns, bit for bit, to where it started."""
        with self._turn.lock:
            with torch.inference_mode(False):
                for surface in self._each_surface():
                    surface.reset()
                self.mover.reset()
            self._good = []
            if self.guard is not None:
                self.guard.forget()

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
        """What `state_dict` holds beside parameters and buffers: all of the stream."""
        return {
            "surfaces": [surface.snapshot() for surface in self._each_surface()],
            "mover": self.mover.state(),
            "guard": None if self.guard is None else self.guard.state(),
            "good": self._good,
            "calls": self._calls,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on, bit for bit, where another adapter of the same kind was saved."""
        for surface, snapshot in zip(self._each_surface(), state["surfaces"], strict=True):
            surface.restore(snapshot)
        self.mover.load_state(state["mover"])
        if self.guard is not None and state["guard"] is not None:
            self.guard.load_state(state["guard"])
        self._good = state["good"]
        self._calls = state["calls"]

    def _run(self, *inputs: Any, **options: Any) -> Tensor:
        """The model with its surfaces in place; where it fails, say what its inputs are."""
        with explained_inputs((*inputs, *options.values())):
            return cast(Tensor, self.model(*inputs, **options))

    def _intervened(self, guard: CollapseGuard, logits: Tensor) -> bool:
        """Let the guard look; go back when it sees a collapse, and keep good states when not."""
        call, self._calls = self._calls, self._calls + 1
        if guard.collapsed(logits):
            self.events.append(
                GuardEvent(call, guard.action, guard.effective_classes, guard.mean_entropy)
            )
            good = self._good[:1]
            self.reset()
            if guard.action == "rollback" and good:
                for surface, snapshot in zip(self._each_surface(), good[0], strict=True):
                    surface.restore(snapshot)
            return True
        if guard.full and self._calls % guard.window == 0:
            # Two are kept: the newer may lie on the way to a collapse that is not seen yet.
            self._good = [*self._good, [s.snapshot() for s in self._each_surface()]][-2:]
        return False

    def _each_surface(self) -> list[Surface]:
        return cast("list[Surface]", list(self.surfaces))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the mover's tensors along when the adapter is moved or cast."""
        with self._turn.lock:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self.mover.apply(fn)
        return self


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


def _without_inference(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
