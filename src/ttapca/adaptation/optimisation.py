"""Predictors, which turn a batch into logits and may take gradient steps, and their objectives.

Most methods are `GradientSteps` on an objective; one that needs more (a second network, augmented
views) is its own kind of `Stepper`.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttapca.errors import AttachError, LayerOutputError, OptionError
from ttapca.spectral.stream import STAYS, Attributes, Stream, map_tensors
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import StreamState
from ttapca.support.outputs import Outputs, Reads, log_softmax, softmax_entropy
from ttapca.support.tensors import as_on

Logits = Literal["before", "after"]
Objective = Callable[[Tensor], Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

# Runs the model, with its surfaces in place, on whatever inputs it is given.
Run = Callable[..., Tensor]
# Runs it on some images of a batch, given by their numbers; None for all.
RunSome = Callable[[Tensor | None], Tensor]

DEFAULT_LEARNING_RATE = 1e-3
MOMENTUM = 0.9  # of stochastic gradient descent, wherever a method uses it
# States of torch's Adam and SGD in the shape of a parameter; other optimisers may keep anything.
MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})


class Predictor:
    """Turns inputs into logits, and may move the surfaces' parameters; this one does not."""

    # Attributes that a stream changes (replaced, never written into), and lists of tensors that no
    # stream changes, such as where parameters started.
    keeps: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()
    needs_gradients = False  # whether it takes gradient steps
    forgets = False  # by itself, before a batch is over, so that nothing can collapse
    reads: Reads = "nothing"
    outputs: Outputs  # finds the logits; set by the adapter before `bind`
    stream: Stream  # given by `join`

    def __init__(self) -> None:
        self.backwards = self.updates = 0  # backward passes and steps since it was made
        # Batches that led to NaN or infinity. A predictor that meets one adds 1, or more for single
        # images; the adapter makes that 1 for each batch.
        self.skipped = 0

    @property
    def kind(self) -> str:
        """A name that two predictors share only if they leave the same values in a stream."""
        name = type(self).__name__
        return "Mover" if name == "Predictor" else name  # as in files of version 0.2

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the model and the parameters to move; called once, when surfaces are attached."""
        del model, parameters

    def join(self, stream: Stream) -> None:
        """Declare the state that belongs to a stream; called once, after `bind`."""
        self.stream = stream
        stream.keep("mover", Attributes(self, self.keeps))

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch, and move."""
        return run(*inputs, **options)

    def output(self, logits: Tensor) -> Tensor:
        """Return the adapter's output for these logits of the model."""
        return logits

    def predict_streams(
        self, run: RunSome, batch: StreamBatch
    ) -> tuple[Tensor, list[tuple[StreamBatch, int]]]:
        """Return the logits for a batch of any streams, and the last pass and place of each."""
        return run(None), [(batch, number) for number in range(len(batch.states))]

    def facts_in(self, state: StreamState) -> dict[str, Any]:
        """Return facts about a stream by its state, under names of `Health`."""
        del state
        return {}

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are kept for all streams."""
        return [tensor for name in self.fixed for tensor in getattr(self, name)]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert these tensors when the adapter is moved or cast."""
        for name in self.fixed:
            setattr(self, name, [fn(tensor) for tensor in getattr(self, name)])


class Descent:
    """Gradients and steps of an optimiser, by default Adam; its state is a `Part` of a stream."""

    _optimizer: Optimizer  # made by `bind`

    def __init__(self, optimizer: OptimizerFactory | None = None) -> None:
        self._make = optimizer or adam()
        self.parameters: list[nn.Parameter] = []  # those that are moved

    def bind(self, parameters: list[nn.Parameter]) -> None:
        """Take these parameters to move, and a fresh optimiser."""
        if not parameters:
            raise OptionError(
                "An objective needs a surface with parameters to move; found none. Add one, or "
                "leave the objective out."
            )
        self.parameters = parameters
        self.reset()

    def reset(self) -> None:
        """Make a fresh optimiser: moments and step counts are forgotten."""
        self._optimizer = self._make(self.parameters)

    def contents(self) -> dict[str, Any]:
        """Return moments and step counts by the number of the parameter."""
        state, numbered = self._optimizer.state, enumerate(self.parameters)
        return {str(number): state[each] for number, each in numbered if each in state}

    def put(self, contents: Mapping[str, Any]) -> None:
        """Continue with these moments and step counts, unless one has the shape of another."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for number, each in contents.items():
            parameter = self.parameters[int(number)]
            for name in MOMENTS.intersection(each):
                if each[name] is not None and each[name].shape != parameter.shape:
                    raise ValueError(f"`{name}` has another shape than parameter {number}")
            moved = {
                name: as_on(value, parameter)
                for name, value in each.items()
                if name != STAYS and isinstance(value, Tensor)
            }
            state[parameter] = {**each, **moved}
        self._optimizer.state = state

    def start(self) -> dict[str, Any]:
        """Return the state of a fresh optimiser, which is empty."""
        return {}

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...] | None:
        """Return the gradients of a loss, or None if it or they are not finite."""
        if not loss.requires_grad:
            raise AttachError(
                "Gradients must reach the adapted parameters; those of this model do not: its "
                "forward pass detaches them or runs without gradients."
            )
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
        """Take one step of the optimiser along these gradients.

        It writes into copies, so that a step is undone by putting back the contents of before.
        """
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, each in self._optimizer.state.items():
            state[parameter] = {
                name: map_tensors(value, torch.clone) for name, value in each.items()
            }
        self._optimizer.state = state
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.data = parameter.data.clone()
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Draws:
    """The state of a random generator on the CPU, as a `Part` of a stream."""

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self._generator, self._seed = generator, seed

    def contents(self) -> Tensor:
        """Return the state of the generator."""
        return self._generator.get_state()

    def put(self, contents: Tensor) -> None:
        """Continue with this state."""
        self._generator.set_state(contents.cpu())

    def start(self) -> Tensor:
        """Return the state of a new generator."""
        return torch.Generator().manual_seed(self._seed).get_state()


class Stepper(Predictor):
    """A predictor that takes gradient steps; its `generator`, on the CPU, belongs to a stream."""

    fixed: ClassVar[tuple[str, ...]] = ("start",)
    needs_gradients = True
    reads: Reads = "probabilities"
    remembers_start = False  # whether `start` is filled: where the parameters started

    def __init__(
        self,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        logits: Logits = "after",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.steps, self.seed = steps, seed
        self.logits: Logits = logits
        self.descent = Descent(optimizer)
        self.start: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        """Return one line for a person."""
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

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...] | None:
        """Return the gradients of a loss; if they are not finite, count that and return None."""
        self.backwards += 1
        gradients = self.descent.gradients(loss)
        self.skipped += gradients is None
        return gradients

    def step(self, loss: Tensor) -> bool:
        """Take one step on a loss; return False if it is not finite."""
        gradients = self.gradients(loss)
        if gradients is None:
            return False
        self.descent.move(gradients)
        self.updates += 1
        return True

    def step_and_predict(self, loss: Callable[[], Tensor], predict: Callable[[], Tensor]) -> Tensor:
        """Take all steps on a loss, and return the prediction from before or after them."""
        if self.logits == "before":
            with torch.no_grad():
                before = predict()
        for _ in range(self.steps):
            if not self.step(loss()):
                break
        if self.logits == "before":
            return before
        with torch.no_grad():
            return predict()


class GradientSteps(Stepper):
    """Lower an objective of the logits, (batch, classes, ...), by gradient steps on each batch.

    An objective with running state names it in `keeps`.
    """

    def __init__(
        self, objective: Objective, *, reads: Reads = "probabilities", **stepping: Any
    ) -> None:
        super().__init__(**stepping)
        self.objective = objective
        self.reads = reads

    def join(self, stream: Stream) -> None:
        """Declare the objective's running state as well."""
        stream.keep("objective", Attributes(self.objective, getattr(self.objective, "keeps", ())))
        super().join(stream)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict, step, and predict again if the logits are wanted from after the update."""
        for _ in range(self.steps):
            logits = run(*inputs, **options)
            loss = self.loss(logits, run, *inputs, **options)
            if loss is None or not self.step(loss):
                # Nothing moved, so further steps and a forward pass would repeat this one.
                return self.output(logits)
            self.moved()
        if self.logits == "before":
            return self.output(logits)
        with torch.no_grad():
            return self.output(run(*inputs, **options))

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Return the loss that the next step lowers; None for no step on this batch."""
        del run, inputs, options
        return self.objective(logits)

    def moved(self) -> None:
        """Update running averages after a step, whose loss was finite."""


def adam(lr: float = DEFAULT_LEARNING_RATE) -> OptimizerFactory:
    """Return a factory of Adam with this learning rate."""
    return functools.partial(_adam, lr=lr)


def _adam(parameters: list[nn.Parameter], lr: float) -> Optimizer:
    # The usual 1e-8 is 0 in float16, and so are the squares of small gradients: steps would be NaN.
    narrow = any(parameter.dtype == torch.float16 for parameter in parameters)
    return torch.optim.Adam(parameters, lr=lr, eps=1e-4 if narrow else 1e-8)


def sgd(
    lr: float = DEFAULT_LEARNING_RATE, *, momentum: float = 0.0, nesterov: bool = False
) -> OptimizerFactory:
    """Return a factory of stochastic gradient descent; see `torch.optim.SGD`."""
    return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)


# Objectives and their parts. Logits have the shape (batch, classes, ...).


def mean_entropy(logits: Tensor, kind: Entropy = "softmax") -> Tensor:
    """Return the mean entropy of a batch: the objective of TENT and of the paper."""
    return ENTROPIES[kind](logits).mean()


def opinion_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each opinion, shape (batch, ...): the objective of COME.

    An opinion on C classes has the beliefs exp(z_c) / S and the uncertainty C / S, with
    S = sum_c exp(z_c) + C. Its gradient turns the logits and leaves their length as it is.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    length = torch.linalg.vector_norm(logits, dim=1, keepdim=True)
    turned = logits / length.clamp(min=torch.finfo(logits.dtype).tiny) * length.detach()
    unsure = torch.full_like(turned[:, :1], math.log(logits.shape[1]))
    return softmax_entropy(torch.cat([turned, unsure], 1))


Entropy = Literal["softmax", "opinion"]
ENTROPIES: dict[Entropy, Objective] = {"softmax": softmax_entropy, "opinion": opinion_entropy}


def log_predictions(logits: Tensor) -> Tensor:
    """Return log-probabilities, shape (batch, classes), for a method that compares samples."""
    found = log_softmax(logits)
    if found.dim() != 2:
        raise LayerOutputError(
            "This method needs one prediction per sample, so logits of shape (batch, classes); "
            f"found {tuple(logits.shape)}. For predictions of every pixel, choose `tent`, `sar`, "
            "`shot`, `slr+it`, `cotta` or a spectral method."
        )
    return found


def class_marginal(logits: Tensor) -> Tensor:
    """Return the mean prediction of a batch, shape (classes,)."""
    probabilities = log_softmax(logits).exp()
    return probabilities.mean([d for d in range(logits.dim()) if d != 1])


def negative_entropy(distribution: Tensor) -> Tensor:
    """Return the sum of p log p, which is least for the uniform distribution."""
    # The logarithm of a class that no sample has any probability for would spoil the gradient.
    positive = distribution.clamp(min=torch.finfo(distribution.dtype).tiny)
    return (positive * positive.log()).sum()
