"""Everything that is known of one stream of images, as one value.

A state is never written into. A batch makes a new one, which takes the place of the old one only if
the batch was good: so a broken batch leaves no mark, and whoever looks sees a whole state. Library
and service keep the same states, and one file format holds them (`ttapca.spectral.state_files`).

What depends on the condition of images (`ttapca.spectral.conditions`) is in tables with a row for
each condition. A stream that has shown nothing has one row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ttapca.spectral.chain import ChainState
from ttapca.spectral.conditions import KnownConditions

TINY = 1e-12  # in place of zero, which divides nothing


class Table:
    """Base of dataclasses of tensors with a row for each condition, or for each group of images."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name."""
        values = vars(self)
        return {name: value for name, value in values.items() if value is not None}

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(next(iter(self.tensors().values())))

    def row(self, number: int) -> Self:
        """Return one row, as a table."""
        return type(self)(
            **{name: each[number : number + 1] for name, each in self.tensors().items()}
        )

    def with_row(self, number: int, row: Self, empty: Self) -> Self:
        """Return the table with one row replaced, after as many empty ones as it takes."""
        if len(self) == 1 and number == 0:
            return row
        missing = [empty] * (number + 1 - len(self))
        found = type(self).of_each([self, *missing]) if missing else self
        changed = {}
        for name, each in found.tensors().items():
            changed[name] = each.clone()
            changed[name][number] = getattr(row, name)[0]
        return type(self)(**changed)

    @classmethod
    def of_each(cls, several: Sequence[Self]) -> Self:
        """Return the rows of several tables as one."""
        if len(several) == 1:
            return several[0]
        names = several[0].tensors()
        return cls(**{name: torch.cat([getattr(one, name) for one in several]) for name in names})


@dataclass(frozen=True, eq=False)
class Spectrum(Table):
    """What was seen of the components of one filter; older samples count less and less.

    Attributes:
        samples: How many samples count, float64, shape (rows,).
        independent: How many of these say something new, float64, shape (rows,).
        energies: Mean square of each component over source variance, shape (rows, components).
        shift: How surely the data have shifted, from 0 to 1, float64, shape (rows,).
        unusual: How unusual they are, from 0 to 1, float64, shape (rows,).
        leeway: What resizing may have done to log energies, float64, shape (rows, 2, bands).
        mean: Mean of each component, of the shape of `energies`; None if nobody asks for it.
        rest_energy: Mean squared length of what lies outside the basis, over that of the source,
            float64, shape (rows,); None if it is not watched.
        rest_mean: Mean of what lies outside the basis, shape (rows, d), or None.
    """

    samples: Tensor
    independent: Tensor
    energies: Tensor
    shift: Tensor
    unusual: Tensor
    leeway: Tensor
    mean: Tensor | None = None
    rest_energy: Tensor | None = None
    rest_mean: Tensor | None = None

    def joined(self, newer: Spectrum, memory: float) -> Spectrum:
        """Return what was seen in all, where all samples of `newer` came after these.

        Args:
            newer: What samples have shown that came since; in a row without samples, anything
                finite. `shift` and `unusual` are taken from it.
            memory: After so many samples, what was seen counts 1 / e.
        """
        fading = torch.exp(-newer.samples / memory)
        samples = self.samples * fading + newer.samples
        new = newer.samples / samples.clamp(min=TINY)
        found = {
            "samples": samples,
            "independent": self.independent * fading + newer.independent,
            "shift": newer.shift,
            "unusual": newer.unusual,
        }
        for name in ("energies", "leeway", "mean", "rest_energy", "rest_mean"):
            before, now = getattr(self, name), getattr(newer, name)
            if now is not None:
                weight = new.to(now).reshape(-1, *[1] * (now.dim() - 1))
                found[name] = before.to(now).lerp(now, weight)
        return Spectrum(**found)


@dataclass(frozen=True, eq=False)
class LayerMoments(Table):
    """What was seen of the channels of normalisation layers, without what classes explain.

    Attributes:
        moments: First and second moment of every channel of all layers, side by side, around the
            mean of the source, shape (rows, 2, channels).
        independent: How many independent samples they count for, float64, shape (rows, layers).
        samples: How many samples were seen, float64, shape (rows, layers).
    """

    moments: Tensor
    independent: Tensor
    samples: Tensor


@dataclass(frozen=True, eq=False)
class AlarmState:
    """What an alarm knows of a stream; see `ttapca.adaptation.shift_alarm`.

    Attributes:
        shifted: Whether a shift has begun and not ended.
        run: For how many blocks in a row the images have spoken against that.
        images: Images in the block that is judged next.
        runs: How many runs of one class begin in it.
        few: How many of its images are of few classes in no order.
        alike: The same, each times how alike they are.
        energies: Sums of the band energies of its images, for each filter, shape (bands,).
        counts: How often each class was predicted of late, shape (classes,); None before that, or
            if the order of images is looked at.
        skew: How surely classes were not those of the source when nothing had shifted.
    """

    shifted: bool = False
    run: int = 0
    images: int = 0
    runs: float = 0.0
    few: float = 0.0
    alike: float = 0.0
    energies: tuple[Tensor, ...] = ()
    counts: Tensor | None = None
    skew: float = 1.0


@dataclass(frozen=True, eq=False)
class StreamState:
    """Everything that is known of one stream.

    Attributes:
        spectra: Of each filter.
        layers: Of normalisation layers; None if their statistics do not follow the stream.
        chain: Classes and their order; None if nobody looks at them.
        conditions: What images look like; None if nobody tells conditions apart.
        latest: The condition of the last image.
        outliers: Share of values that strayed, and how many images it is of, float64, shape (2,).
        alarm: What the alarm knows.
        implausible: How many samples no shift explains. They have left no other mark.
    """

    spectra: tuple[Spectrum, ...]
    layers: LayerMoments | None = None
    chain: ChainState | None = None
    conditions: KnownConditions | None = None
    latest: int = 0
    outliers: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    alarm: AlarmState = field(default_factory=AlarmState)
    implausible: int = 0

    @property
    def shift(self) -> float:
        """How surely the stream has shifted, from 0 to 1: the surest condition that is present."""
        return float(self.spectra[0].shift[self.surest])

    @property
    def surest(self) -> int:
        """The condition that has shifted most surely, of those that the last images have."""
        shift = self.spectra[0].shift
        if self.conditions is None:
            return int(shift.argmax())
        present = [state for state in self.conditions.present().tolist() if state < len(shift)]
        return max(present, key=lambda state: float(shift[state]), default=self.latest)

    @property
    def known_conditions(self) -> int:
        """How many conditions its images have, as far as is known."""
        return 1 if self.conditions is None else max(1, len(self.conditions.centres))

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in memory, but for a few numbers."""
        return sum(each.nbytes for each in leaves(self).values() if hasattr(each, "nbytes"))

    def moved(self, convert: Callable[[Tensor], Tensor]) -> StreamState:
        """Return the state with what follows the model converted, as the model was."""

        def table(found: Any) -> Any:
            if found is None:
                return None
            followed = ("energies", "mean", "rest_mean", "moments")
            return dataclasses.replace(
                found,
                **{
                    name: convert(each) if name in followed else each
                    for name, each in found.tensors().items()
                },
            )

        return dataclasses.replace(
            self, spectra=tuple(map(table, self.spectra)), layers=table(self.layers)
        )

    def forgotten(self, start: StreamState) -> StreamState:
        """Return a new state that keeps what is about the stream and not about adaptation."""
        return dataclasses.replace(start, alarm=self.alarm, implausible=self.implausible)


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return tensors, arrays and numbers of a state by their dotted names.

    Example:
        >>> leaves(AlarmState(run=2, energies=(torch.ones(1),)), "alarm")["alarm.energies.0"]
        tensor([1.])
    """
    return dict(_leaves(value, name))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if dataclasses.is_dataclass(value):
        items: Any = vars(value).items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        yield name, value
        return
    for inner, each in items:
        yield from _leaves(each, f"{name}.{inner}" if name else str(inner))


def is_finite(state: StreamState) -> bool:
    """Return whether what passes have added up holds neither NaN nor infinity, by a few sums."""
    sums = [float(each.energies.sum()) for each in state.spectra]
    if state.layers is not None:
        sums.append(float(state.layers.moments.sum()))
    if state.chain is not None:
        sums.append(float(state.chain.joint.sum()))
    return all(map(math.isfinite, sums))
