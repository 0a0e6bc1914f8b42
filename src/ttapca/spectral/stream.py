"""One stream of samples: its state, and the values and parts of the methods that adapt to it.

The *state* of closed-form filters and statistics is made anew by a `StreamBatch`. A *value* belongs
to one method, by name, and is replaced, never written into. A *part* lives elsewhere, as parameters
do. Changes of a batch are kept apart until it is over: a broken one leaves no mark.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import Spectrum, StreamState, leaves
from ttapca.support.tensors import as_on

# Torch keeps the step count of an optimiser on the CPU, whatever else is moved.
STAYS = "step"

# From this many numbers on, copying a tensor takes longer than summing it up by itself.
LARGE = 2**13

# The name under which the state is among the values that are saved.
STATE = "state"


class Part(Protocol):
    """State that does not live in the stream; its contents are replaced, never written into."""

    def contents(self) -> Any:
        """Return the contents by reference: tensors in tuples, lists and dicts."""

    def put(self, contents: Any) -> None:
        """Replace the contents by these."""

    def start(self) -> Any:
        """Return a copy of the contents with which a new stream starts."""


class Attributes:
    """A part made of attributes of an object, which now has those of a new stream."""

    def __init__(self, owner: object, names: Sequence[str]) -> None:
        self._owner = owner
        self._names = tuple(names)
        self._start = copy.deepcopy(self.contents())

    def contents(self) -> dict[str, Any]:
        """See `Part`."""
        return {name: getattr(self._owner, name) for name in self._names}

    def put(self, contents: Mapping[str, Any]) -> None:
        """See `Part`."""
        for name in self._names:
            setattr(self._owner, name, contents[name])

    def start(self) -> dict[str, Any]:
        """See `Part`."""
        return copy.deepcopy(self._start)


class ParameterValues:
    """A part made of the values of parameters, which are now those of a new stream."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    def contents(self) -> list[Tensor]:
        """See `Part`."""
        return [parameter.data for parameter in self._parameters]

    def put(self, contents: Sequence[Tensor]) -> None:
        """See `Part`."""
        set_values(self._parameters, contents)

    def start(self) -> list[Tensor]:
        """See `Part`."""
        return [value.clone() for value in self._start]


def set_values(parameters: Iterable[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Let parameters use these values, on their own device and in their own precision."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = as_on(value, parameter)


@dataclass(frozen=True)
class ScaleGivenBack:
    """The share of a lost scale that normalisation layers restore by themselves."""

    weight: float  # of a large batch in their statistics, averaged over the layers
    prior: float | None = None  # size of a batch that weighs half as much; None: any size is alike
    needs_two: bool = False  # whether a single sample changes no statistics

    def by(self, samples: Tensor) -> Tensor:
        """Return the share after these numbers of samples, from 0 to 1, of any shape."""
        full = torch.full_like(samples, self.weight)
        share = full if self.prior is None else full * samples / (samples + self.prior)
        return torch.where(samples <= 1, 0.0, share) if self.needs_two else share


class Stream:
    """State, values and parts of one stream; a sample counts 1 / e after `memory` others."""

    def __init__(self, memory: float = math.inf) -> None:
        self.memory = memory
        self.state: StreamState | None = None  # of closed-form filters and statistics, if any
        self.start: StreamState | None = None  # of a new stream
        self.batch: StreamBatch | None = None  # that goes through the model, if any
        self.left_out = False  # whether a method left the batch out for NaN or infinity in it
        self.given_back: ScaleGivenBack | None = None  # by normalisation layers, if by any
        self.starts: dict[str, Any] = {"samples": 0, "batches": 0, "images": 0, "skipped": 0}
        self.growing: set[str] = set()  # values with a row for each sample that was kept
        self._past = dict(self.starts)
        self._present: dict[str, Any] = {}  # changes by the batch
        self._takers: list[Callable[[StreamState], None]] = []
        self._parts: dict[str, Part] = {}
        self._before: dict[str, Any] | None = None  # the contents before the batch that is open
        self._next: Mapping[str, Any] | None = None  # contents that are being put in place
        # Values that have seen this batch: only its first pass counts for each. None before the
        # first batch: every pass counts.
        self._counted: set[str] | None = None
        self._within_batch = False

    @property
    def samples(self) -> int:
        """How many samples were seen since the start."""
        return int(self.now("samples"))

    @property
    def batches(self) -> int:
        """How many batches were seen since the start."""
        return int(self.now("batches"))

    @property
    def values(self) -> dict[str, Any]:
        """All values by name, including the changes of this batch, and the state."""
        found = self._past | self._present
        return found if self.state is None else {**found, STATE: self.state}

    def declare_state(self, **known: Any) -> None:
        """Add to the state of a new stream; see `StreamState`."""
        self.start = self.state = replace(self.start or StreamState(()), **known)

    def add_filter(
        self, spectrum: Spectrum, take: Callable[[StreamState], None] | None = None
    ) -> int:
        """Add a filter to the state of a new stream; `take` is given each state put in place."""
        before = () if self.start is None else self.start.spectra
        self.declare_state(spectra=(*before, spectrum))
        if take is not None:
            self._takers.append(take)
        return len(before)

    def opened(self, size: int) -> StreamBatch:
        """Return the batch that goes through the model, of this many samples."""
        # Between batches it leaves no mark; as long as every pass counts, it is a new one.
        if self.batch is not None:
            if self.batch.size is None:
                self.batch.size = size
            return self.batch
        if self.state is None or self.start is None:
            raise LookupError("A filter or statistics must declare a state first.")
        counts = self._counted is None
        return StreamBatch([self.state], self.start, memory=self.memory, size=size, counts=counts)

    def declare(self, name: str, start: Any, *, grows: bool = False) -> None:
        """Declare a value of a new stream; if it `grows`, it has a row for each sample."""
        self.starts[name] = self._past[name] = start
        if grows:
            self.growing.add(name)

    def keep(self, name: str, part: Part) -> None:
        """Make a part belong to the stream."""
        self._parts[name] = part

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts."""
        return tuple(self._parts)

    def past(self, name: str) -> Any:
        """Return a value as it was before this batch."""
        return self._past[name]

    def now(self, name: str) -> Any:
        """Return a value, including the change by this batch."""
        return self._present[name] if name in self._present else self._past[name]

    def write(self, name: str, value: Any) -> None:
        """Replace a value; if this batch turns out broken, the old value comes back."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # it must be usable outside as well
                value = map_tensors(value, torch.clone)
        (self._past if self._counted is None else self._present)[name] = value

    def counts(self, name: str) -> bool:
        """Return whether this pass counts for a value: the first one of each batch does."""
        if torch.compiler.is_exporting():  # an exported program is frozen
            return False
        if self._counted is None:
            return True
        if not self._within_batch or name in self._counted:
            return False
        self._counted.add(name)
        return True

    def start_batch(self, samples: int = 0) -> None:
        """Open a batch, which may take several passes."""
        self.undo_batch()
        self._before = self.contents()
        self._counted, self._within_batch = set(), True
        self.left_out = False
        self._present = {
            "samples": self._past["samples"] + samples,
            "batches": self._past["batches"] + 1,
            "images": self._past["images"] + samples,
        }
        if self.state is not None and self.start is not None:
            size = samples or None
            self.batch = StreamBatch([self.state], self.start, memory=self.memory, size=size)

    def end_batch(self, *, skipped: bool = False) -> None:
        """End the batch; if it is `skipped`, its changes are undone, and it is counted."""
        if skipped and self._before is not None:
            values = self._before["values"]
            values = {**values, "skipped": values["skipped"] + 1}
            self._before = {**self._before, "values": values}
        elif self._before is not None:
            past, state = self._past | _finite(self._present), self.state
            if self.batch is not None:
                with torch.inference_mode(False):
                    [state] = self.batch.finish()
            # An interrupt before this line undoes all of the batch, and none of it after it.
            self._past, self.state, self._before = past, state, None
        self.undo_batch()

    def undo_batch(self) -> None:
        """Undo the open batch, if there is one; no pass counts until the next one."""
        if self._before is not None:
            self.put(self._before)
            self._before = None
        self.batch, self._present = None, {}
        self._counted, self._within_batch = set(), False

    @property
    def lasting(self) -> dict[str, Any]:
        """The values that `forget` keeps."""
        found = {name: self.now(name) for name in ("images", "skipped")}
        if self.state is not None and self.start is not None:
            found[STATE] = self.state.forgotten(self.start)
        return found

    def forget(self) -> None:
        """Forget all adaptation, and keep the counts of images and the facts about the stream."""
        lasting, begun = self.lasting, self.started()
        self.put({**begun, "values": begun["values"] | lasting})

    def reset(self) -> None:
        """Begin a new stream."""
        self.put(self.started())

    def started(self) -> dict[str, dict[str, Any]]:
        """Return the contents of a new stream but for `state`, for `put`."""
        parts = {name: part.start() for name, part in self._parts.items()}
        return {"values": dict(self.starts), "parts": parts}

    def contents(self) -> dict[str, dict[str, Any]]:
        """Return all contents of the stream by reference, for `put`."""
        self._continue_put()
        parts = {name: part.contents() for name, part in self._parts.items()}
        return {"values": self.values, "parts": parts}

    def put(self, contents: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with another stream's contents; `contents` completes it after an interrupt."""
        self._next = contents
        self._continue_put()

    def _continue_put(self) -> None:
        if self._next is None:
            return
        values = {**self.starts, **self._next["values"]}
        self.state = values.pop(STATE, self.start)
        self._past, self._present = values, {}
        if self.state is not None and self.start is not None:
            for take in self._takers if self.state.spectra is not self.start.spectra else ():
                take(self.state)
        for name, content in self._next["parts"].items():
            self._parts[name].put(content)
        self._next = None

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert all tensors, when the model they belong to is moved or cast."""
        self.starts = map_tensors(self.starts, fn)
        self.start = map_tensors(self.start, fn)
        self.put(map_tensors(self.contents(), fn))


def shift_of(state: StreamState | None) -> float:
    """Return how surely the data have shifted, from 0 to 1; 1 if no filter can tell."""
    return 1.0 if state is None or not state.spectra else state.shift


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return the same tuples, lists and dicts with `fn` applied to every tensor in them."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, StreamState):
        return tree.moved(fn)
    if isinstance(tree, dict):
        return {
            name: value if name == STAYS else map_tensors(value, fn) for name, value in tree.items()
        }
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, fn) for value in tree)
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, StreamState):
        yield from (each for each in leaves(tree).values() if isinstance(each, Tensor))
    elif isinstance(tree, (tuple, list, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that hold neither NaN nor infinity: almost always all of them."""
    large: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors_in(values):
        (large if tensor.numel() >= LARGE else small).append(tensor)
    # A sum is finite only if all it is made of is. Small tensors are joined, since each sum takes a
    # call; of large ones, the copy would take longer.
    if small:
        large.append(torch.cat([as_on(tensor, small[0]).reshape(-1) for tensor in small]))
    if all(math.isfinite(float(tensor.sum())) for tensor in large):
        return values
    return {
        name: value
        for name, value in values.items()
        if all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value))
    }
