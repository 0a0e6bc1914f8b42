"""The activations of one layer of a network on source data, batch by batch."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from ttapca.fitting.attachment import carries_filter
from ttapca.fitting.channel_statistics import (
    FindLogits,
    SourceChannels,
    Subsample,
    choose_subsample,
    found_logits,
)
from ttapca.fitting.model_inputs import KEPT_SAMPLES, ModelInputs
from ttapca.fitting.plan import FitPlan
from ttapca.fitting.source_statistics import MomentsKind, Reading, Side, SourceStatistics
from ttapca.spectral.basis_choice import acts_on_input
from ttapca.spectral.position_sample import Positions
from ttapca.support.inputs import (
    SAMPLES,
    arguments_in,
    array_batches,
    explained_inputs,
    precision_of,
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

# A network is run on at most so many samples at once that no layer gives more numbers than this
# (64 MB), however many a batch of the user's has.
RUN_NUMBERS = 2**24

# Bytes at once for each of these numbers: inputs, outputs and work space of a layer, and shortcuts.
BYTES_A_NUMBER = 4 * 5


@dataclass
class NetworkCost:
    """What one sample costs in a forward pass.

    Attributes:
        largest: Numbers in the largest output of a layer.
        multiply_adds: In convolutions and linear layers.
    """

    largest: int = 1
    multiply_adds: int = 0

    @property
    def together(self) -> int:
        """How many samples to run at once, at most."""
        return max(1, RUN_NUMBERS // self.largest)

    def bytes_for(self, samples: int) -> int:
        """Return the memory that running so many samples takes, about."""
        return BYTES_A_NUMBER * self.largest * min(samples, self.together)


@contextmanager
def watched(model: nn.Module, samples: int) -> Iterator[NetworkCost]:
    """Add up the cost of what the model runs in this block, on so many samples at once.

    Example:
        >>> import torch
        >>> model = nn.Linear(10, 20)
        >>> with watched(model, samples=2) as cost:
        ...     _ = model(torch.zeros(2, 10))
        >>> cost
        NetworkCost(largest=20, multiply_adds=200)
    """
    cost = NetworkCost()

    def see(module: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.numel():
            return
        numbers = math.ceil(output.numel() / samples)
        cost.largest = max(cost.largest, numbers)
        cost.multiply_adds += multiply_adds(module, numbers)

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    with temporary_patches() as patches:
        for module in leaves:
            patches.hook_output(module, see)
        yield cost


# Wraps the batches while they are read. If it has a method `plan`, that is given the `FitPlan`
# before the work begins; if it has a method `stage`, that is told the name of work without batches,
# such as `decomposing`.
Progress = Callable[[Iterable[Any]], Iterable[Any]]
Prepare = Callable[[Any], Any]

# A tensor given as data is cut into batches of this many samples.
TENSOR_BATCH = 256

ALL = Positions()  # of data that are read as a whole

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


class SourceActivations:
    """Batches of source data, and what they become at the layer.

    Whoever plans a fit calls `probe` first, which looks at the first batch. Whoever only reads, by
    a `Reading` that was made elsewhere, need not.

    Args:
        model: The model, in evaluation mode.
        path: Dotted path of the layer.
        data: See `ttapca.fit`, as `prepare` and `logits`.
        progress: Wraps the batches while they are read.
        prepare: Returns what the model takes of a batch.
        logits: Finds the logits in what the model returns.

    Raises:
        LayerNotFoundError: There is no such layer.
        AttachError: The layer carries a filter already.
        OptionError: What should be a function is none.
    """

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
        self.data_shape: tuple[int, ...] = ()  # of one sample of the data, once probed
        self.cost = NetworkCost()
        self.batch_size = 1  # samples in the first batch, once probed
        self.samples: int | None = None  # how many there are, if the data tell; once probed
        self.classes = 0  # that the model predicts, once probed
        self._first: ModelInputs | None = None
        self._shapes: Shapes | None = None

    def probe(self) -> Shapes:
        """Run a sample or two through the whole model to see what the layer takes and returns."""
        batch = self._inputs_of(self._first_batch())
        inputs = batch.head(2)
        self.data_shape = tuple(inputs.first.shape[1:])
        output, shapes = self._recorded(inputs)
        self._look_ahead(batch, output)
        # Not before the hook is gone: with one, a layer does not count as affine.
        folds = acts_on_input(self.layer, shapes.input, shapes.output, self.data_shape)
        self._shapes = Shapes(shapes.input, shapes.output, folds)
        return self._shapes

    def _first_batch(self) -> Any:
        """Return the first batch, which will be read again."""
        iterator = iter(self._data)
        try:
            first = next(iterator)
        except StopIteration:
            raise NotEnoughDataError("Fitting needs data; found none.") from None
        if self._one_shot:
            self._data = itertools.chain([first], iterator)
        return first

    def _recorded(self, inputs: ModelInputs) -> tuple[Any, Shapes]:
        """Run the whole model, and return its output and the shapes at the layer.

        What the model costs is noted on the way. Raises unless the model takes the inputs, and
        calls the layer once.
        """
        calls: list[Shapes] = []

        def record(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor) or output.dim() < 2:
                raise LayerOutputError(
                    "A filter goes after a layer that returns one tensor of shape (batch, ...); "
                    f"`{self.path}` returned {_describe(output)}. Choose another layer."
                )
            taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
            calls.append(Shapes(taken, tuple(output.shape[1:])))

        try:
            seen = watched(self.model, len(inputs.first))
            with explained_inputs(inputs.values), seen as self.cost, temporary_patches() as patches:
                patches.hook_output(self.layer, record)
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
        if len(calls) != 1:
            times = "never called" if not calls else f"called {len(calls)} times"
            raise LayerOutputError(
                f"A filter goes after a layer that is called once in a forward pass; `{self.path}` "
                f"is {times}. Choose another layer, or use a separate module for each call."
            )
        return output, calls[0]

    def _look_ahead(self, batch: ModelInputs, output: Any) -> None:
        """Note what the first batch and its output say about the work to come."""
        self._first = batch.head(2)
        self.batch_size = max(1, len(batch.first))
        self.block = self.block or self.batch_size
        self.samples = _count_samples(self._data, self.batch_size)
        logits = found_logits(output, self.find_logits)
        self.classes = 0 if logits is None else logits.shape[1]

    @property
    def inputs(self) -> ModelInputs:
        """Some samples of the first batch, as the model takes them; `probe` comes first."""
        if self._first is None:
            raise RuntimeError("`probe` comes first.")
        return self._first

    def subsample(self) -> Subsample:
        """Return which samples are run through the whole model; `probe` comes first."""
        return choose_subsample(
            self.model,
            self.samples,
            self.classes,
            numbers=self._numbers,
            multiply_adds=self.cost.multiply_adds,
        )

    def reading(
        self, at: Side, shape: tuple[int, ...], moments: MomentsKind | None = None
    ) -> Reading:
        """Say how a pass over the data goes; `probe` comes first."""
        return Reading(
            at,
            shape,
            self._numbers,
            self.cost.together,
            self.block,
            self.subsample(),
            moments,
        )

    @property
    def _numbers(self) -> int:
        """Numbers in a sample of the data."""
        return max(1, math.prod(self.data_shape))

    @torch.no_grad()
    def collect(self, into: SourceStatistics, positions: Positions, name: str = "") -> int:
        """Read all data once, and return how many samples there were.

        Args:
            into: What was collected from other data before; this is added to it.
            positions: Where these samples stand among all.
            name: Of the data, for error messages.
        """
        before = into.samples
        for activation in self.batches(into.reading, into, positions, name):
            if into.moments is not None:
                into.moments.update(activation)
        return into.samples - before

    def batches(
        self,
        reading: Reading,
        into: SourceStatistics | None,
        positions: Positions = ALL,
        name: str = "",
    ) -> Iterator[Tensor]:
        """Yield what every batch becomes at the layer, shape (batch, *shape).

        Args:
            reading: Which side of the layer, and how.
            into: Collects everything but moments; None in later passes.
            positions: Where these samples stand among all.
            name: Of the data, for error messages.
        """
        read = rows = 0
        for number, batch in enumerate(self._progress(self._data)):
            where = f"batch {number}{f' of {name}' if name else ''}"
            whole = self._inputs_of(batch, where)
            if into is not None:
                into.kept.take(whole, positions.of(read, len(whole.first)))
            for inputs in whole.parts(reading.together):
                activation, given = self._activation(inputs, reading.at)
                self._check(activation, reading, where, inputs.first)
                if into is not None:
                    into.inputs.add(given)
                    places = positions.of(read, len(inputs.first))
                    self._measure(inputs, activation, places, into)
                    # A layer may give several rows for a sample.
                    into.sample.take(activation, positions.of(rows, len(activation)))
                read, rows = read + len(inputs.first), rows + len(activation)
                yield activation

    def _measure(
        self, inputs: ModelInputs, activation: Tensor, positions: Tensor, into: SourceStatistics
    ) -> None:
        """Run the samples through the whole model that the rule chooses."""
        subsample = into.reading.subsample
        measured = subsample.of(positions)
        if not bool(measured.any()):
            return
        some = inputs.chosen(measured)
        # Each stands for those around it that are not measured.
        weights = subsample.rates(positions[measured]).reciprocal()
        channels = SourceChannels(self.model, self.find_logits, into.channels)
        shares = channels.see(some, weights)
        if shares is not None:
            if len(activation) == len(measured) and some is not inputs:
                activation = activation[measured.to(activation.device)]
            into.class_means.add(activation, weights.to(shares)[:, None] * shares)
            into.predicted.add(positions[measured], shares)

    def _activation(self, inputs: ModelInputs, at: Side) -> tuple[Tensor, Any]:
        """Run the network up to the layer; return that, and what the network itself was given."""
        with (
            caught_inputs(self._core) as given,
            stopped_at(self.layer, before=at == "input") as reached,
        ):
            inputs.run(self.model)
        if not reached:
            raise LayerOutputError(f"`{self.path}` was not called in the forward pass of a batch.")
        return reached[0], given[0] if given else None

    def _check(self, activation: Tensor, reading: Reading, where: str, samples: Tensor) -> None:
        """Raise unless the activations have the shape of the first batch and are finite."""
        if tuple(activation.shape[1:]) != reading.shape:
            raise ShapeError(
                f"All batches must give samples of one shape at `{self.path}`; {where} gave "
                f"{tuple(activation.shape[1:])}, the first one {reading.shape}."
            )
        if not torch.isfinite(activation).all():
            finite = not samples.is_floating_point() or bool(torch.isfinite(samples).all())
            place = f"the {reading.at} of `{self.path}`" if finite else "the data"
            raise NonFiniteError(
                f"Fitting needs finite numbers; found NaN or infinity in {place} at {where} "
                "(counting from 0). Remove or correct that batch."
            )

    def logits_of(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return what the whole model predicts; None where no logits are found in its output."""
        output = self.model(*args, **kwargs)
        return found_logits(output, self.find_logits)

    def bytes_to_run(self) -> int:
        """Return the memory that running the network takes."""
        first = self._shapes is not None and self._shapes.input == self.data_shape
        # Where nothing is measured, only what is kept runs through more than one layer.
        if first and self.subsample().expected == 0:
            return self.cost.bytes_for(min(self.batch_size, KEPT_SAMPLES))
        return self.cost.bytes_for(self.batch_size)

    def tell(self, plan: FitPlan) -> None:
        """Tell the progress display what will be done, if it wants to know."""
        listen = getattr(self._progress, "plan", None)
        if listen is not None:
            listen(plan)

    def watched(self, steps: Iterable[Step], unit: str, count: int) -> Iterable[Step]:
        """Let the progress display follow steps that are not batches.

        Args:
            steps: What is done, one after the other.
            unit: What one of them is, in a word.
            count: How many there are.
        """
        return self._progress(Counted(steps, unit, count))

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

    def _inputs_of(self, batch: Any, where: str = "batch 0") -> ModelInputs:
        """Return the model's arguments: what `prepare` says, else the batch or its first part."""
        given = self.prepare(batch) if self.prepare else arguments_in(batch, self.model)
        if isinstance(given, Mapping):
            found = ModelInputs((), dict(given))
        else:
            found = ModelInputs(tuple(given) if isinstance(given, (tuple, list)) else (given,), {})
        found = found.converted(self._precision)
        if not any(isinstance(value, Tensor) for value in found.values):
            whose = "`prepare` must give" if self.prepare else "Data must yield"
            raise OptionError(
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
