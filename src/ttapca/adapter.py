"""`Adapter`: a model that adapts to what it is given, and can stop doing so at any moment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttapca.errors import AttachError, OptionError
from ttapca.modules import restore_training_flags, training_flags
from ttapca.objectives import Objective
from ttapca.surfaces import Surface

Forgetting = Literal["episodic", "online", "continual"]
Logits = Literal["before", "after"]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

DEFAULT_LEARNING_RATE = 1e-3


class Adapter(nn.Module):
    """Surfaces on a model, what moves them, and when they forget.

    Calling it predicts and adapts. While it is attached, the model itself predicts with the
    adapted surfaces too; inside `disabled()` both give the untouched model's outputs, bit for bit.

    It works inside `torch.no_grad()` and `torch.inference_mode()`, and returns logits without
    gradients. Training mode plays no part: the model is put in evaluation mode, `train()` and
    `eval()` on the adapter leave it there, and `detach()` gives it its own flags back.

    Args:
        model: Any module that returns logits of shape (batch, classes, ...).
        surfaces: What may change.
        objective: A scalar of the logits that gradient steps lower; None when no step is taken.
        optimizer: Makes the optimiser from the surfaces' parameters; Adam by default.
        steps: Gradient steps on each batch.
        forgetting: `episodic` starts afresh at each batch, `online` when `start_condition()` is
            called, `continual` never. `reset()` always does.
        logits: Returned from the forward pass `before` the last update, as TENT does, or from one
            more `after` it, as in the paper.

    Attributes:
        updates: Gradient steps taken since the adapter was made.
        skipped: Batches whose update was skipped because its loss or gradient was not finite.

    Raises:
        OptionError: When an option makes no sense.
        AttachError: When a surface does not fit the model; the model is then as it was.

    Example:
        >>> from ttapca.surfaces import BatchNormStatistics
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
        objective: Objective | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        forgetting: Forgetting = "episodic",
        logits: Logits = "after",
    ) -> None:
        super().__init__()
        _check_choice("forgetting", forgetting, Forgetting)
        _check_choice("logits", logits, Logits)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise OptionError(f"`steps` is a whole number of at least 1; found {steps!r}.")
        for surface in surfaces:
            if not isinstance(surface, Surface):
                raise OptionError(f"A surface is a `Surface`; found a {type(surface).__name__}.")
        self.model = model
        self.surfaces = nn.ModuleList(surfaces)
        self.objective = objective
        self.steps = steps
        self.forgetting: Forgetting = forgetting
        self.logits: Logits = logits
        self.updates = 0
        self.skipped = 0
        self._enabled = True
        self._attached = True
        self._make_optimizer = optimizer or adam()
        self._flags = training_flags(model)
        done: list[Surface] = []
        try:
            for surface in surfaces:
                surface.attach(model)
                done.append(surface)
            self._optimizer = self._fresh_optimizer()
        except BaseException:
            for surface in done:
                surface.detach()
            raise
        model.eval()
        self.training = False

    @property
    def n_parameters(self) -> int:
        """Number of parameters that gradient steps move."""
        return sum(parameter.numel() for parameter in self._parameters_to_move())

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
        if not self._enabled or torch.compiler.is_exporting():
            return self._predict(inputs, options)
        if self._optimizer is None:
            with torch.no_grad():
                return self._predict(inputs, options)
        # Gradients need tensors that were made outside of inference mode.
        with torch.inference_mode(False):
            if self.forgetting == "episodic":
                self.reset()
            inputs = tuple(_without_inference(value) for value in inputs)
            options = {name: _without_inference(value) for name, value in options.items()}
            return self._adapt(inputs, options).detach()

    def reset(self) -> None:
        """Forget all adaptation: every surface returns, bit for bit, to where it started."""
        with torch.inference_mode(False):
            for surface in self._each_surface():
                surface.reset()
            self._optimizer = self._fresh_optimizer()

    def start_condition(self) -> None:
        """Say that the data change from here on: `online` adaptation forgets, `continual` not."""
        if self.forgetting != "continual":
            self.reset()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch adaptation off for a while: outputs are those of the untouched model."""
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
        if self._attached:
            for surface in self._each_surface():
                surface.detach()
            restore_training_flags(self._flags)
            self._attached = False
        return self.model

    def train(self, mode: bool = True) -> Self:
        """Accept the call and change nothing: training mode is no switch here."""
        del mode
        return self

    def extra_repr(self) -> str:
        """What `print(adapter)` shows."""
        if self.objective is None:
            return f"forgetting={self.forgetting}"
        return f"forgetting={self.forgetting}, steps={self.steps}, logits={self.logits}"

    def _predict(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        logits: Tensor = self.model(*inputs, **options)
        return logits

    def _adapt(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        for _ in range(self.steps):
            with torch.enable_grad():
                logits = self._predict(inputs, options)
                if not self._update(logits):
                    # Nothing moved, so further steps and a forward pass would repeat this one.
                    return logits
        if self.logits == "before":
            return logits
        with torch.no_grad():
            return self._predict(inputs, options)

    def _update(self, logits: Tensor) -> bool:
        """Take one gradient step; return False, with all state as it was, if it is not finite."""
        if self.objective is None or self._optimizer is None:
            return False
        loss = self.objective(logits)
        if not loss.requires_grad:
            raise AttachError(
                "Gradients must reach the adapted parameters; those of this model do not: its "
                "forward pass detaches them or runs without gradients."
            )
        parameters = self._parameters_to_move()
        gradients = torch.autograd.grad(loss, parameters)
        if not all(bool(torch.isfinite(value).all()) for value in (loss, *gradients)):
            self.skipped += 1
            return False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return True

    def _each_surface(self) -> list[Surface]:
        return cast("list[Surface]", list(self.surfaces))

    def _parameters_to_move(self) -> list[nn.Parameter]:
        return [] if self.objective is None else list(self.surfaces.parameters())

    def _fresh_optimizer(self) -> Optimizer | None:
        if self.objective is None:
            return None
        parameters = self._parameters_to_move()
        if not parameters:
            raise OptionError(
                "An objective needs a surface with parameters to move; found none. Leave the "
                "objective out, or add such a surface."
            )
        return self._make_optimizer(parameters)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the optimiser's state along when the adapter is moved or cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and name != "step":  # torch keeps steps on the CPU
                        state[name] = fn(value)
        return self


def adam(lr: float = DEFAULT_LEARNING_RATE) -> OptimizerFactory:
    """Adam with this learning rate, as the paper uses it.

    Raises:
        OptionError: When the learning rate makes no sense.
    """
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < float("inf"):
        raise OptionError(f"`lr` is a finite number above 0; found {lr!r}.")
    return functools.partial(torch.optim.Adam, lr=lr)


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise OptionError(f"`{name}` is one of {', '.join(get_args(choices))}; found {value!r}.")


def _without_inference(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
