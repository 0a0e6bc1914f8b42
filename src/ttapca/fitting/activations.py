"""The activations of one layer of a network on source data, batch by batch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from ttapca import errors
from ttapca.fitting.attachment import carries_filter
from ttapca.fitting.plan import FitPlan
from ttapca.fitting.source_statistics import (
    FindLogits,
    MomentsKind,
    PassConfig,
    Side,
    SourceChannels,
    SourceStatistics,
    choose_subsample,
    found_logits,
)
from ttapca.spectral.basis_choice import acts_on_input
from ttapca.spectral.position_sample import Positions
from ttapca.support.inputs import (
    SAMPLES,
    Samples,
    arguments_in,
    array_batches,
    as_tensor,
    explained_inputs,
    first_samples,
    mapped_tensors,
    precision_of,
    samples_in,
)
from ttapca.support.modules import (
    LayerPaths,
    caught_inputs,
    core_of,
    device_and_dtype,
    multiply_adds,
    stopped_at,
)
from ttapca.support.progress import Counted, Step
from ttapca.support.wrapping import temporary_patches

# A network is run on few enough samples at once that no layer gives more numbers than this (64 MB),
# however many a batch of the user's has.
RUN_NUMBERS = 2**24

# Bytes at once for each of these numbers: inputs, outputs and work space of a layer, and shortcuts.
BYTES_A_NUMBER = 4 * 5


@dataclass
class NetworkCost:
    """What one sample costs in a forward pass."""

    largest: int = 1  # numbers in the largest output of a layer
    multiply_adds: int = 0  # in convolutions and linear layers

    @property
    def together(self) -> int:
        """The largest number of samples to run at once."""
        return max(1, RUN_NUMBERS // self.largest)

    def bytes_for(self, samples: int) -> int:
        """Return about how much memory it takes to run this number of samples."""
        return BYTES_A_NUMBER * self.largest * min(samples, self.together)

    def add(self, module: nn.Module, output: Any, samples: int) -> None:
        """Add a layer that returned this output for this number of samples."""
        if isinstance(output, Tensor) and output.numel():
            numbers = math.ceil(output.numel() / samples)
            self.largest = max(self.largest, numbers)
            self.multiply_adds += multiply_adds(module, numbers)


@dataclass(frozen=True)
class ModelInputs:
    """The arguments that a model is called with for one batch; samples are in at least one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    @functools.cached_property
    def samples(self) -> Samples:
        """The samples: the first tensor, or a list of them, as detectors take it."""
        return cast(Samples, first_samples(self.values))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample, the first one if they differ."""
        given = self.samples
        return tuple(given.shape[1:] if isinstance(given, Tensor) else given[0].shape)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the arguments with every tensor changed."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return ModelInputs(mapped_tensors(self.args, changed), mapped_tensors(self.kwargs, changed))

    def chosen(self, among: Tensor) -> ModelInputs:
        """Return the samples for which `among`, shape (samples,), is true."""
        return self if bool(among.all()) else self._rows(among)

    def parts(self, most: int) -> Iterator[ModelInputs]:
        """Yield the samples in order, at most this many at a time; other tensors stay whole."""
        samples = len(self.samples)
        if samples <= most:
            yield self
            return
        for start in range(0, samples, most):
            yield self._rows(slice(start, start + most))

    def _rows(self, rows: slice | Tensor) -> ModelInputs:
        samples = len(self.samples)
        if isinstance(self.samples, Tensor):
            here = rows.to(self.samples.device) if isinstance(rows, Tensor) else rows
            return self.mapped(lambda x: x[here] if x.dim() and len(x) == samples else x)
        wanted = torch.arange(samples)[rows].tolist()

        def some(value: Any) -> Any:  # also the targets of images, if a model takes them
            listed = isinstance(value, (list, tuple)) and len(value) == samples
            return [value[place] for place in wanted] if listed else value

        return ModelInputs(
            tuple(map(some, self.args)), {name: some(each) for name, each in self.kwargs.items()}
        )

    def run(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


# Wraps the batches while they are read. If it has the methods `plan` and `stage`, they are told the
# `FitPlan`, and the name of work without batches, such as `decomposing`.
Progress = Callable[[Iterable[Any]], Iterable[Any]]
Prepare = Callable[[Any], Any]

# A tensor given as data is cut into batches of this many samples.
TENSOR_BATCH = 256

ALL = Positions()  # of data that are read as a whole

_ADVICE = (
    "Say what the model takes of a batch: prepare=lambda batch: batch['image'] for one tensor, "
    "(batch[0], batch[1]) for several, (batch,) for a list of images or a dict as one argument, a "
    "dict for arguments by name."
)


@dataclass(frozen=True)
class Shapes:
    """Shapes of one sample at a layer; the input is None if it is not a single tensor."""

    input: tuple[int, ...] | None
    output: tuple[int, ...]
    folds: bool = False  # whether a filter acts on the input

    def side(self, *, at_input: bool) -> tuple[int, ...]:
        """Return the shape at one side of the layer; the input is a single tensor."""
        return cast(tuple[int, ...], self.input) if at_input else self.output


class SourceActivations:
    """Batches of source data, and their activations at a layer; arguments as for `fit`."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        data: Iterable[Any] | Tensor,
        progress: Progress | None,
        prepare: Prepare | None = None,
        logits: FindLogits | None = None,
    ) -> None:
        self.model = model
        paths = LayerPaths(model)
        self.path = paths.find(path)
        self.layer = paths.layers[self.path]
        self._core = core_of(model)[1]
        if carries_filter(self.layer):
            raise errors.AttachError(
                f"A filter is fitted on the untouched model; `{path}` already carries a filter. "
                "Call `detach()` on what put it there first."
            )
        for name, function, purpose in (
            ("progress", progress, "that wraps an iterable, for example `tqdm`"),
            ("prepare", prepare, "from a batch to what the model takes"),
            ("logits", logits, "that finds the logits in what the model returns"),
        ):
            if function is not None and not callable(function):
                raise errors.OptionError(f"`{name}` is a function {purpose}; found {function!r}.")
        # How many samples a batch usually has: which samples are kept follows from that.
        self.block = TENSOR_BATCH if isinstance(data, (Tensor, np.ndarray)) else 0
        if isinstance(data, np.ndarray):
            data = array_batches(data, TENSOR_BATCH)
        self.device = device_and_dtype(self.layer, model)[0]
        self._precision = precision_of(model)
        self._one_shot = isinstance(data, Iterator)
        self._data = torch.split(data, TENSOR_BATCH) if isinstance(data, Tensor) else data
        self._progress: Progress = progress or (lambda batches: batches)
        self.prepare = prepare
        self.find_logits = logits
        self.channels = SourceChannels(model, logits)
        self.shapes = Shapes(None, ())  # once probed
        self.data_shape: tuple[int, ...] = ()  # of one sample of the data, once probed
        self.cost = NetworkCost()
        self.batch_size = 1  # samples in the first batch, once probed
        self.samples: int | None = None  # how many there are, if the data tell; once probed
        self.classes = 0  # that the model predicts, once probed
        self.of_places = False  # whether it predicts them for every place of a sample

    def probe(self) -> None:
        """Run a sample or two through the whole model to see what the layer takes and returns."""
        batch = self._inputs_of(self._first_batch())
        inputs = next(batch.parts(2))
        self.data_shape = inputs.shape
        output, shapes = self._recorded(inputs)
        self.batch_size = max(1, len(batch.samples))
        self.block = self.block or self.batch_size
        self.samples = _count_samples(self._data, self.batch_size)
        logits = found_logits(output, self.find_logits)
        self.classes = 0 if logits is None else logits.shape[1]
        self.of_places = logits is not None and logits.dim() > 2
        # Not before the hook is gone: with one, a layer does not count as affine.
        folds = acts_on_input(self.layer, shapes.input, shapes.output, self.data_shape)
        self.shapes = Shapes(shapes.input, shapes.output, folds)

    def _first_batch(self) -> Any:
        iterator = iter(self._data)
        try:
            first = next(iterator)
        except StopIteration:
            raise errors.NotEnoughDataError("Fitting needs data; found none.") from None
        if self._one_shot:
            self._data = itertools.chain([first], iterator)
        return first

    def _recorded(self, inputs: ModelInputs) -> tuple[Any, Shapes]:
        """Run the whole model; return its output and the shapes at the layer, and note its cost."""
        calls: list[Shapes] = []
        self.cost = NetworkCost()
        modules = list(self.model.modules())
        leaves = {module for module in modules if next(module.children(), None) is None}

        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module in leaves:
                self.cost.add(module, output, len(inputs.samples))
            if module is not self.layer:
                return
            if not isinstance(output, Tensor) or output.dim() < 2:
                raise errors.LayerOutputError(
                    "A filter goes after a layer that returns one tensor of shape (batch, ...); "
                    f"`{self.path}` returned {_describe(output)}. Choose another layer."
                )
            taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
            calls.append(Shapes(taken, tuple(output.shape[1:])))

        try:
            with explained_inputs(inputs.values), temporary_patches() as patches:
                for module in leaves | {self.layer}:
                    patches.hook_output(module, record)
                output = inputs.run(self.model)
        except errors.TtapcaError:
            raise
        except TypeError as error:
            raise errors.InputTypeError(
                f"The model cannot be called on the data: {error}. {_ADVICE}"
            ) from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise errors.ShapeError(
                "The model must take what the data hold, samples of shape "
                f"{inputs.shape}; it does not: {error}. {_ADVICE}"
            ) from error
        if len(calls) != 1:
            times = "never called" if not calls else f"called {len(calls)} times"
            raise errors.LayerOutputError(
                f"A filter goes after a layer that is called once in a forward pass; `{self.path}` "
                f"is {times}. Choose another layer, or use a separate module for each call."
            )
        return output, calls[0]

    def pass_config(self, *, at_input: bool, moments: MomentsKind | None = None) -> PassConfig:
        """Say how a pass over one side of the layer goes."""
        at: Side = "input" if at_input else "output"
        shape = self.shapes.side(at_input=at_input)
        numbers = max(1, math.prod(self.data_shape))
        work = self.cost.multiply_adds
        subsample = choose_subsample(self.model, self.samples, self.classes, numbers, work)
        together, block = self.cost.together, self.block
        return PassConfig(at, shape, numbers, together, block, subsample, moments)

    @torch.no_grad()
    def collect(self, into: SourceStatistics, positions: Positions, name: str = "") -> int:
        """Read all data once, add them to `into`, and return how many samples there were."""
        before = into.samples
        for activation in self.batches(into.config, into, positions, name):
            if into.moments is not None:
                into.moments.update(activation)
        return into.samples - before

    def batches(
        self,
        config: PassConfig,
        into: SourceStatistics | None,
        positions: Positions = ALL,
        name: str = "",
    ) -> Iterator[Tensor]:
        """Yield the activations of every batch, (batch, *shape); other statistics go `into`."""
        read = rows = 0
        for number, batch in enumerate(self._progress(self._data)):
            where = f"batch {number}{f' of {name}' if name else ''}"
            whole = self._inputs_of(batch, where)
            if into is not None:
                into.kept.take(whole, positions.of(read, len(whole.samples)))
            for inputs in whole.parts(config.together):
                activation, given = self._activation(inputs, config.at)
                self._check(activation, config, where, inputs)
                if into is not None:
                    into.inputs.add(given)
                    places = positions.of(read, len(inputs.samples))
                    self._measure(inputs, activation, places, into)
                    # A layer may give several rows for a sample.
                    into.sample.take(activation, positions.of(rows, len(activation)))
                read, rows = read + len(inputs.samples), rows + len(activation)
                yield activation

    def _measure(
        self, inputs: ModelInputs, activation: Tensor, positions: Tensor, into: SourceStatistics
    ) -> None:
        subsample = into.config.subsample
        measured = subsample.of(positions)
        if not bool(measured.any()):
            return
        some = inputs.chosen(measured)
        # Each stands for those around it that are not measured.
        weights = subsample.rates(positions[measured]).reciprocal()
        shares = self.channels.measure(some, into.channels, weights)
        if shares is not None:
            if len(activation) == len(measured) and some is not inputs:
                activation = activation[measured.to(activation.device)]
            into.class_sums.add(activation, weights.to(shares)[:, None] * shares)
            into.predicted.add(positions[measured], shares)

    def _activation(self, inputs: ModelInputs, at: Side) -> tuple[Tensor, Any]:
        with (
            caught_inputs(self._core) as given,
            stopped_at(self.layer, before=at == "input") as reached,
        ):
            inputs.run(self.model)
        if not reached:
            raise errors.LayerOutputError(
                f"`{self.path}` was not called in the forward pass of a batch."
            )
        return reached[0], samples_in(given[0]) if given else None

    def _check(self, activation: Tensor, config: PassConfig, where: str, some: ModelInputs) -> None:
        if tuple(activation.shape[1:]) != config.shape:
            raise errors.ShapeError(
                f"All batches must give samples of one shape at `{self.path}`; {where} gave "
                f"{tuple(activation.shape[1:])}, the first one {config.shape}."
            )
        if not torch.isfinite(activation).all():
            finite = all(bool(torch.isfinite(each).all()) for each in some.samples)
            place = f"the {config.at} of `{self.path}`" if finite else "the data"
            raise errors.NonFiniteError(
                f"Fitting needs finite numbers; found NaN or infinity in {place} at {where} "
                "(counting from 0). Remove or correct that batch."
            )

    def logits_of(self, inputs: ModelInputs) -> Tensor | None:
        """Return the logits of the whole model; None if there are none in its output."""
        return found_logits(inputs.run(self.model), self.find_logits)

    def tell(self, name: Literal["plan", "stage"], fact: FitPlan | str) -> None:
        """Tell the progress display the plan, or the stage of work without batches, if it asks."""
        listen = getattr(self._progress, name, None)
        if listen is not None:
            listen(fact)

    def watched(self, steps: Iterable[Step], count: int) -> Iterable[Step]:
        """Let the progress display follow `count` steps that are not batches but parts or tasks."""
        return self._progress(Counted(steps, count))

    def require_several_passes(self) -> None:
        """Raise unless the data can be read more than once."""
        if self._one_shot:
            raise errors.OptionError(
                f"The output of `{self.path}` is decomposed by the randomised route, which reads "
                "the data several times; found an iterator, which can be read once. Pass a loader "
                "or a list."
            )

    def _inputs_of(self, batch: Any, where: str = "batch 0") -> ModelInputs:
        """Return the model's arguments: what `prepare` says, else the batch or its first part."""
        given = self.prepare(batch) if self.prepare else arguments_in(batch, self.model)
        named = given if isinstance(given, Mapping) else {}
        plain = () if isinstance(given, Mapping) else given
        plain = plain if isinstance(plain, (tuple, list)) else (plain,)
        prepared = functools.partial(as_tensor, precision=self._precision)
        found = ModelInputs(
            mapped_tensors(tuple(plain), prepared), mapped_tensors(dict(named), prepared)
        )
        if first_samples(found.values) is None:
            whose = "`prepare` must give" if self.prepare else "Data must yield"
            raise errors.OptionError(
                f"{whose} tensors or arrays, pairs that start with one, or dicts with one that the "
                f"model has an argument for, or under `{'`, `'.join(SAMPLES[:2])}`; {where} "
                f"(counting from 0) is {_describe(batch)}. {_ADVICE}"
            )
        return found.mapped(lambda x: x.to(self.device))


def _count_samples(data: Iterable[Any], batch_size: int) -> int | None:
    """Return how many samples there are, if the data tell; at most a batch too many."""
    if isinstance(data, tuple) and all(isinstance(each, Tensor) for each in data):
        return sum(map(len, data))
    count = operator.length_hint(data, 0) * batch_size
    # `DataLoader` and others name the data set that they read. It may be sampled from, again and
    # again, or hold batches: then it is shorter than all batches but one.
    known = operator.length_hint(getattr(data, "dataset", None), 0)
    return (min(count, known) if known > count - batch_size else count) or None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, list(value)[:5]))}"
    return f"a {type(value).__name__}"
