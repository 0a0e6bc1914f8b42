"""One stream of samples: what was seen of it, and everything that adapted to it, by name.

Whatever changes at test time is declared here once. Reset, snapshot, saving, moving to a device and
any number of streams over one model follow from that. There are two kinds:

- A *value* is held by the stream. Whoever declared it reads it and replaces it, but never writes
  into it. What a batch changes is kept apart until the batch is over, so that a broken batch leaves
  no mark.
- A *part* lives elsewhere: parameters that an optimiser moves, the optimiser's own state. The
  stream takes its contents out and puts others in.

Where the samples of a stream have several conditions (see `ttapca.spectral.conditions`), there is
one of some values for each. `Stream.by_condition` runs a piece of work on the samples of one
condition after the other; who does the work reads and writes values as if there were one condition.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ttapca.support.tensors import as_on

if TYPE_CHECKING:
    from ttapca.spectral.class_plan import ClassPlan

# In the name of a value: before the number of the condition that it belongs to.
OF_CONDITION = " of condition "

# Torch keeps the step count of an optimiser on the CPU, whatever else is moved.
STAYS = "step"

# From this many numbers on, copying a tensor takes longer than summing it up by itself.
LARGE = 2**13

# The value that `ttapca.spectral.conditions` keeps, of which the stream counts the states.
CONDITION_STATES = "conditions/states"

# The value that `ttapca.adaptation.chain_passes` keeps: the tensors of a `ChainState`.
CHAIN = "chain"

# What every batch adds to, however often its passes start again.
COUNTED = ("samples", "batches", "images")


class Part(Protocol):
    """State that does not live in the stream.

    Attributes:
        undone: Whether a broken batch is undone by putting back what was there before it. That
            takes contents which are replaced, never written into: of a parameter that an optimiser
            moves in place, the reference from before the batch shows the new value as well.
    """

    undone: bool

    def contents(self) -> Any:
        """Return what is there now, by reference: tensors in tuples, lists and dicts."""

    def put(self, contents: Any) -> None:
        """Replace what is there by these contents."""

    def start(self) -> Any:
        """Return a copy of what a new stream starts with."""


class Attributes:
    """A part made of some attributes of an object; they are replaced, never written into.

    Args:
        owner: The object, in the state in which a stream starts.
        names: Names of the attributes.
    """

    undone = True

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
    """A part made of the values of parameters, which are now those that a stream starts with."""

    undone = False

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
    """Let parameters use these values, on their own device and in their own precision.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> set_values([weight], [torch.ones(1, dtype=torch.float64)])
        >>> weight.data
        tensor([1.])
    """
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = as_on(value, parameter)


@dataclass(frozen=True)
class ScaleGivenBack:
    """What share of a lost scale the normalisation layers of a network restore by themselves.

    Attributes:
        weight: Weight of a large batch in their statistics, averaged over the layers.
        prior: Size of a batch that weighs half as much; None where the size does not matter.
        needs_two: Whether a single sample changes no statistics.
    """

    weight: float
    prior: float | None = None
    needs_two: bool = False

    def by(self, samples: float) -> float:
        """Return the share after this many samples, from 0 (nothing) to 1 (all).

        Example:
            >>> ScaleGivenBack(0.5, prior=16.0).by(16)
            0.25
        """
        if self.needs_two and samples <= 1:
            return 0.0
        return self.weight * (1.0 if self.prior is None else samples / (samples + self.prior))


class Stream:
    """What was seen, and what was made of it.

    As long as nobody calls `start_batch`, every pass counts. After that, only the first pass of
    each batch does, for each value separately.

    Args:
        memory: Number of samples after which what was seen counts 1 / e.

    Attributes:
        left_out: Whether somebody left the batch out because it holds NaN or infinity.
        given_back: What normalisation layers do about a lost scale; None where they do nothing.
        plan: What the next passes go by, for the classes of the images; None if nobody looks.
        starts: What each value is at first.
        growing: Names of the values that have as many rows as samples were kept.

    Example:
        >>> stream = Stream(memory=100.0)
        >>> stream.declare("mean", 0.0)
        >>> stream.start_batch(2)
        >>> stream.counts("mean"), stream.counts("mean")
        (True, False)
        >>> stream.write("mean", 5.0)
        >>> stream.end_batch(broken=True)
        >>> stream.now("mean")
        0.0
    """

    def __init__(self, memory: float = math.inf) -> None:
        self.memory = memory
        self.left_out = False
        self.given_back: ScaleGivenBack | None = None
        self.plan: ClassPlan | None = None
        self.starts: dict[str, Any] = {"samples": 0, "batches": 0, "images": 0, "skipped": 0}
        self.growing: set[str] = set()
        self._lasting = {"images", "skipped"}
        self._past = dict(self.starts)
        self._present: dict[str, Any] = {}  # what the batch changes
        self._parts: dict[str, Part] = {}
        self._undo: dict[str, Any] = {}
        # Values that have seen this batch; None where every pass counts, as nobody called
        # `start_batch` yet.
        self._counted: set[str] | None = None
        self._within_batch = False
        self._certainty: str | None = None
        self._unusual: str | None = None
        self._each_has: set[str] = set()  # values of which each condition has its own
        self._condition = 0
        self._groups: list[tuple[int, Tensor]] = []  # conditions of this batch, with their samples

    @property
    def samples(self) -> int:
        """How many samples were seen since the start."""
        return int(self.now("samples"))

    @property
    def batches(self) -> int:
        """How many batches were seen since the start."""
        return int(self.now("batches"))

    @property
    def shift(self) -> float:
        """How surely the data have shifted, from 0 to 1; 1 where nobody can tell."""
        return 1.0 if self._certainty is None else float(self.now(self._certainty))

    @property
    def unusual(self) -> float:
        """How far the data are from what is usual, from 0 to 1; 0 where nobody can tell."""
        return 0.0 if self._unusual is None else float(self.now(self._unusual))

    @property
    def batch_shift(self) -> float:
        """`shift` of this batch: the surest of the conditions that its samples have."""
        found = []
        for number in [number for number, _ in self._groups] or [self._condition]:
            with self.in_condition(number):
                found.append(self.shift)
        return max(found)

    def shift_in(self, values: Mapping[str, Any]) -> float:
        """Return `shift` for the values of a stream of this kind: the surest of its conditions."""
        if self._certainty is None:
            return 1.0
        return float(values[self._certainty + surest_condition(values, self._certainty)])

    @property
    def conditions(self) -> int:
        """How many conditions the samples of the stream have, as far as is known."""
        return max(1, len(self.now(CONDITION_STATES)[0])) if self.has_conditions else 1

    @property
    def has_conditions(self) -> bool:
        """Whether anybody tells conditions apart."""
        return CONDITION_STATES in self.starts

    def conditions_in(self, values: Mapping[str, Any]) -> int:
        """Return `conditions` for the values of a stream of this kind."""
        return max(1, len(values[CONDITION_STATES][0])) if self.has_conditions else 1

    @property
    def values(self) -> dict[str, Any]:
        """All values by name, including what this batch has changed."""
        return self._past | self._present

    def declare(
        self,
        name: str,
        start: Any,
        *,
        by_condition: bool = False,
        lasting: bool = False,
        grows: bool = False,
    ) -> None:
        """Declare a value and what it is at first.

        Args:
            name: Of the value.
            start: Numbers, tensors, None, and tuples of them.
            by_condition: Whether each condition of the samples has a value of its own.
            lasting: Whether it is about the stream and not about adaptation: `forget` keeps it.
            grows: Whether its tensors have as many rows as samples were kept.
        """
        self.starts[name] = self._past[name] = start
        if by_condition:
            self._each_has.add(name)
        if lasting:
            self._lasting.add(name)
        if grows:
            self.growing.add(name)

    def declare_certainty(self, name: str) -> None:
        """Declare a number that says how surely the data have shifted; `shift` is the first one."""
        self.declare(name, 0.0, by_condition=True)
        self._certainty = self._certainty or name

    def declare_unusual(self, name: str) -> None:
        """Declare a number that says how unusual the data are; `unusual` is the first one."""
        self.declare(name, 0.0, by_condition=True)
        self._unusual = self._unusual or name

    def keep(self, name: str, part: Part) -> None:
        """Make a part belong to the stream."""
        self._parts[name] = part

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts."""
        return tuple(self._parts)

    def past(self, name: str) -> Any:
        """Return a value as it was before this batch."""
        place = self._place(name)
        return self._past[place] if place in self._past else self.starts[name]

    def now(self, name: str) -> Any:
        """Return a value, including what this batch has changed."""
        place = self._place(name)
        return self._present[place] if place in self._present else self.past(name)

    def write(self, name: str, value: Any) -> None:
        """Replace a value; if this batch turns out broken, the old value comes back."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is kept must be usable outside as well
                value = map_tensors(value, torch.clone)
        (self._past if self._counted is None else self._present)[self._place(name)] = value

    def counts(self, name: str) -> bool:
        """Return whether this pass counts for a value: the first one of each batch does."""
        if torch.compiler.is_exporting():  # an exported program is frozen
            return False
        if self._counted is None:
            return True
        place = self._place(name)
        if not self._within_batch or place in self._counted:
            return False
        self._counted.add(place)
        return True

    def _place(self, name: str) -> str:
        """Return the name under which a value is kept, for the condition that is worked on."""
        if self._condition and name in self._each_has:
            return f"{name}{OF_CONDITION}{self._condition}"
        return name

    def route(self, conditions: Tensor) -> None:
        """Say which condition each sample of this batch has, by its number, shape (samples,)."""
        self._groups = [
            (number, (conditions == number).nonzero()[:, 0])
            for number in sorted(set(conditions.tolist()))
        ]

    def by_condition(self, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Run a piece of work on the samples of each condition, and put the results together.

        Args:
            run: Takes some samples of each tensor, and returns a tensor with a row for each.
            *tensors: With a row for each sample. Where they have other rows than the samples that
                conditions are known of, the work is done at once, as of the first condition.
        """
        groups = self._groups
        if not groups or sum(len(rows) for _, rows in groups) != len(tensors[0]):
            return run(*tensors)
        if len(groups) == 1:
            with self.in_condition(groups[0][0]):
                return run(*tensors)
        order = torch.cat([rows for _, rows in groups]).to(tensors[0].device)
        found = []
        for number, rows in groups:
            some = rows.to(order.device)
            with self.in_condition(number):
                found.append(run(*(each[some] for each in tensors)))
        return torch.cat(found)[order.argsort()]

    def rows(self, size: int) -> Tensor | None:
        """Return which rows of the batch the condition has that is worked on; None for all.

        Args:
            size: How many samples are worked on.
        """
        for number, rows in self._groups:
            if number == self._condition and len(rows) == size:
                return rows
        return None

    @property
    def groups(self) -> list[tuple[int, Tensor | None]]:
        """The conditions that this batch has, with the rows of each; None for all of them."""
        return list(self._groups) or [(self._condition, None)]

    @contextmanager
    def in_condition(self, number: int) -> Iterator[None]:
        """Read and write the values of one condition."""
        before, self._condition = self._condition, number
        try:
            yield
        finally:
            self._condition = before

    @property
    def condition(self) -> int:
        """The number of the condition that is worked on."""
        return self._condition

    def aged(self, samples: float, newer: float) -> float:
        """Return for how many samples the old ones count after `newer` others have come."""
        return samples * math.exp(-newer / self.memory)

    def start_batch(self, samples: int = 0) -> None:
        """Announce a batch, which may take several passes."""
        self._begin()
        self.plan = None
        self._present = {
            "samples": self._past["samples"] + samples,
            "batches": self._past["batches"] + 1,
            "images": self._past["images"] + samples,
        }
        self._undo = {name: p.contents() for name, p in self._parts.items() if p.undone}

    def restart_batch(self) -> None:
        """Forget what the passes of this batch changed: the next one counts as the first did."""
        self._begin()
        self._present = {name: self._present[name] for name in COUNTED}

    def _begin(self) -> None:
        self._counted, self._within_batch = set(), True
        self._groups = []
        self.left_out = False

    def end_batch(self, *, broken: bool = False, skipped: bool = False) -> None:
        """End the batch; no pass counts until the next one.

        Args:
            broken: Whether to undo all that the batch changed.
            skipped: Whether to count it as skipped.
        """
        self._counted, self._within_batch = set(), False
        self._groups, self.plan = [], None
        if broken:
            self._put_parts(self._undo)
        else:
            self._past.update(_finite(self._present))
        self._past["skipped"] += skipped
        self._present, self._undo = {}, {}

    @property
    def lasting(self) -> dict[str, Any]:
        """The values that `forget` keeps, by name."""
        return {name: value for name, value in self.values.items() if name in self._lasting}

    def forget(self) -> None:
        """Forget all adaptation, and keep what is about the stream itself."""
        lasting = self.lasting
        self.reset()
        self._past |= lasting

    def reset(self) -> None:
        """Begin a new stream."""
        self._past = dict(self.starts)
        self._present = {}
        self._put_parts({name: part.start() for name, part in self._parts.items()})

    def contents(self) -> dict[str, dict[str, Any]]:
        """Return the whole state of the stream by reference, for `put`."""
        parts = {name: part.contents() for name, part in self._parts.items()}
        return {"values": self.values, "parts": parts}

    def put(self, contents: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with another stream, given its contents."""
        self._past = {**self.starts, **contents["values"]}
        self._present = {}
        self._put_parts(contents["parts"])

    def _put_parts(self, contents: Mapping[str, Any]) -> None:
        for name, content in contents.items():
            self._parts[name].put(content)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert all tensors, when the model they belong to is moved or cast."""
        self.starts = map_tensors(self.starts, fn)
        self.put(map_tensors(self.contents(), fn))


def base_name(name: str) -> str:
    """Return the name of a value without that of its condition.

    Example:
        >>> base_name("gain/samples of condition 2")
        'gain/samples'
    """
    return name.partition(OF_CONDITION)[0]


def surest_condition(values: Mapping[str, Any], name: str) -> str:
    """Return what to append to names for the condition in which a number is largest.

    Example:
        >>> surest_condition({"shift": 0.1, "shift of condition 1": 0.9}, "shift")
        ' of condition 1'
    """
    found = [each for each in values if base_name(each) == name]
    return max(found, key=lambda each: float(values[each])).removeprefix(name)


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return the same tuples, lists and dicts with `fn` applied to every tensor in them.

    Example:
        >>> map_tensors({"a": (torch.ones(1), 2)}, torch.neg)
        {'a': (tensor([-1.]), 2)}
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {
            name: value if name == STAYS else map_tensors(value, fn) for name, value in tree.items()
        }
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, fn) for value in tree)
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists and dicts.

    Example:
        >>> list(tensors_in({"a": (torch.ones(1), 2)}))
        [tensor([1.])]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (tuple, list, dict)):
                yield from tensors_in(value)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that hold neither NaN nor infinity.

    Almost always that is all of them, so a few sums are looked at first, and single values only
    where a sum is not finite.
    """
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
