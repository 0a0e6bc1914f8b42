"""What moves the surfaces of a model: nothing, or gradient steps on an objective.

An `Adapter` owns the surfaces and decides when they forget; a `Mover` decides how one call turns
inputs into logits and where the surfaces' parameters go meanwhile. Most methods are `GradientSteps`
on some objective; one that needs more (a second network, augmented views, a correction of the
outputs) is a mover of its own, and shares `Descent`, which takes the steps.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttapca._checks import Number, OneOf, Whole, check_option
from ttapca.adaptation.objectives import Objective
from ttapca.errors import AttachError, OptionError
from ttapca.spectral.stream import Attributes, Stream, map_tensors

Logits = Literal["before", "after"]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

# Runs the model, with its surfaces in place, on whatever inputs it is given.
Run = Callable[..., Tensor]

DEFAULT_LEARNING_RATE = 1e-3
MOMENTUM = 0.9  # of stochastic gradient descent, wherever a method uses it


class Mover:
    """Turns inputs into logits, and may move the surfaces' parameters; this one does not.

    Attributes:
        keeps: Names of the attributes that a stream changes; they are replaced, never written into.
        fixed: Names of lists of tensors that no stream changes, such as where parameters started.
        needs_gradients: Whether it takes gradient steps; its calls are then made with gradients
            enabled and on tensors that allow them.
        descent: What takes its gradient steps, if anything does.
        updates: Steps taken since it was made.
        skipped: Batches whose step was skipped because its loss or gradient was not finite.
    """

    keeps: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()
    needs_gradients = False
    descent: Descent | None = None

    def __init__(self) -> None:
        self.updates = 0
        self.skipped = 0

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Learn what there is to move; called once, when the surfaces are attached."""
        del model, parameters

    def join(self, stream: Stream) -> None:
        """Declare what a stream changes; called once, after `bind`."""
        stream.keep("mover", Attributes(self, self.keeps))

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
        """What it keeps for all streams."""
        return [tensor for name in self.fixed for tensor in getattr(self, name)]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert these tensors when the adapter is moved or cast."""
        for name in self.fixed:
            setattr(self, name, [fn(tensor) for tensor in getattr(self, name)])


class Descent:
    """Gradient steps that leave all state as it was when a loss or gradient is not finite.

    Args:
        optimizer: Makes the optimiser; Adam with the paper's learning rate by default.
    """

    undone = False  # as a part of a stream

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

    def contents(self) -> dict[str, Any]:
        """Moments and step counts, by the number of the parameter; see `stream.Part`."""
        state = {} if self._optimizer is None else self._optimizer.state
        numbered = enumerate(self.parameters)
        return {str(number): state[each] for number, each in numbered if each in state}

    def put(self, contents: Mapping[str, Any]) -> None:
        """Go on with these moments and step counts."""
        if self._optimizer is not None:
            state: defaultdict[Tensor, Any] = defaultdict(dict)
            for number, each in contents.items():
                parameter = self.parameters[int(number)]
                state[parameter] = map_tensors(each, functools.partial(_as, parameter))
            self._optimizer.state = state

    def start(self) -> dict[str, Any]:
        """None of them."""
        return {}

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


def _as(other: Tensor, tensor: Tensor) -> Tensor:
    return tensor.to(other)


class Draws:
    """The state of a random generator, as a part of a stream.

    Args:
        generator: Of the CPU.
        seed: Each stream draws the same again.
    """

    undone = True

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self._generator = generator
        self._seed = seed

    def contents(self) -> Tensor:
        """See `ttapca.spectral.stream.Part`."""
        return self._generator.get_state()

    def put(self, contents: Tensor) -> None:
        """See there."""
        self._generator.set_state(contents.cpu())

    def start(self) -> Tensor:
        """See there."""
        return torch.Generator().manual_seed(self._seed).get_state()


class Stepper(Mover):
    """A mover that takes gradient steps: what all of them need.

    Args:
        optimizer: Makes the optimiser; Adam by default.
        steps: Steps on each batch.
        logits: From `before` or `after` the update.
        seed: Of what the method draws; a reset draws the same again.

    Attributes:
        start: Where the parameters started, for a method that says `remembers_start`.
        generator: For what the method draws.
    """

    fixed: ClassVar[tuple[str, ...]] = ("start",)
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
        check_option("steps", steps, Whole(1))
        check_option("logits", logits, OneOf(get_args(Logits)))
        self.steps = steps
        self.logits: Logits = logits
        self.descent = Descent(optimizer)
        self.start: list[Tensor] = []
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        """One line for a person."""
        return f"steps={self.steps}, logits={self.logits}"

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the parameters to move."""
        del model
        self.descent.bind(parameters)
        if self.remembers_start:
            self.start = [parameter.detach().clone() for parameter in parameters]

    def join(self, stream: Stream) -> None:
        """Declare the optimiser's and the generator's state as well."""
        super().join(stream)
        stream.keep("optimiser", self.descent)
        stream.keep("draws", Draws(self.generator, self.seed))


class GradientSteps(Stepper):
    """Lower an objective of the logits by gradient steps on each batch.

    A method that needs more than an objective of the logits overrides `loss`, `moved` or `output`.

    Args:
        objective: A scalar of the logits; one that keeps running state names it in `keeps`.
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

    def join(self, stream: Stream) -> None:
        """Declare the objective's running state as well."""
        super().join(stream)
        stream.keep("objective", Attributes(self.objective, getattr(self.objective, "keeps", ())))

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
    check_option("lr", lr, Number(above=0))
    return functools.partial(torch.optim.Adam, lr=lr)


def sgd(
    lr: float = DEFAULT_LEARNING_RATE, *, momentum: float = 0.0, nesterov: bool = False
) -> OptimizerFactory:
    """Stochastic gradient descent with this learning rate.

    Raises:
        OptionError: When the learning rate makes no sense.
    """
    check_option("lr", lr, Number(above=0))
    return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
