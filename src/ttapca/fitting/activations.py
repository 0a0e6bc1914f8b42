"""What source data become at one layer of a network, batch by batch."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ttapca.errors import (
    AttachError,
    InputTypeError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
    TtapcaError,
)
from ttapca.fitting.class_means import ClassMeans
from ttapca.fitting.fit_plan import FitPlan, NetworkTimes
from ttapca.fitting.fitted_filter import carries_filter
from ttapca.fitting.network_cost import NetworkCost, seconds_of, watched
from ttapca.fitting.source_channels import SourceChannels, found_logits
from ttapca.spectral.affine import acts_on_input
from ttapca.support.batches import SAMPLES, arguments_in, array_batches, as_tensor, precision_of
from ttapca.support.modules import device_and_dtype, explained_inputs, find_layer, stopped_at

# Wraps the batches while they are read. If it has a method `plan`, that is given the `FitPlan`
# before the work begins; if it has a method `stage`, that is told the name of work without batches,
# such as `decomposing`.
Progress = Callable[[Iterable[Any]], Iterable[Any]]
Prepare = Callable[[Any], Any]

# A tensor given as data is cut into batches of this many samples.
TENSOR_BATCH = 256

# With n samples a variance is known up to a factor of about 1 + sqrt(2 / n): with 32 within a
# quarter, with 3 not within a factor of two, and gains that follow from it would be noise.
FEWEST_SAMPLES = 32

# Some of the data are kept, evenly spread, to predict them again after the fit: this many parts of
# batches, with this many samples and numbers at most.
KEPT_PARTS = 8
KEPT_SAMPLES = 16
KEPT_NUMBERS = 2**23

_ADVICE = (
    "Say what the model takes of a batch: prepare=lambda batch: batch['image'] for one tensor, "
    "(batch[0], batch[1]) for several, a dict for arguments by name."
)


@dataclass(frozen=True)
class Shapes:
    """Shapes of one sample at a layer; the input is None if it is not a single tensor.

    `folds` is whether a filter acts on the input; see `acts_on_input`.
    """

    input: tuple[int, ...] | None
    output: tuple[int, ...]
    folds: bool = False


@dataclass(frozen=True)
class ModelInputs:
    """The arguments that a model is called with for one batch; at least one is a tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    @property
    def first(self) -> Tensor:
        """The first tensor, whose first dimension is that of the samples."""
        return next(value for value in self.values if isinstance(value, Tensor))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the arguments with every tensor changed."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        kwargs = {name: changed(value) for name, value in self.kwargs.items()}
        return ModelInputs(tuple(map(changed, self.args)), kwargs)

    def converted(self, precision: torch.dtype | None) -> ModelInputs:
        """Return the arguments with arrays as tensors, and float64 as what the model computes in.

        Raises:
            InputTypeError: An array does not hold numbers.
        """
        kwargs = {name: as_tensor(value, precision) for name, value in self.kwargs.items()}
        return ModelInputs(tuple(as_tensor(value, precision) for value in self.args), kwargs)

    def head(self, count: int) -> ModelInputs:
        """Return the first samples; tensors without a row per sample stay whole."""
        return self._rows(slice(count))

    def parts(self, most: int) -> Iterator[ModelInputs]:
        """Yield the samples in order, at most so many at a time."""
        samples = len(self.first)
        if samples <= most:
            yield self
            return
        for start in range(0, samples, most):
            yield self._rows(slice(start, start + most))

    def _rows(self, rows: slice) -> ModelInputs:
        samples = len(self.first)
        return self.mapped(lambda x: x[rows] if x.dim() and len(x) == samples else x)

    def run(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


class SourceActivations:
    """Batches of source data, and what they become at the layer."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        data: Iterable[Any] | Tensor,
        progress: Progress | None,
        prepare: Prepare | None = None,
        logits: Callable[[Any], Tensor | None] | None = None,
    ) -> None:
        self.model = model
        self.path = path
        self.layer = find_layer(model, path)
        if carries_filter(self.layer):
            raise AttachError(
                f"A filter is fitted on the untouched model; `{path}` already carries a filter. "
                "Call `detach()` on what put it there first."
            )
        for name, function, purpose in (
            ("progress", progress, "that wraps an iterable, for example `tqdm`"),
            ("prepare", prepare, "from a batch to what the model takes"),
            ("logits", logits, "that finds the logits in what the model returns"),
        ):
            if function is not None and not callable(function):
                raise OptionError(f"`{name}` is a function {purpose}; found {function!r}.")
        if isinstance(data, np.ndarray):
            data = array_batches(data, TENSOR_BATCH)
        self.device = device_and_dtype(self.layer, model)[0]
        self._precision = precision_of(model)
        self.channels = SourceChannels(model, logits)
        self.class_means = ClassMeans()
        self._one_shot = isinstance(data, Iterator)
        self._data = torch.split(data, TENSOR_BATCH) if isinstance(data, Tensor) else data
        self._progress: Progress = progress or (lambda batches: batches)
        self._prepare = prepare
        self._find_logits = logits
        self._passes = 0
        self._kept: list[ModelInputs] = []
        self.data_shape: tuple[int, ...] = ()  # of one sample of the data, once probed
        self._keep_every = 1
        self.cost = NetworkCost()
        self.batch_size = 1  # samples in the first batch, once probed
        self.samples: int | None = None  # how many there are, if the data tell; once probed
        self.classes = 0  # that the model predicts, once probed
        self.measured: int | None = None  # samples run through all of the model, if known; ditto
        self._first: ModelInputs | None = None
        self._shapes: Shapes | None = None
        self._fetching = 0.0

    def probe(self) -> Shapes:
        """Run a sample or two through the whole model to see what the layer takes and returns."""
        start = time.perf_counter()
        iterator = iter(self._data)
        try:
            first = next(iterator)
        except StopIteration:
            raise NotEnoughDataError("Fitting needs data; found none.") from None
        self._fetching = time.perf_counter() - start
        if self._one_shot:
            self._data = itertools.chain([first], iterator)  # this batch will be read again
        calls: list[Shapes] = []

        def record(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor) or output.dim() < 2:
                raise LayerOutputError(
                    "A filter goes after a layer that returns one tensor of shape (batch, ...); "
                    f"`{self.path}` returned {_describe(output)}. Choose another layer."
                )
            taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
            calls.append(Shapes(taken, tuple(output.shape[1:])))

        batch = self._inputs_of(first, 0)
        inputs = batch.head(2)
        self.data_shape = tuple(inputs.first.shape[1:])
        handle = self.layer.register_forward_hook(record)
        try:
            seen = watched(self.model, len(inputs.first))
            with explained_inputs(inputs.values), seen as self.cost:
                output = inputs.run(self.model)
        except TtapcaError:
            raise
        except TypeError as error:
            raise InputTypeError(
                f"The model cannot be called on the data: {error}. {_ADVICE}"
            ) from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise ShapeError(
                "The model must take what the data hold, samples of shape "
                f"{tuple(inputs.first.shape[1:])}; it does not: {error}. {_ADVICE}"
            ) from error
        finally:
            handle.remove()
        if len(calls) != 1:
            times = "never called" if not calls else f"called {len(calls)} times"
            raise LayerOutputError(
                f"A filter goes after a layer that is called once in a forward pass; `{self.path}` "
                f"is {times}. Choose another layer, or use a separate module for each call."
            )
        self._look_ahead(batch, output)
        taken, given = calls[0].input, calls[0].output
        # Not before the hook is gone: with one, a layer does not count as affine.
        folds = acts_on_input(self.layer, taken, given, self.data_shape)
        self._shapes = Shapes(taken, given, folds)
        return self._shapes

    def _look_ahead(self, batch: ModelInputs, output: Any) -> None:
        """Note what the first batch and its output say about the work to come."""
        self._first = batch.head(self.cost.timed)
        self.batch_size = max(1, len(batch.first))
        self.samples = _count_samples(self._data, self.batch_size)
        logits = found_logits(output, self._find_logits)
        self.classes = 0 if logits is None else logits.shape[1]
        self.measured = self.channels.expect(
            self.samples,
            self.classes,
            numbers=max(1, math.prod(self.data_shape)),
            multiply_adds=self.cost.multiply_adds,
        )

    @torch.no_grad()
    def times(self, at: Literal["input", "output"]) -> NetworkTimes:
        """Run a part of the first batch again, to see how long the network takes for a sample."""
        inputs = self._first
        if inputs is None:
            raise RuntimeError("`probe` comes first.")
        count = len(inputs.first)

        def reach() -> None:
            with stopped_at(self.layer, before=at == "input"):
                inputs.run(self.model)

        trial = SourceChannels(self.model, self._find_logits)
        part = KEPT_PARTS * min(KEPT_SAMPLES, self._kept_of(inputs))
        return NetworkTimes(
            fetching=self._fetching / self.batch_size,
            up_to_layer=seconds_of(reach) / count,
            whole=seconds_of(lambda: inputs.run(self.model)) / count,
            measuring=seconds_of(lambda: trial.see(*inputs.args, **inputs.kwargs)) / count
            if self.measured
            else 0.0,
            measured=self.measured or 0,
            compared=min(part, self.samples or part),
        )

    def batches(self, at: Literal["input", "output"], shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield what every batch becomes at the layer, shape (batch, *shape)."""
        self._passes += 1
        seen = 0
        for number, batch in enumerate(self._progress(self._data)):
            whole = self._inputs_of(batch, number)
            if self._passes == 1:
                self._keep(number, whole)
            for inputs in whole.parts(self.cost.together):
                activation = self._activation(inputs, at)
                self._check(activation, shape, number, at, inputs.first)
                if self._passes == 1:
                    shares = self.channels.see(*inputs.args, **inputs.kwargs)
                    if shares is not None:
                        self.class_means.add(activation, shares)
                seen += len(activation)
                yield activation
        if seen < FEWEST_SAMPLES:
            raise NotEnoughDataError(
                f"A filter is fitted on at least {FEWEST_SAMPLES} samples: fewer do not tell how "
                "much a component varies, and gains would be random. "
                f"Found {seen}. Give more data."
            )

    def _activation(self, inputs: ModelInputs, at: Literal["input", "output"]) -> Tensor:
        """Run the network up to the layer."""
        with stopped_at(self.layer, before=at == "input") as reached:
            inputs.run(self.model)
        if not reached:
            raise LayerOutputError(f"`{self.path}` was not called in the forward pass of a batch.")
        activation: Tensor = reached[0]
        return activation

    def _check(
        self, activation: Tensor, shape: tuple[int, ...], number: int, at: str, samples: Tensor
    ) -> None:
        """Raise unless the activations have the shape of the first batch and are finite."""
        if tuple(activation.shape[1:]) != shape:
            raise ShapeError(
                f"All batches must give samples of one shape at `{self.path}`; batch {number} "
                f"gave {tuple(activation.shape[1:])}, the first one {shape}."
            )
        if not torch.isfinite(activation).all():
            finite = not samples.is_floating_point() or bool(torch.isfinite(samples).all())
            place = f"the {at} of `{self.path}`" if finite else "the data"
            raise NonFiniteError(
                f"Fitting needs finite numbers; found NaN or infinity in {place} at batch "
                f"{number} (counting from 0). Remove or correct that batch."
            )

    def kept(self) -> list[ModelInputs]:
        """Return some of the data, evenly spread over the first pass."""
        return [inputs.mapped(lambda x: x.to(self.device)) for inputs in self._kept]

    def logits_of(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return what the whole model predicts; None where no logits are found in its output."""
        output = self.model(*args, **kwargs)
        return found_logits(output, self._find_logits)

    def _keep(self, number: int, inputs: ModelInputs) -> None:
        """Keep a part of one batch in `_keep_every`; drop half of the parts when there are many."""
        if number % self._keep_every:
            return
        part = inputs.head(self._kept_of(inputs))
        self._kept.append(part.mapped(lambda x: x.detach().to("cpu", copy=True)))
        if len(self._kept) > KEPT_PARTS:
            self._kept = self._kept[::2]
            self._keep_every *= 2

    def bytes_to_run(self) -> int:
        """Return the memory that running the network takes."""
        first = self._shapes is not None and self._shapes.input == self.data_shape
        if first and self.measured == 0:  # only what is kept runs through more than one layer
            return self.cost.bytes_for(min(self.batch_size, KEPT_SAMPLES))
        return self.cost.bytes_for(self.batch_size)

    def _kept_of(self, inputs: ModelInputs) -> int:
        """How many samples of a batch are kept, at most."""
        largest = KEPT_NUMBERS // KEPT_PARTS // max(1, math.prod(inputs.first.shape[1:]))
        return max(1, min(KEPT_SAMPLES, largest))

    def tell(self, plan: FitPlan) -> None:
        """Tell the progress display what will be done, if it wants to know."""
        listen = getattr(self._progress, "plan", None)
        if listen is not None:
            listen(plan)

    @property
    def wants_plan(self) -> bool:
        """Whether the progress display wants to know how long the work will take."""
        return hasattr(self._progress, "plan")

    def stage(self, name: str) -> None:
        """Tell the progress display what is done while no batch is read."""
        tell = getattr(self._progress, "stage", None)
        if tell is not None:
            tell(name)

    def require_several_passes(self) -> None:
        """Raise unless the data can be read more than once."""
        if self._one_shot:
            raise OptionError(
                f"The output of `{self.path}` is decomposed by the randomised route, which reads "
                "the data several times; found an iterator, which can be read once. Pass a loader "
                "or a list."
            )

    def _inputs_of(self, batch: Any, number: int) -> ModelInputs:
        """Return the model's arguments: what `prepare` says, else the batch or its first part."""
        given = self._prepare(batch) if self._prepare else arguments_in(batch, self.model)
        if isinstance(given, Mapping):
            found = ModelInputs((), dict(given))
        else:
            found = ModelInputs(tuple(given) if isinstance(given, (tuple, list)) else (given,), {})
        found = found.converted(self._precision)
        if not any(isinstance(value, Tensor) for value in found.values):
            whose = "`prepare` must give" if self._prepare else "Data must yield"
            raise OptionError(
                f"{whose} tensors or arrays, pairs that start with one, or dicts with one that the "
                f"model has an argument for, or under `{'`, `'.join(SAMPLES[:2])}`; batch {number} "
                f"(counting from 0) is {_describe(batch)}. {_ADVICE}"
            )
        return found.mapped(lambda x: x.to(self.device))


def _count_samples(data: Iterable[Any], batch_size: int) -> int | None:
    """Return how many samples there are, if the data tell; at most a batch too many."""
    if isinstance(data, tuple) and all(isinstance(each, Tensor) for each in data):
        return sum(map(len, data))
    count = operator.length_hint(data, 0) * batch_size
    # `DataLoader` and others name the data set that they read, which may be sampled from.
    known = operator.length_hint(getattr(data, "dataset", None), 0)
    return (min(count, known) if known else count) or None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, list(value)[:5]))}"
    return f"a {type(value).__name__}"
