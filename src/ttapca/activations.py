"""What source data become at one layer of a network, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ttapca.attachment import carries_filter
from ttapca.catching import stopped_at
from ttapca.errors import (
    AttachError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)
from ttapca.group_norm import GroupNormWatch
from ttapca.modules import device_and_dtype, find_layer

Progress = Callable[[Iterable[Any]], Iterable[Any]]

# A tensor given as data is cut into batches of this many samples.
TENSOR_BATCH = 256


@dataclass(frozen=True)
class Shapes:
    """Of one sample of a layer's input and output; the input may be no single tensor."""

    input: tuple[int, ...] | None
    output: tuple[int, ...]


class SourceActivations:
    """Batches of source data, and what they become at the layer."""

    def __init__(
        self, model: nn.Module, path: str, data: Iterable[Any] | Tensor, progress: Progress | None
    ) -> None:
        self.model = model
        self.path = path
        self.layer = find_layer(model, path)
        if carries_filter(self.layer):
            raise AttachError(
                f"A filter is fitted on the untouched model; `{path}` already carries a filter. "
                "Call `detach()` on what put it there first."
            )
        if progress is not None and not callable(progress):
            raise OptionError(
                "`progress` is a function that wraps an iterable, for example `tqdm`; found "
                f"{progress!r}."
            )
        self.device = device_and_dtype(self.layer, model)[0]
        self._one_shot = isinstance(data, Iterator)
        self._data: Iterable[Any] = (
            torch.split(data, TENSOR_BATCH) if isinstance(data, Tensor) else data
        )
        self._progress = progress or (lambda batches: batches)
        self._first: tuple[Any, Iterator[Any]] | None = None
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
            self._first = (first, iterator)  # the batch must be read again, but cannot be
        calls: list[Shapes] = []

        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module
            if not isinstance(output, Tensor) or output.dim() < 2:
                raise LayerOutputError(
                    "A filter goes after a layer that returns one tensor of shape (batch, ...); "
                    f"`{self.path}` returned {_describe(output)}. Choose another layer."
                )
            taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
            calls.append(Shapes(taken, tuple(output.shape[1:])))

        handle = self.layer.register_forward_hook(record)
        try:
            self.model(_inputs_of(first, 0).to(self.device)[:2])
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
        for number, batch in enumerate(self._progress(self._read())):
            samples = _inputs_of(batch, number).to(self.device)
            activation = self._run_to_layer(samples, at)
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
            if self._passes == 1:
                self.group_norm.see(samples)
            yield activation

    def require_several_passes(self) -> None:
        """Raise unless the data can be read more than once."""
        if self._one_shot:
            raise OptionError(
                f"The output of `{self.path}` is decomposed by the randomised route, which reads "
                "the data several times; found an iterator, which can be read once. Pass a loader "
                "or a list."
            )

    def _read(self) -> Iterator[Any]:
        if self._first is None:
            yield from self._data
        else:
            first, rest = self._first
            yield first
            yield from rest

    def _run_to_layer(self, samples: Tensor, at: Literal["input", "output"]) -> Tensor:
        with stopped_at(self.layer, before=at == "input") as seen:
            self.model(samples)
        if not seen:
            raise LayerOutputError(f"`{self.path}` was not called in the forward pass of a batch.")
        activation: Tensor = seen[0]
        return activation


def _inputs_of(batch: Any, number: int) -> Tensor:
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch
    raise OptionError(
        "Data must yield tensors, or pairs whose first element is a tensor; batch "
        f"{number} (counting from 0) is {_describe(batch)}."
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
