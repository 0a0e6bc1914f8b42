"""`ClassPlan`: what a pass goes by, for the classes of its images."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ttapca.spectral.chain import ChainReading
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.source_classes import SourceClasses

SPECTRUM = ""  # in place of the path of a layer

Moments = tuple[Tensor, Tensor]  # mean and variance


@dataclass(frozen=True, eq=False)
class ClassPlan:
    """Which classes to take out of the statistics of a batch, and for how much they count.

    Attributes:
        classes: What is known of classes in the source.
        shares: Which class each image has, shape (images, classes).
        counts: For how many independent images each counts, by layer and last for the spectrum,
            float64, shape (images, layers + 1).
        runs: How many runs of one class begin, as expected.
        few: How many images are drawn from few classes in no order, as expected.
        alike: The same, each image times how alike these are, from 0 to 1.
    """

    classes: SourceClasses
    shares: Tensor
    counts: Tensor
    runs: float
    few: float = 0.0
    alike: float = 0.0
    # By condition: how many images, and for how many they count in each layer; and corrections.
    _counted: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict, repr=False)
    _corrections: dict[int, dict[str, Moments]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_reading(
        cls, classes: SourceClasses, reading: ChainReading, before: float, renewed: float
    ) -> ClassPlan:
        """Make the plan of one stream.

        Args:
            classes: See the class.
            reading: Of its images.
            before: How many images of late the stream had before.
            renewed: Share of what was seen before that is forgotten with each image.
        """
        alike = np.array([*classes.likeness.values(), CONSTANTS.likeness])
        counts = torch.from_numpy(reading.counts(alike, np.array([before]), renewed)[0])
        known = torch.from_numpy(reading.known[0]).to(classes.shares)
        rest = (1 - known.sum(1, keepdim=True)).clamp(min=0)
        runs, few = float(rest.sum()), float(reading.held.sum())
        return cls(
            classes, known + rest * classes.shares, counts, runs, few, few * float(reading.crowd[0])
        )

    @classmethod
    def of_shares(cls, classes: SourceClasses, shares: Tensor) -> ClassPlan:
        """Make the plan of images in no order that have these shares of classes each."""
        counts = torch.ones(len(shares), len(classes.likeness) + 1, dtype=torch.float64)
        return cls(classes, shares.to(classes.shares), counts, float(len(shares)))

    def images(self, path: str, rows: Tensor | None, condition: int, size: int) -> float:
        """Return how many independent images some rows of the batch are worth.

        Args:
            path: Of a layer, or `SPECTRUM`.
            rows: Their numbers; None for all.
            condition: That they have; rows of one condition are the same in every layer.
            size: How many rows there are. If they are not images, each counts as one.
        """
        if condition not in self._counted:
            counts = self.counts if rows is None else self.counts[rows]
            names = (*self.classes.likeness, SPECTRUM)
            sums = dict(zip(names, counts.sum(0).tolist(), strict=True))
            self._counted[condition] = len(counts), sums
        images, counted = self._counted[condition]
        return counted.get(path, float(size)) if images == size else float(size)

    def corrected(
        self, path: str, moments: Moments, rows: Tensor | None, condition: int
    ) -> Moments:
        """Take what the classes explain out of the mean and variance of a layer.

        Args:
            path: Of the layer.
            moments: Of some rows of the batch.
            rows: See `images`.
            condition: See `images`.
        """
        if path not in self.classes.layers:
            return moments
        if condition not in self._corrections:
            shares = self.shares if rows is None else self.shares[rows]
            self._corrections[condition] = self.classes.corrections(shares.mean(0))
        shift, scale = self._corrections[condition][path]
        mean, var = moments
        return mean - shift.to(mean), var * scale.to(var)

    def differs(self, other: ClassPlan, rows: Tensor | None) -> float:
        """Return the share of some rows whose class is another one in the other plan, 0 to 1."""
        here, there = (
            (each.shares if rows is None else each.shares[rows]).mean(0) for each in (self, other)
        )
        return float((here - there).abs().sum()) / 2
