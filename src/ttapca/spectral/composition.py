"""Which classes a stream holds, and what they alone do to the statistics of a network.

Statistics of late layers depend on the classes in a batch, so a batch of one class looks shifted
although nothing happened to its images. With m_k and e_k the mean and the mean square of a channel
in source images of class k, and pi the shares of the classes in a batch, the classes alone make

    m(pi) = sum_k pi_k m_k        v(pi) = sum_k pi_k e_k - m(pi)^2

of its mean and variance. `ClassMoments` takes that part out: with u the shares in the source data,

    mean - (m(pi) - m(u))         var v(u) / v(pi)

`Composition` estimates pi from the network's own predictions by expectation maximisation (Saerens
et al., 2002), and says how surely it differs from u. Nothing here needs a label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttapca.spectral.stream import Stream

# Directions in which class moments may differ: 4.5 MB for a ResNet-50 with 1,000 classes.
LARGEST_RANK = 20
NO_DIRECTION = 1e-10  # a smaller share of the largest one, squared, is rounding

# Chosen on held-out conditions; docs/closed-form-evidence.md has the measurements.
STEPS = 10  # of expectation maximisation
CLASS_MEMORY = 20.0  # after so many samples, a prediction counts 1 / e
SOURCE_SAMPLES = 1.0  # the source shares count for so many samples in statistics
SOURCE_PER_CLASS = 2.0  # and for so many of each class as a prior on predictions
SURE = 6.0  # standard deviations of chi squared that chance is granted
GLANCE_WEIGHT = 0.5  # of the weight that statistics of the batch will have, at a glance
FAR = 0.25  # share of samples of other classes than the source's, from which an order counts
ORDER_MEMORY = 500.0  # samples over which a stream is judged to be ordered by class
JUDGED = 64  # samples that show whether a new stream is ordered by class
PROBATION = 256  # samples over which such a judgement may turn out to be wrong

SMALLEST_RATIO = 0.05  # of variances: a low rank may overshoot
ROWS = 4096  # predictions looked at; dense outputs have one for every pixel


@dataclass(frozen=True, eq=False)
class ClassMoments:
    """Channel means and mean squares of normalisation layers, by class, in a low-rank form.

    Attributes:
        shares: Share of each class in the source data, as predicted, shape (classes,).
        loadings: Coordinates of each class, shape (classes, rank).
        layers: By path of a layer: the moments at the source shares, then one direction for each
            coordinate, shape (1 + rank, 2, channels).

    Example:
        >>> sums = {"bn": torch.tensor([[[0.0], [1.0]], [[4.0], [20.0]]])}  # 2 classes, 1 channel
        >>> moments = ClassMoments.from_sums(torch.ones(2), sums)
        >>> shift, scale = moments.corrections(torch.tensor([0.0, 1.0]))["bn"]
        >>> round(shift.item(), 4), round(scale.item(), 4)  # mean 4 for 2, variance 4 for 6.5
        (2.0, 1.625)
    """

    shares: Tensor
    loadings: Tensor
    layers: dict[str, Tensor]

    @classmethod
    def from_sums(cls, weights: Tensor, sums: Mapping[str, Tensor]) -> ClassMoments:
        """Make moments of sums over source images, each image weighted by its class probabilities.

        Args:
            weights: Sum of the probabilities of each class, shape (classes,).
            sums: By path of a layer, the weighted sums of channel means and of mean squares, shape
                (classes, 2, channels).
        """
        weights = weights.double().clamp(min=1e-6)
        shares = weights / weights.sum()
        means = {path: each.double() / weights[:, None, None] for path, each in sums.items()}
        base = {path: torch.einsum("k,ksc->sc", shares, each) for path, each in means.items()}
        scaled = []
        for path, each in means.items():
            # In units of the channel's deviation, so that no layer counts for its scale.
            var = (base[path][1] - base[path][0].square()).clamp(min=1e-12)
            unit = torch.stack([var.sqrt(), var])
            scaled.append(((each - base[path]) / unit).flatten(1))
        # Each class counts by its share, so that rare ones do not rule the directions.
        table = torch.cat(scaled, 1) * shares.sqrt()[:, None]
        left, values, _ = torch.linalg.svd(table @ table.T)
        rank = max(1, min(LARGEST_RANK, int((values > NO_DIRECTION * values[0]).sum())))
        loadings = left[:, :rank] / shares.sqrt()[:, None]
        layers = {}
        for path, each in means.items():
            away = each - base[path]
            directions = torch.einsum("k,kr,ksc->rsc", shares, loadings, away)
            layers[path] = torch.cat([base[path][None], directions]).float()
        return cls(shares.float(), loadings.float(), layers)

    def corrections(self, composition: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by layer, what to take from a channel's mean and what to scale its variance by.

        Args:
            composition: Share of each class, shape (classes,).
        """
        place = (composition.to(self.shares) - self.shares) @ self.loadings  # (rank,)
        found = {}
        for path, moments in self.layers.items():
            base = moments[0]
            mean, square = base + torch.einsum("r,rsc->sc", place, moments[1:])
            source_var = base[1] - base[0].square()
            ratio = (square - mean.square()) / source_var.clamp(min=1e-12)
            scale = ratio.clamp(min=SMALLEST_RATIO, max=1 / SMALLEST_RATIO).reciprocal()
            found[path] = (mean - base[0], scale)
        return found


def skew_of(counts: Tensor, shares: Tensor) -> float:
    """Return how surely classes were not drawn by these shares, from 0 to 1.

    Chi squared is compared with what chance makes of it, and `SURE` standard deviations more.

    Args:
        counts: How often each class was predicted, shape (classes,).
        shares: Share of each class in the source data, shape (classes,).

    Example:
        >>> shares = torch.full((10,), 0.1)
        >>> skew_of(6 * torch.ones(10), shares)
        0.0
        >>> round(skew_of(60 * torch.eye(10)[3], shares), 2)
        0.94
    """
    seen, source = float(counts.sum()), shares.to(counts)
    if seen <= 0:
        return 0.0
    chi = float((counts - seen * source).square().div(source).sum()) / seen
    freedom = len(source) - 1
    chance = freedom + SURE * math.sqrt(2 * freedom)
    return max(0.0, 1 - chance / max(chi, 1e-12))


@dataclass(frozen=True)
class Estimate:
    """What a batch and the stream before it say about their classes.

    Attributes:
        counts: How often each class was predicted, in the batch and, fading, before it.
        shares: The composition to correct statistics by, shape (classes,).
        prior: What to add to logits, shape (classes,).
        certainty: How surely the composition is not that of the source, from 0 to 1.
        skew: The same where it is far from that of the source, and 0 where it is near: a network
            that is a little biased under a shift has not seen an ordered stream.
        excess: How much more often each class was predicted than in the source, in units of chance.
    """

    counts: Tensor
    shares: Tensor
    prior: Tensor
    certainty: float
    skew: float
    excess: Tensor

    def like(self, other: Estimate) -> float:
        """Return the cosine between what two estimates find too often, -1 to 1."""
        return float(torch.cosine_similarity(self.excess, other.excess.to(self.excess), dim=0))

    def unlike(self, other: Estimate) -> float:
        """Return the share of samples whose class the other estimate does not have, 0 to 1."""
        return float((self.shares - other.shares.to(self.shares)).abs().sum()) / 2


class Composition:
    """Which classes a stream holds, as the network sees them.

    Args:
        moments: Of the source data.

    Attributes:
        glancing: Whether this pass looks for the classes of a stream of which nothing is known.
        past_only: Whether normalisation uses what was seen before this batch: batch statistics of
            an ordered stream would hide which classes the batch holds.
        past_as_it_was: Whether what was seen before still has the classes in it.
        afresh: Whether to go by this batch alone, as if the stream started with it.
        expected: The estimate that this pass goes by.

    Example:
        >>> sums = {"bn": torch.ones(2, 2, 1)}
        >>> composition = Composition(ClassMoments.from_sums(torch.ones(2), sums))
        >>> composition.join(Stream())
        >>> composition.start_batch(50)
        >>> found = composition.estimate(torch.tensor([[4.0, 0.0]]).expand(50, 2))
        >>> found.certainty > 0.8, [round(share, 2) for share in found.shares.tolist()]
        (True, [0.9, 0.1])
    """

    def __init__(self, moments: ClassMoments) -> None:
        self.moments = moments
        self.glancing = self.past_only = self.past_as_it_was = self.afresh = False

    def join(self, stream: Stream) -> None:
        """Keep what is seen in this stream, and let gains and statistics read it there."""
        self.stream = stream
        stream.composition = self
        stream.declare("composition/counts", torch.zeros_like(self.moments.shares))
        stream.declare("composition/young", None, grows=True)
        stream.declare("composition/order", (0.0, 0.0))
        self.start_batch(0)  # for calls of the model that belong to no batch

    def counts_in(self, values: Mapping[str, Any]) -> Tensor:
        """Return how often each class was predicted lately, for the values of a stream."""
        counts: Tensor = values["composition/counts"]
        return counts

    @property
    def known(self) -> bool:
        """Whether anything was seen before this batch."""
        return bool(self.stream.past("composition/order")[1] > 0)

    @property
    def ordered(self) -> float:
        """How surely batches of the stream so far had classes of their own, from 0 to 1."""
        total, weight = self.stream.past("composition/order")
        return float(total / weight) if weight else 0.0

    @property
    def on_probation(self) -> bool:
        """Whether the stream was judged to be ordered, and not for long."""
        return 0 < self.stream.past("composition/order")[1] < PROBATION and self.ordered > 0

    @property
    def remembered(self) -> Estimate:
        """What was seen before this batch, as if it were of today."""
        return self._estimate(self.stream.past("composition/counts"))

    @property
    def skew(self) -> float:
        """How surely this batch has classes of its own, as far as is known in this pass."""
        return 1.0 if self.glancing else self._skew

    @property
    def trust(self) -> float:
        """What to multiply the weight of test statistics by."""
        return GLANCE_WEIGHT if self.glancing else 1.0

    def start_batch(self, size: int) -> None:
        """Begin a batch: expect what was seen last."""
        self._size = size
        counts: Tensor = self.stream.past("composition/counts")
        self._past = counts * math.exp(-size / CLASS_MEMORY)
        self.glancing = self.past_only = self.past_as_it_was = self.afresh = False
        self.expect(self._estimate(self._past))
        self._skew = self.ordered

    def start_afresh(self) -> None:
        """Go by this batch alone: what was made of those before it may be wrong."""
        self.afresh, self.past_only = True, False
        self._past = torch.zeros_like(self._past)
        self.expect(self._estimate(self._past))

    def go_on(self) -> None:
        """Go by what was seen before this batch after all, which stands."""
        self.start_batch(self._size)
        self.past_only = True

    def expect(self, estimate: Estimate) -> None:
        """Go by this estimate in the next pass."""
        self.expected = estimate
        self._skew = estimate.skew
        self._corrections: dict[str, tuple[Tensor, Tensor]] | None = None

    def believe(self, estimate: Estimate) -> None:
        """Go by an estimate of all that was seen so far, of which nothing was believed before."""
        self.expect(estimate)
        samples = self.stream.samples
        self._past = estimate.counts * ((samples - self._size) / samples)
        self.past_as_it_was = True

    def corrected(self, path: str, moments: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Take what the classes explain out of a layer's mean and variance."""
        if self.expected.certainty == 0.0 or path not in self.moments.layers:
            return moments
        if self._corrections is None:
            self._corrections = self.moments.corrections(self.expected.shares)
        shift, scale = self._corrections[path]
        mean, var = moments
        return mean - shift.to(mean), var * scale.to(var)

    def estimate(self, logits: Tensor, samples: int | None = None) -> Estimate:
        """Return the composition of the batch, given its predictions and what was seen before.

        Args:
            logits: Shape (batch, classes) or (batch, classes, ...).
            samples: How many they stand for; by default those of the batch.
        """
        rows = logits.detach().movedim(1, -1).flatten(0, -2)
        precise = torch.promote_types(rows.dtype, torch.float32)
        rows = rows[:: max(1, len(rows) // ROWS)].log_softmax(1, dtype=precise)
        weight = (samples or self._size) / len(rows)
        source = self.moments.shares.to(rows)
        base = self._past.to(rows) + SOURCE_PER_CLASS * len(source) * source
        counts = base
        for _ in range(STEPS):
            prior = (counts / counts.sum() / source).log()
            counts = base + weight * (rows + prior).softmax(1).sum(0)
        return self._estimate(counts - base + self._past.to(rows))

    def most_certain(self, samples: int) -> float:
        """Return how certain so many samples can make it, at most, that they have few classes."""
        counts = torch.zeros_like(self.moments.shares)
        counts[self.moments.shares.argmin()] = samples
        return skew_of(counts, self.moments.shares)

    def _estimate(self, counts: Tensor) -> Estimate:
        source = self.moments.shares.to(counts)
        seen, classes = float(counts.sum()), len(source)
        certainty = skew_of(counts, source)
        mixed = (counts + SOURCE_SAMPLES * source) / (seen + SOURCE_SAMPLES)
        cautious = SOURCE_PER_CLASS * classes
        prior = ((counts + cautious * source) / (seen + cautious)).lerp(source, 1 - certainty)
        shares = source.lerp(mixed, certainty)
        far = float((shares - source).abs().sum()) / 2 >= FAR
        skew = certainty if far else 0.0
        excess = (counts - seen * source) / source.sqrt()
        return Estimate(counts, shares, (prior / source).log(), certainty, skew, excess)

    def settle(self, found: Estimate) -> None:
        """Remember what this batch held."""
        stream, size = self.stream, self._size
        total, weight = (0.0, 0.0) if self.afresh else stream.past("composition/order")
        fade = math.exp(-size / ORDER_MEMORY)
        order = (total * fade + found.skew * size, weight * fade + size)
        stream.write("composition/young", None)
        stream.write("composition/counts", found.counts.to(self.moments.shares))
        # That it was judged to be ordered says more than the few samples that it was judged by.
        stream.write("composition/order", (JUDGED, JUDGED) if self.past_as_it_was else order)
