"""`ClassPlan`: the classes of the images of a pass, for the statistics of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.chain import ChainReading
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.source_classes import SourceClasses, corrections

Numbers = NDArray[np.float64]

# The positions of each stream's images in a batch, in order of arrival; or, traced for an exporter,
# the number of images of each stream, one stream after the other.
Places = Sequence[Tensor] | int


class LayerClasses:
    """The statistics of classes in the source, for the layers of one network.

    Args:
        classes: The statistics.
        layers: Number of channels of each layer, by path, in the order of the network.
        constants: See `ttapca.spectral.constants`.

    Attributes:
        shares: Shares of classes in the source, shape (classes,).
        likeness: Intraclass correlation of each layer, and last that of the spectrum, shape (layers
            + 1,); NaN if it is unknown.
    """

    def __init__(
        self, classes: SourceClasses, layers: dict[str, int], constants: Constants = CONSTANTS
    ) -> None:
        self.classes = classes
        self.shares: Numbers = classes.shares.double().cpu().numpy()
        alike = [classes.likeness.get(path, np.nan) for path in layers]
        self.likeness: Numbers = np.array([*alike, constants.likeness])
        rank = classes.loadings.shape[1]
        parts = []
        for path, channels in layers.items():
            known = classes.layers.get(path)
            if known is None:  # as if classes did not differ
                known = torch.zeros(1 + rank, 2, channels)
                known[0, 1] = 1.0
            parts.append(known)
        self._table = torch.cat(parts, 2) if parts else torch.zeros(1 + rank, 2, 0)

    def corrections(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets of the means and factors of the variances of all layers' channels.

        Shares of classes have the shape (groups, classes); channels are side by side.
        """
        self._table = self._table.to(shares.device)
        place = (shares - self.classes.shares.to(shares)) @ self.classes.loadings.to(shares)
        return corrections(self._table, place)


@dataclass(frozen=True, eq=False)
class ClassPlan:
    """Which classes to take out of the statistics of a batch, and for how much images count."""

    shares: Tensor  # probability of each class for each image, shape (images, classes)
    # Number of independent images that each counts for, by layer and last for the spectrum,
    # float64, shape (images, layers + 1).
    counts: Tensor
    runs: Numbers  # expected number of runs of one class that begin in each stream, (streams,)
    few: Numbers  # expected number of images of each that are drawn from few classes in no order
    alike: Numbers  # the same, each image times the likeness of these, from 0 to 1

    @classmethod
    def of_reading(
        cls,
        known: LayerClasses,
        reading: ChainReading,
        before: Numbers,
        memory: float,
        places: Places,
        size: int,
    ) -> ClassPlan:
        """Make the plan of a batch of `size` images; those that were not read have no class.

        Args:
            known: Statistics of classes in the source.
            reading: The chain's reading of the images of its streams.
            before: Recent images of each stream before the batch, shape (streams,).
            memory: Number of images after which older ones count 1 / e.
            places: See `Places`.
            size: Number of images.
        """
        if isinstance(places, int):
            sizes, there = np.array([float(places)]), None
        else:
            sizes = np.array([float(len(own)) for own in places])
            there = np.arange(reading.known.shape[1]) < sizes[:, None]
        # Share of earlier images that is forgotten with each image.
        renewed: Any = -np.expm1(-sizes / memory) / np.maximum(sizes, 1)
        alike: Any = np.nan_to_num(known.likeness)
        missing: Any = np.isnan(known.likeness)
        source: Any = known.shares
        if isinstance(places, int):  # arrays are those of torch
            alike, missing, renewed, source = (
                torch.from_numpy(each).float() for each in (alike, missing, renewed, source)
            )
        found = reading.counts(alike, before, renewed) * (1 - missing) + missing
        rest = (1 - reading.known.sum(2)).clip(0, 1)
        held = reading.held
        if there is not None:
            rest, held = rest * there, held * there
        shares = reading.known + rest[..., None] * source
        return cls(
            in_batch(shares, places, size).to(known.classes.shares),
            in_batch(found, places, size),
            rest.sum(1),
            held.sum(1),
            held.sum(1) * reading.crowd,
        )

    @classmethod
    def of_shares(cls, known: LayerClasses, shares: Tensor, places: Sequence[Tensor]) -> ClassPlan:
        """Make the plan of images in no order, given the shares of classes of each."""
        counts = torch.ones(len(shares), len(known.likeness), dtype=torch.float64)
        none = np.zeros(len(places))
        sizes = np.array([float(len(own)) for own in places])
        return cls(shares.to(known.classes.shares), counts, sizes, none, none)

    def some(self, images: Tensor, streams: Sequence[int]) -> ClassPlan:
        """Return the plan of some of the images and streams."""
        own = list(streams)
        shares, counts = self.shares[images], self.counts[images]
        return ClassPlan(shares, counts, self.runs[own], self.few[own], self.alike[own])


def by_stream(values: Tensor, places: Places) -> Any:
    """Return the rows of each stream, padded: (images, n) to (streams, most images, n)."""
    if isinstance(places, int):
        return values.reshape(-1, places, values.shape[1])
    if len(places) == 1 and len(places[0]) == len(values):
        return values.numpy()[None]
    found = np.zeros((len(places), max(1, *map(len, places)), values.shape[1]))
    rows = values.numpy()
    for number, own in enumerate(places):
        found[number, : len(own)] = rows[own.numpy()]
    return found


def in_batch(values: Any, places: Places, size: int) -> Tensor:
    """Return rows of streams in the order of the batch; the reverse of `by_stream`.

    Images of no stream have zeros.
    """
    if isinstance(places, int):
        found: Tensor = values.flatten(0, 1)
        return found
    if len(places) == 1 and len(places[0]) == size:
        return torch.from_numpy(np.ascontiguousarray(values[0]))
    rows = torch.zeros(size, *values.shape[2:], dtype=torch.float64)
    for number, own in enumerate(places):
        rows[own] = torch.from_numpy(values[number, : len(own)])
    return rows
