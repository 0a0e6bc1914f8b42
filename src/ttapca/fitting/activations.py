"""What source data become at one layer of a network, batch by batch."""

from __future__ import annotations

import itertools
import math
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
from ttapca.fitting.attachment import carries_filter
from ttapca.support.capture import stopped_at
from ttapca.support.group_norm import GroupNormWatch
from ttapca.support.modules import device_and_dtype, explained_inputs, find_layer

# Wraps the batches while they are read. One that has a method `stage` is also told the name of work
# that has no batches, such as `decomposing`.
Progress = Callable[[Iterable[Any]], Iterable[Any]]
Prepare = Callable[[Any], Any]

# A tensor given as data is cut into batches of this many samples.
TENSOR_BATCH = 256

# With n samples a variance is known up to a factor of about 1 + sqrt(2 / n): with 32 within a
# quarter, with 3 not within a factor of two, and gains that follow from it would be noise.
FEWEST_SAMPLES = 32

# Parts of batches that are kept, evenly over the data, to be predicted once more after the fit.
KEPT_PARTS = 8
KEPT_SAMPLES = 16  # of each part, fewer where samples are large
KEPT_NUMBERS = 2**23

# How to fit on batches that are not simply what the model takes.
_WAY = (
    "Say what the model takes of a batch: prepare=lambda batch: batch['image'] for one tensor, "
    "(batch[0], batch[1]) for several, a dict for arguments by name."
)


@dataclass(frozen=True)
class Shapes:
    """Of one sample of a layer's input and output; the input may be no single tensor."""

    input: tuple[int, ...] | None
    output: tuple[int, ...]


@dataclass(frozen=True)
class ModelInputs:
    """What a model is called with for one batch; some of it are tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        """All of it."""
        return (*self.args, *self.kwargs.values())

    @property
    def first(self) -> Tensor:
        """The first tensor, whose first dimension is that of the samples."""
        return next(value for value in self.values if isinstance(value, Tensor))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """The same with every tensor changed."""
        values = [change(value) if isinstance(value, Tensor) else value for value in self.values]
        named = dict(zip(self.kwargs, values[len(self.args) :], strict=True))
        return ModelInputs(tuple(values[: len(self.args)]), named)

    def head(self, count: int) -> ModelInputs:
        """The first samples; tensors that do not go by sample are left whole."""
        samples = len(self.first)
        return self.mapped(lambda x: x[:count] if x.dim() and len(x) == samples else x)

    def run(self, model: nn.Module) -> Any:
        """What the model makes of it."""
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
        ):
            if function is not None and not callable(function):
                raise OptionError(f"`{name}` is a function {purpose}; found {function!r}.")
        self.device = device_and_dtype(self.layer, model)[0]
        self._prepare = prepare
        if isinstance(data, np.ndarray):
            raise OptionError("Data are tensors; found a numpy array. Give torch.from_numpy(data).")
        self._one_shot = isinstance(data, Iterator)
        self._data: Iterable[Any] = (
            torch.split(data, TENSOR_BATCH) if isinstance(data, Tensor) else data
        )
        self._progress: Progress = progress or (lambda batches: batches)
        self._kept: list[ModelInputs] = []
        self._keep_every = 1
        self._first: tuple[list[Any], Iterator[Any]] | None = None
        self._passes = 0
        self.group_norm = GroupNormWatch(model)

    def probe(self) -> Shapes:
        """Run a sample or two through the whole model to see what the layer takes and gives."""
        iterator = iter(self._data)
        try:
            first = next(iterator)
        except StopIteration:
            raise NotEnoughDataError("Fitting needs data; found none.") from None
        if self._one_shot:
            self._first = ([first], iterator)  # the batch must be read again, but cannot be
        calls: list[Shapes] = []

        def record(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor) or output.dim() < 2:
                raise LayerOutputError(
                    "A filter goes after a layer that returns one tensor of shape (batch, ...); "
                    f"`{self.path}` returned {_describe(output)}. Choose another layer."
                )
            taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
            calls.append(Shapes(taken, tuple(output.shape[1:])))

        inputs = self._inputs_of(first, 0).head(2)
        handle = self.layer.register_forward_hook(record)
        try:
            with explained_inputs(inputs.values):
                inputs.run(self.model)
        except TtapcaError:
            raise
        except TypeError as error:
            raise InputTypeError(f"The model cannot be called on the data: {error}. {_WAY}") from (
                error
            )
        except (RuntimeError, ValueError, IndexError) as error:
            shape = tuple(inputs.first.shape[1:])
            raise ShapeError(
                f"The model must take what the data hold, samples of shape {shape}; it does not: "
                f"{error}. {_WAY}"
            ) from error
        finally:
            handle.remove()
        if len(calls) != 1:
            times = "never called" if not calls else f"called {len(calls)} times"
            raise LayerOutputError(
                f"A filter goes after a layer that is called once in a forward pass; `{self.path}` "
                f"is {times}. Choose another layer, or give each call a module of its own."
            )
        return calls[0]

    def batches(self, at: Literal["input", "output"], shape: tuple[int, ...]) -> Iterator[Tensor]:
        """What every batch becomes at the layer, shape (batch, *shape)."""
        self._passes += 1
        seen = 0
        for number, batch in enumerate(self._progress(self._read())):
            inputs = self._inputs_of(batch, number)
            with stopped_at(self.layer, before=at == "input") as reached:
                inputs.run(self.model)
            if not reached:
                raise LayerOutputError(
                    f"`{self.path}` was not called in the forward pass of a batch."
                )
            activation: Tensor = reached[0]
            self._check(activation, shape, number, at, inputs.first)
            if self._passes == 1:
                self.group_norm.see(*inputs.args, **inputs.kwargs)
                self._keep(number, inputs)
            seen += len(activation)
            yield activation
        if seen < FEWEST_SAMPLES:
            raise NotEnoughDataError(
                f"A filter is fitted on at least {FEWEST_SAMPLES} samples: fewer do not tell how "
                f"much a component varies, and gains would follow chance. Found {seen}. Give more "
                "data."
            )

    def _check(
        self, activation: Tensor, shape: tuple[int, ...], number: int, at: str, samples: Tensor
    ) -> None:
        """Raise unless what a batch became has the shape of the first one and is finite."""
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
                f"{number} (counting from 0). Remove that batch or mend it."
            )

    def kept(self) -> list[ModelInputs]:
        """Some of the data, evenly over the first pass, for the whole model."""
        return [inputs.mapped(lambda x: x.to(self.device)) for inputs in self._kept]

    def stage(self, name: str) -> None:
        """Tell whoever shows progress what is done while no batch is read."""
        tell = getattr(self._progress, "stage", None)
        if tell is not None:
            tell(name)

    def _keep(self, number: int, inputs: ModelInputs) -> None:
        """Keep a part of every so many batches, and half of all whenever there are too many."""
        if number % self._keep_every:
            return
        largest = KEPT_NUMBERS // KEPT_PARTS // max(1, math.prod(inputs.first.shape[1:]))
        part = inputs.head(max(1, min(KEPT_SAMPLES, largest)))
        self._kept.append(part.mapped(lambda x: x.detach().to("cpu", copy=True)))
        if len(self._kept) > KEPT_PARTS:
            self._kept = self._kept[::2]
            self._keep_every *= 2

    def require_several_passes(self) -> None:
        """Raise unless the data can be read more than once."""
        if self._one_shot:
            raise OptionError(
                f"The output of `{self.path}` is decomposed by the randomised route, which reads "
                "the data several times; found an iterator, which can be read once. Pass a loader "
                "or a list."
            )

    def _read(self) -> Iterable[Any]:
        try:
            return _Pass(self._each_batch(), len(self._data))  # type: ignore[arg-type]
        except TypeError:  # an iterator, or a loader of a stream
            return self._each_batch()

    def _each_batch(self) -> Iterator[Any]:
        return iter(self._data) if self._first is None else itertools.chain(*self._first)

    def _inputs_of(self, batch: Any, number: int) -> ModelInputs:
        """What the model is called with: said by `prepare`, else the batch or its first part."""
        if self._prepare is not None:
            found = _as_inputs(self._prepare(batch))
        else:
            found = _as_inputs(batch[:1] if isinstance(batch, (tuple, list)) else (batch,))
        if not any(isinstance(value, Tensor) for value in found.values):
            whose = "`prepare` must give" if self._prepare else "Data must yield"
            raise OptionError(
                f"{whose} tensors, or pairs whose first element is a tensor; batch {number} "
                f"(counting from 0) is {_describe(batch)}. {_WAY}"
            )
        return found.mapped(lambda x: x.to(self.device))


@dataclass(frozen=True)
class _Pass:
    """One pass over data of known length: whoever shows progress asks how much there is."""

    batches: Iterator[Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def _as_inputs(value: Any) -> ModelInputs:
    if isinstance(value, Mapping):
        return ModelInputs((), dict(value))
    return ModelInputs(tuple(value) if isinstance(value, (tuple, list)) else (value,), {})


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, list(value)[:5]))}"
    return f"a {type(value).__name__}"
