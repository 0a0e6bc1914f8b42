"""`PartReader`: collects from parts of the data what a fit needs, in whichever process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ttapca.engines.artifacts import Artifact
from ttapca.errors import DataFormatError
from ttapca.fitting.activations import Prepare, SourceActivations
from ttapca.fitting.channel_statistics import FindLogits
from ttapca.fitting.source_statistics import Reading, SourceStatistics
from ttapca.spectral.position_sample import Positions
from ttapca.support.modules import evaluation_mode

# The layer of a network has one hook at a time; a worker of dask may have many threads.
_one_at_a_time = Lock()


class DataPart(Protocol):
    """A part of the data: knows how many samples it has, and yields batches of them.

    `str(part)` names it in error messages. If it has a method `check`, that raises in a process
    which does not see its data.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, as a loader does."""


@runtime_checkable
class PartedData(Protocol):
    """Data in parts that can be read independently; as a loader, all of them in order.

    The parts are pickled where an engine reads them in other processes.
    """

    @property
    def parts(self) -> Sequence[DataPart]:
        """The parts, in order."""

    @property
    def batch_size(self) -> int:
        """How many samples batches have, except for the last one of a part."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of all parts."""


@dataclass(frozen=True, eq=False)
class PlacedPart:
    """A part of the data, and the position of its first sample among all."""

    data: DataPart
    first: int


def placed(parts: Sequence[DataPart], first: int = 0) -> list[PlacedPart]:
    """Place parts one after the other, the first one's samples at these positions."""
    firsts = itertools.accumulate(map(len, parts), initial=first)
    return [PlacedPart(part, first) for part, first in zip(parts, firsts, strict=False)]


@dataclass(frozen=True, eq=False)
class PartReader:
    """Reads parts and returns what it collected; it can be pickled if its functions can.

    Attributes:
        model: The model.
        layer: Dotted path of the layer.
        prepare: Returns what the model takes of a batch; None for the usual.
        logits: Finds the logits in what the model returns.
        reading: How the data are read.
    """

    model: nn.Module
    layer: str
    prepare: Prepare | None
    logits: FindLogits | None
    reading: Reading

    @classmethod
    def of(cls, source: SourceActivations, reading: Reading) -> PartReader:
        """Return what reads parts as the source reads its own data."""
        return cls(source.model, source.path, source.prepare, source.find_logits, reading)

    def __call__(self, parts: Iterable[PlacedPart]) -> SourceStatistics:
        """Read some parts, one after the other.

        Raises:
            DataFormatError: A part has more or fewer samples than it said.
            TtapcaError: As `ttapca.fit` does.
        """
        into: SourceStatistics | None = None
        with torch.inference_mode(False), torch.no_grad(), evaluation_mode(self.model):
            for part in parts:
                source = SourceActivations(
                    self.model, self.layer, part.data, None, self.prepare, self.logits
                )
                into = into or SourceStatistics.empty(self.reading, source.device)
                found = source.collect(into, Positions(part.first), str(part.data))
                if found != len(part.data):
                    raise DataFormatError(
                        "A part of the data has as many samples as it says, and the layer gives "
                        f"one row for each: {part.data} said {len(part.data):,}, and {found:,} "
                        "rows came. Leave its file alone while it is read."
                    )
        return into or SourceStatistics.empty(self.reading)


@dataclass(frozen=True)
class SentReader:
    """A reader for the workers of an engine, which open it once each."""

    reader: Artifact[PartReader]

    def __call__(self, parts: Sequence[PlacedPart]) -> SourceStatistics:
        """Read some parts; see `PartReader`."""
        with _one_at_a_time:
            return self.reader.open()(parts)


def see_parts(parts: Iterable[PlacedPart]) -> None:
    """Raise unless this process sees these parts, as far as they can tell."""
    for part in parts:
        check = getattr(part.data, "check", None)
        if check is not None:
            check()
