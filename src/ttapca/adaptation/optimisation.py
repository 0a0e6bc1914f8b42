"""What moves the surfaces of a model: nothing, or gradient steps on an objective.

An `Adapter` owns the surfaces and decides when they forget; a `Mover` decides how one call turns
inputs into logits and where the surfaces' parameters go meanwhile. Most methods are `GradientSteps`
on some objective; one that needs more (a second network, augmented views, a correction of the
outputs) is a mover of its own, and shares `Descent`, which takes the steps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttapca.adaptation.objectives import Objective
from ttapca.errors import AttachError, OptionError

Logits = Literal["before", "after"]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

# Runs the model, with its surfaces in place, on whatever inputs it is given.
Run = Callable[..., Tensor]

DEFAULT_LEARNING_RATE = 1e-3
MOMENTUM = 0.9  # of stochastic gradient descent, wherever a method uses it


class Mover:
    """Turns inputs into logits, and may move the surfaces' parameters; this one does not.

    Attributes:
        keeps: Names of the attributes that a stream changes, for `state`.
        needs_gradients: Whether it takes gradient steps; its calls are then made with gradients
            enabled and on tensors that allow them.
        descent: What takes its gradient steps, if anything does.
        updates: Steps taken since it was made.
        skipped: Batches whose step was skipped because its loss or gradient was not finite.
    """

    keeps: ClassVar[tuple[str, ...]] = ("updates", "skipped")
    needs_gradients = False
    descent: Descent | None = None

    def __init__(self) -> None:
        self.updates = 0
        self.skipped = 0

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Learn what there is to move; called once, when the surfaces are attached."""
        del model, parameters

    def reset(self) -> None:
        """Forget: optimiser, running averages."""

    def state(self) -> dict[str, Any]:
        """All that a stream has changed, for `load_state`: numbers, tensors, lists and dicts."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.keeps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        for name in self.keeps:
            setattr(self, name, copy.deepcopy(state[name]))

    def start_batch(self) -> None:
        """Hear that a batch follows."""

    def forget_batch(self) -> None:
        """Let a batch that was broken leave no mark."""

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Give the logits for one batch, and move.

        Args:
            run: Runs the model with its surfaces in place.
            *inputs: For the model.
            **options: For the model.
        """
        return run(*inputs, **options)

    def output(self, logits: Tensor) -> Tensor:
        """What is returned where the model gives these logits."""
        return logits

    @property
    def backwards(self) -> int:
        """Backward passes since it was made."""
        return 0 if self.descent is None else self.descent.backwards

    def tensors(self) -> list[Tensor]:
        """What it keeps between batches beyond the surfaces' own tensors."""
        return [] if self.descent is None else self.descent.tensors()

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert own tensors when the adapter is moved or cast."""
        if self.descent is not None:
            self.descent.apply(fn)


class Descent:
    """Gradient steps that leave all state as it was when a loss or gradient is not finite.

    Args:
        optimizer: Makes the optimiser; Adam with the paper's learning rate by default.
    """

    def __init__(self, optimizer: OptimizerFactory | None = None) -> None:
        self._make = optimizer or adam()
        self._optimizer: Optimizer | None = None
        self.parameters: list[nn.Parameter] = []
        self.backwards = 0

    def bind(self, parameters: list[nn.Parameter]) -> None:
        """Take these parameters to move, and a fresh optimiser."""
        if not parameters:
            raise OptionError(
                "An objective needs a surface with parameters to move; found none. Leave the "
                "objective out, or add such a surface."
            )
        self.parameters = parameters
        self.reset()

    @property
    def lr(self) -> float:
        """The learning rate that it takes steps with."""
        made = self._optimizer or self._make([nn.Parameter(torch.zeros(1))])
        return float(made.param_groups[0]["lr"])

    def reset(self) -> None:
        """Make a fresh optimiser: moments and step counts are forgotten."""
        self._optimizer = self._make(self.parameters)

    def state(self) -> dict[str, Any]:
        """Moments and step counts."""
        return {} if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the moments and step counts of `state`."""
        self.reset()
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...] | None:
        """Gradients of a loss, or None where it or they are not finite."""
        if not loss.requires_grad:
            raise AttachError(
                "Gradients must reach the adapted parameters; those of this model do not: its "
                "forward pass detaches them or runs without gradients."
            )
        self.backwards += 1
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        if all(gradient is None for gradient in found):
            raise AttachError(
                "Gradients must reach the adapted parameters; this loss depends on none of them."
            )
        # A parameter that took no part in this forward pass stays where it is.
        gradients = tuple(
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, found, strict=True)
        )
        finite = all(bool(torch.isfinite(value).all()) for value in (loss, *gradients))
        return gradients if finite else None

    def move(self, gradients: tuple[Tensor, ...]) -> None:
        """Take one step of the optimiser along these gradients."""
        if self._optimizer is None:
            raise AttachError("Steps are taken once there are parameters; call `bind` first.")
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> list[Tensor]:
        """What the optimiser keeps."""
        states = self._optimizer.state.values() if self._optimizer else ()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the optimiser's state along with the parameters."""
        for state in self._optimizer.state.values() if self._optimizer else ():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":  # torch keeps steps on the CPU
                    state[name] = fn(value)


class Stepper(Mover):
    """A mover that takes gradient steps: what all of them need.

    Args:
        optimizer: Makes the optimiser; Adam by default.
        steps: Steps on each batch.
        logits: From `before` or `after` the update.
        seed: Of what the method draws; a reset draws the same again.

    Attributes:
        start: Where the parameters started, for a method that says `remembers_start`.
        generator: For what the method draws: a broken batch draws nothing.
    """

    needs_gradients = True
    remembers_start = False
    descent: Descent

    def __init__(
        self,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        logits: Logits = "after",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.steps = check_steps(steps)
        self.logits = check_logits(logits)
        self.descent = Descent(optimizer)
        self.start: list[Tensor] = []
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self._drawn = self.generator.get_state()

    def __repr__(self) -> str:
        """One line for a person."""
        return f"steps={self.steps}, logits={self.logits}"

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the parameters to move."""
        del model
        self.descent.bind(parameters)
        if self.remembers_start:
            self.start = [parameter.detach().clone() for parameter in parameters]

    def reset(self) -> None:
        """Forget the optimiser's state, and draw from the start again."""
        self.descent.reset()
        self.generator.manual_seed(self.seed)

    def state(self) -> dict[str, Any]:
        """The optimiser's and the generator's as well."""
        drawn = self.generator.get_state()
        return {**super().state(), "optimiser": self.descent.state(), "generator": drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on, with the optimiser and the generator."""
        super().load_state(state)
        self.descent.load_state(state["optimiser"])
        self.generator.set_state(state["generator"].cpu())

    def start_batch(self) -> None:
        """Keep what was drawn so far."""
        self._drawn = self.generator.get_state()

    def forget_batch(self) -> None:
        """Draw for the next batch what was drawn for this one."""
        self.generator.set_state(self._drawn)

    def tensors(self) -> list[Tensor]:
        """The optimiser's state, and the start."""
        return [*super().tensors(), *self.start]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the optimiser's state, and the start."""
        super().apply(fn)
        self.start = [fn(value) for value in self.start]


class GradientSteps(Stepper):
    """Lower an objective of the logits by gradient steps on each batch.

    A method that needs more than an objective of the logits overrides `loss`, `moved` or `output`.

    Args:
        objective: A scalar of the logits; one with a `reset` method keeps running state.
        optimizer: Makes the optimiser; Adam by default.
        steps: Steps on each batch.
        logits: Returned from the forward pass `before` the last update, as TENT does, or from one
            more `after` it, as in the paper.
        seed: Of what the method draws.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        logits: Logits = "after",
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer=optimizer, steps=steps, logits=logits, seed=seed)
        self.objective = objective

    def reset(self) -> None:
        """Forget the optimiser's moments and the objective's running state."""
        super().reset()
        reset = getattr(self.objective, "reset", None)
        if reset is not None:
            reset()

    def state(self) -> dict[str, Any]:
        """The objective's running state as well."""
        kept = getattr(self.objective, "keeps", ())
        objective = {name: copy.deepcopy(getattr(self.objective, name)) for name in kept}
        return {**super().state(), "objective": objective}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on, with the objective."""
        super().load_state(state)
        for name, value in state["objective"].items():
            setattr(self.objective, name, copy.deepcopy(value))

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict, step, and predict again where the logits are wanted from after the update."""
        for _ in range(self.steps):
            logits = run(*inputs, **options)
            loss = self.loss(logits, run, *inputs, **options)
            gradients = None if loss is None else self.descent.gradients(loss)
            if gradients is None:
                self.skipped += loss is not None
                # Nothing moved, so further steps and a forward pass would repeat this one.
                return self.output(logits)
            self.descent.move(gradients)
            self.updates += 1
            self.moved()
        if self.logits == "before":
            return self.output(logits)
        with torch.no_grad():
            return self.output(run(*inputs, **options))

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """What the next step lowers; None for no step on this batch."""
        del run, inputs, options
        return self.objective(logits)

    def moved(self) -> None:
        """Follow a step that was taken: it was finite, so running averages may take it in."""


def adam(lr: float = DEFAULT_LEARNING_RATE) -> OptimizerFactory:
    """Adam with this learning rate, as the paper uses it.

    Raises:
        OptionError: When the learning rate makes no sense.
    """
    return functools.partial(torch.optim.Adam, lr=check_learning_rate(lr))


def sgd(
    lr: float = DEFAULT_LEARNING_RATE, *, momentum: float = 0.0, nesterov: bool = False
) -> OptimizerFactory:
    """Stochastic gradient descent with this learning rate.

    Raises:
        OptionError: When the learning rate makes no sense.
    """
    return functools.partial(
        torch.optim.SGD, lr=check_learning_rate(lr), momentum=momentum, nesterov=nesterov
    )


def check_learning_rate(lr: float) -> float:
    """Raise `OptionError` unless this is a finite number above 0."""
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < float("inf"):
        raise OptionError(f"`lr` is a finite number above 0; found {lr!r}.")
    return lr


def check_steps(steps: int) -> int:
    """Raise `OptionError` unless this is a whole number of at least 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"`steps` is a whole number of at least 1; found {steps!r}.")
    return steps


def check_logits(logits: Logits) -> Logits:
    """Raise `OptionError` unless this says when the logits are taken."""
    if logits not in get_args(Logits):
        raise OptionError(f"`logits` is one of before, after; found {logits!r}.")
    return logits
