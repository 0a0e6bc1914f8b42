"""The state of one stream of images, as one value.

A state is never written into: a batch makes a new one. Library and service keep the same states,
and one file format holds them (`ttapca.spectral.state_files`). Numbers that depend on the condition
of images are in tables with a row for each condition. A new stream has one row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
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
        """Return the tensors by name."""
        values = vars(self)
        return {name: value for name, value in values.items() if value is not None}

    def __len__(self) -> int:
        """Return the number of rows."""
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
    """Moments of the components of one filter; older samples count less and less."""

    samples: Tensor  # number of samples that count, float64, shape (rows,)
    independent: Tensor  # number of independent ones, float64, shape (rows,)
    energies: Tensor  # mean squares over source variances, shape (rows, components)
    shift: Tensor  # how surely the data have shifted, from 0 to 1, float64, shape (rows,)
    unusual: Tensor  # how unusual they are, from 0 to 1, float64, shape (rows,)
    leeway: Tensor  # by which resizing may change log energies, float64, shape (rows, 2, bands)
    mean: Tensor | None = None  # of each component; None if it is not wanted
    # Mean squared length outside the basis over that of the source, float64, shape (rows,); None if
    # it is not watched.
    rest_energy: Tensor | None = None
    rest_mean: Tensor | None = None  # mean of the part outside the basis, shape (rows, d)

    def joined(self, newer: Spectrum, memory: float) -> Spectrum:
        """Return the spectrum of these samples and of `newer` ones, after them."""
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
    """Moments of the channels of normalisation layers, without the part that classes explain."""

    # First and second moment of every channel of all layers, side by side, around the mean of the
    # source, shape (rows, 2, channels).
    moments: Tensor
    independent: Tensor  # number of independent samples, float64, shape (rows, layers)
    samples: Tensor  # number of samples, float64, shape (rows, layers)


@dataclass(frozen=True, eq=False)
class AlarmState:
    """The state of an alarm for one stream; see `ttapca.adaptation.shift_alarm`."""

    shifted: bool = False  # whether a shift has begun and not ended
    run: int = 0  # number of blocks in a row whose images have spoken against that
    images: int = 0  # in the block that is judged next
    runs: float = 0.0  # number of runs of one class that begin in it
    few: float = 0.0  # number of its images that are of few classes in no order
    alike: float = 0.0  # the same, each times how alike they are
    energies: tuple[Tensor, ...] = ()  # sums of band energies of its images, for each filter
    # Recent predictions of each class, shape (classes,); None if the order of images is known.
    counts: Tensor | None = None
    skew: float = 1.0  # how surely classes were not those of the source before any shift


@dataclass(frozen=True, eq=False)
class AutoState:
    """Which network answers a stream in the mode `auto`; see `ttapca.adaptation.auto_mode`."""

    adapting: bool  # whether the adapted network answers
    harmful: bool  # whether adapting shows a sign of harm
    switches: int  # between the two networks
    images: int  # since the last switch, or the first image
    # Number of recent images, sums of their expected gain and of its variance, float64, shape (3,).
    gain: Tensor
    # Over longer: for the adapted and for the untouched network, the entropy of its predictions and
    # the number of each class, float64, shape (2 + 2 classes,).
    sums: Tensor


@dataclass(frozen=True, eq=False)
class StreamState:
    """Everything that is known of one stream; a part is None if the method does not use it."""

    spectra: tuple[Spectrum, ...]  # for each filter
    layers: LayerMoments | None = None
    chain: ChainState | None = None
    conditions: KnownConditions | None = None
    latest: int = 0  # condition of the last image
    # Share of values that strayed, and the number of images behind it, float64, shape (2,).
    outliers: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    alarm: AlarmState = field(default_factory=AlarmState)
    implausible: int = 0  # number of samples that no shift explains; they have left no other mark
    # See `ttapca.adaptation.expected_error`, float64, shape (2, 3).
    errors: Tensor = field(default_factory=lambda: torch.zeros(2, 3, dtype=torch.float64))
    auto: AutoState | None = None  # of a service; None in its other modes

    @property
    def shift(self) -> float:
        """How surely the stream has shifted, from 0 to 1: the surest condition that is present."""
        return float(self.spectra[0].shift[self.surest])

    @property
    def surest(self) -> int:
        """The condition that has shifted most surely, among the conditions of the last images."""
        shift = self.spectra[0].shift
        if self.conditions is None:
            return int(shift.argmax())
        present = [state for state in self.conditions.present().tolist() if state < len(shift)]
        return max(present, key=lambda state: float(shift[state]), default=self.latest)

    @property
    def known_conditions(self) -> int:
        """Number of conditions that its images are known to have."""
        return 1 if self.conditions is None else max(1, len(self.conditions.centres))

    @property
    def nbytes(self) -> int:
        """Number of bytes of its tensors and arrays."""
        return sum(each.nbytes for each in leaves(self).values() if hasattr(each, "nbytes"))

    def moved(self, convert: Callable[[Tensor], Tensor]) -> StreamState:
        """Return the state with the tensors on the model's device converted, as the model was."""

        def table(found: Any) -> Any:
            followed = {"energies", "mean", "rest_mean", "moments"} & found.tensors().keys()
            changed = {name: convert(getattr(found, name)) for name in followed}
            return dataclasses.replace(found, **changed)

        layers = None if self.layers is None else table(self.layers)
        return dataclasses.replace(self, spectra=tuple(map(table, self.spectra)), layers=layers)

    def forgotten(self, start: StreamState) -> StreamState:
        """Return the state of a new stream that keeps what is told of all of its samples."""
        return dataclasses.replace(
            start, alarm=self.alarm, implausible=self.implausible, errors=self.errors
        )


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return tensors, arrays and numbers of a state by their dotted names."""
    if value is None:
        return {}
    if dataclasses.is_dataclass(value):
        items: Any = vars(value).items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for inner, each in items:
        found |= leaves(each, f"{name}.{inner}" if name else str(inner))
    return found


def is_finite(state: StreamState) -> bool:
    """Return whether the sums over passes hold neither NaN nor infinity."""
    sums = [float(each.energies.sum()) for each in state.spectra]
    if state.layers is not None:
        sums.append(float(state.layers.moments.sum()))
    if state.chain is not None:
        sums.append(float(state.chain.joint.sum()))
    return all(map(math.isfinite, sums))
