"""The arguments that a model is called with, and those that are kept to predict them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.support.inputs import as_tensor

# Some of the data are kept, evenly spread, to predict them again after the fit.
KEPT_PARTS = 8  # batches of which some samples are kept
KEPT_SAMPLES = 16  # of each of them, at most
KEPT_NUMBERS = 2**23  # of all of them together, at most


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

        args = tuple(map(changed, self.args))
        return ModelInputs(args, {name: changed(value) for name, value in self.kwargs.items()})

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of `mapped`."""
        return [value for value in self.values if isinstance(value, Tensor)]

    def replaced(self, tensors: list[Tensor]) -> ModelInputs:
        """Return the arguments with these tensors, in the order of `tensors`."""
        following = iter(tensors)
        return self.mapped(lambda _: next(following))

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

    def chosen(self, among: Tensor) -> ModelInputs:
        """Return the samples for which `among`, shape (samples,), is true."""
        if bool(among.all()):
            return self
        return self._rows(among.to(self.first.device))

    def parts(self, most: int) -> Iterator[ModelInputs]:
        """Yield the samples in order, at most so many at a time."""
        samples = len(self.first)
        if samples <= most:
            yield self
            return
        for start in range(0, samples, most):
            yield self._rows(slice(start, start + most))

    def _rows(self, rows: slice | Tensor) -> ModelInputs:
        samples = len(self.first)
        return self.mapped(lambda x: x[rows] if x.dim() and len(x) == samples else x)

    def run(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


class KeptInputs:
    """The first samples of some blocks of the data, evenly spread over all blocks.

    Which ones those are depends on positions alone, as in `ttapca.spectral.position_sample`.

    Args:
        block: Samples in a block, a batch as it is usually read.
        numbers: Numbers in a sample.
    """

    def __init__(self, block: int, numbers: int) -> None:
        self._block = block
        self._head = kept_of_a_batch(numbers)
        self._every = 1
        self._kept: dict[int, ModelInputs] = {}  # by the position of the first sample

    def take(self, inputs: ModelInputs, positions: Tensor) -> None:
        """See a batch whose samples are at these positions, and keep some or none of them."""
        blocks, place = positions // self._block, positions % self._block
        wanted = (blocks % self._every == 0) & (place < self._head)
        for block in set(blocks[wanted].tolist()):
            chosen = wanted & (blocks == block)
            some = inputs.chosen(chosen).mapped(lambda x: x.detach().to("cpu", copy=True))
            self._kept[int(positions[chosen][0])] = some
        self._drop()

    def merge(self, other: KeptInputs) -> None:
        """See what another one has seen."""
        self._every = max(self._every, other._every)
        self._kept |= other._kept
        self._drop()

    def _drop(self) -> None:
        """Keep one block in `_every`, fewer where these are still too many."""
        while True:
            self._kept = {
                position: inputs
                for position, inputs in self._kept.items()
                if position // self._block % self._every == 0
            }
            if len({position // self._block for position in self._kept}) <= KEPT_PARTS:
                return
            self._every *= 2

    def all(self) -> list[ModelInputs]:
        """Return what is kept, in order of the positions."""
        return [self._kept[position] for position in sorted(self._kept)]

    def tensors(self) -> dict[str, Tensor]:
        """Return what `load_tensors` makes the same of, given arguments like these."""
        places = sorted(self._kept)
        found = {"places": torch.tensor([self._every, *places])}
        for place in places:
            for number, tensor in enumerate(self._kept[place].tensors()):
                found[f"{place}.{number}"] = tensor
        return found

    def load_tensors(self, tensors: dict[str, Tensor], like: ModelInputs) -> None:
        """Take over what `tensors` returned; what is no tensor is as in `like`."""
        self._every, *places = tensors["places"].tolist()
        for place in places:
            numbers = range(len(like.tensors()))
            self._kept[place] = like.replaced([tensors[f"{place}.{number}"] for number in numbers])


def kept_of_a_batch(numbers: int) -> int:
    """Return how many samples of a batch are kept at most, given the numbers in a sample."""
    return max(1, min(KEPT_SAMPLES, KEPT_NUMBERS // KEPT_PARTS // max(1, numbers)))
