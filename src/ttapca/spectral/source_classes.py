"""What classes do to the statistics of a network, measured on the source without labels.

With m(pi) and v(pi) the mean and variance of a channel for shares pi of classes, and u those of the
source, the effect of classes is taken out by

    mean - (m(pi) - m(u))        var v(u) / v(pi)

There may be a thousand classes, so moments are kept in a low-rank form. The intraclass correlation
of each layer, its *likeness*, counts the images of a run; see `ttapca.spectral.chain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.chain import ChainReading
from ttapca.spectral.constants import CONSTANTS, Constants

# Directions in which class moments may differ: 4.5 MB for a ResNet-50 with 1,000 classes.
LARGEST_RANK = 20
NO_DIRECTION = 1e-10  # a smaller share of the largest one, squared, is rounding
SMALLEST_RATIO = 0.05  # of variances: a low rank may overshoot

# Pairs: numbers that describe an image at most, and images for each of them at least.
MOST_FEATURES = 256
IMAGES_A_FEATURE = 2

Numbers = NDArray[np.float64]

# The positions of each stream's images in a batch, in order of arrival; or, traced for an exporter,
# the number of images of each stream, one stream after the other.
StreamPositions = Sequence[Tensor] | int


@dataclass(frozen=True, eq=False)
class PairStatistic:
    """Tells by late layers whether two images have one class.

    Channel means are whitened by their covariance within classes. With d the difference of two
    images,

        F = mean of d^2 in the directions in which classes differ / mean of d^2 in all others

    A shift that both images have cancels in d, and a scale in F. log F is about normal, with one
    mean for two images of one class and a larger one for two classes.
    """

    # By layer: the factors of the means of every `stride`-th channel, shape (channels, features).
    layers: dict[str, Tensor]
    stride: int
    directions: int  # number of first features in which classes differ
    same: float  # mean of log F for two images of one class
    other: float  # the same for two classes
    deviation: float  # standard deviation of log F around them

    @property
    def numbers(self) -> Tensor:
        """All but `layers`, float64, for a file; see `of_numbers`."""
        found = [self.stride, self.directions, self.same, self.other, self.deviation]
        return torch.tensor(found, dtype=torch.float64)

    @classmethod
    def of_numbers(cls, layers: dict[str, Tensor], numbers: Tensor) -> PairStatistic:
        """Make it of `layers` and `numbers`."""
        stride, directions, same, other, deviation = numbers.tolist()
        return cls(layers, int(stride), int(directions), same, other, deviation)

    @property
    def features(self) -> int:
        """Number of features of an image."""
        return next(iter(self.layers.values())).shape[1]

    def described(self, means: Mapping[str, Tensor]) -> Tensor | None:
        """Return the features of images, by channel means in layers; None if one was not called."""
        if self.layers.keys() - means.keys():
            return None
        parts = [
            means[path][:, :: self.stride] @ matrix.to(means[path])
            for path, matrix in self.layers.items()
        ]
        return torch.stack(parts).sum(0)

    def log_ratio(
        self, before: Numbers, features: Numbers, constants: Constants = CONSTANTS, xp: Any = np
    ) -> Numbers:
        """Return how much likelier each pair is if both have one class, as a logarithm.

        `before` are the features of the image before the first one of each stream, (streams,
        features); those of the others have the shape (streams, images, features). Under a shift F
        of two classes falls, so there are two classes from a lower F on than halfway between the
        two means.
        """
        earlier = xp.concatenate([before[:, None], features[:, :-1]], 1)
        squares = (features - earlier) ** 2
        between = squares[..., : self.directions].mean(-1).clip(min=1e-30)
        within = squares[..., self.directions :].mean(-1).clip(min=1e-30)
        found: Numbers = self._speaks_for_one(xp.log(between / within), constants)
        return found

    def said_by_any(
        self, past: Numbers, alike: Numbers, constants: Constants = CONSTANTS, xp: Any = np
    ) -> Numbers:
        """Return the part of `log_ratio` that any two images of each stream show, (streams,).

        If any two look like one class, that two neighbours do says nothing, unless predictions are
        `alike`: so far the stream has shown one class. `past` are its `past_features`.
        """
        usual = self._speaks_for_one(self._usual_log_f(past, constants, xp), constants)
        one_class = self._speaks_for_one(self.same - self.deviation, constants)
        return cast(Numbers, (usual - one_class * alike).clip(min=0))

    def past_after(
        self,
        before: Numbers,
        features: Numbers,
        sizes: Sequence[int] | None = None,
        constants: Constants = CONSTANTS,
        xp: Any = np,
    ) -> Numbers:
        """Return number, sums and sums of squares of the features of streams after some images.

        They fade as regimes do. `sizes` are the images of each stream, if these differ.
        """
        ones = features[..., :1] * 0 + 1
        rows = xp.concatenate([ones, features, features**2], 2)
        if sizes is not None and min(sizes) < rows.shape[1]:
            rows = rows * (np.arange(rows.shape[1]) < np.asarray(sizes)[:, None])[..., None]
        added = rows.sum(1)
        fading = xp.exp(-added[:, :1] / constants.regime_memory)
        return cast(Numbers, before * fading + added)

    def _speaks_for_one(self, log_f: Any, constants: Constants) -> Any:
        middle = self.same + constants.pair_middle * (self.other - self.same)
        slope = (self.same - self.other) / self.deviation**2
        return constants.pair_weight * slope * (log_f - middle)

    def _usual_log_f(self, past: Numbers, constants: Constants, xp: Any) -> Numbers:
        """Return the mean of log F of any two images of each stream, (streams,).

        The source, whose pairs are mostly of two classes, counts as recent shares do. Of normal
        numbers, the logarithm of a mean of d squares is 1 / d lower than that of its expectation.
        """
        size, prior = self.features, constants.laplace * (self.directions + 1)
        number, sums, squares = past[:, :1], past[:, 1 : 1 + size], past[:, 1 + size :]
        away = (squares - sums**2 / number.clip(min=1)).clip(min=0)
        between = prior * math.exp(self.other) + away[:, : self.directions].mean(1)
        within = prior + away[:, self.directions :].mean(1)
        bias = 1 / self.directions - 1 / (size - self.directions)
        return cast(Numbers, xp.log(between / within) - bias)


@dataclass(frozen=True, eq=False)
class SourceClasses:
    """The classes in the source."""

    shares: Tensor  # of each class in the source data, as predicted, shape (classes,)
    loadings: Tensor  # coordinates of each class, shape (classes, rank)
    # By path of a layer: the moments at the source shares, then one direction for each coordinate,
    # shape (1 + rank, 2, channels).
    layers: dict[str, Tensor]
    likeness: dict[str, float] = field(default_factory=dict)  # intraclass correlation of each layer
    pairs: PairStatistic | None = None  # None if late layers do not tell classes apart

    def renamed(self, rename: Callable[[str], str]) -> SourceClasses:
        """Return the same with other paths of layers."""

        def each(known: Mapping[str, Any]) -> dict[str, Any]:
            return {rename(path): value for path, value in known.items()}

        pairs = self.pairs and replace(self.pairs, layers=each(self.pairs.layers))
        return replace(self, layers=each(self.layers), likeness=each(self.likeness), pairs=pairs)

    @classmethod
    def from_sums(
        cls,
        weights: Tensor,
        sums: Mapping[str, Tensor],
        squares: Mapping[str, Tensor] | None = None,
        pairs: PairStatistic | None = None,
    ) -> SourceClasses:
        """Make moments of sums over source images, each image weighted by its class probabilities.

        Weights are sums of the probabilities, (classes,). By path of a layer, `sums` are those of
        channel means and of mean squares, (classes, 2, channels), and `squares` of squared means,
        (channels,).
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
        layers, likeness = {}, {}
        for path, each in means.items():
            away = each - base[path]
            directions = torch.einsum("k,kr,ksc->rsc", shares, loadings, away)
            layers[path] = torch.cat([base[path][None], directions]).float()
            square = (squares or {}).get(path)
            if square is not None:
                total = square.double() / weights.sum() - base[path][0].square()
                alive = total > 1e-12
                correlation = (shares @ away[:, 0].square())[alive] / total[alive]
                likeness[path] = float(correlation.clamp(0, 1).mean()) if alive.any() else 0.0
        return cls(shares.float(), loadings.float(), layers, likeness, pairs)


def corrections(table: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return offsets of channel means, and factors of variances, both (groups, channels)."""
    source_mean, source_square = table[0]
    moved = (place @ table[1:].flatten(1)).view(place.shape[0], 2, -1)
    mean, square = source_mean + moved[:, 0], source_square + moved[:, 1]
    source_var = source_square - source_mean.square()
    ratio = (square - mean.square()) / source_var.clamp(min=1e-12)
    scale = ratio.clamp(min=SMALLEST_RATIO, max=1 / SMALLEST_RATIO).reciprocal()
    return moved[:, 0], scale


def late_layers(paths: list[str]) -> list[str]:
    """Return the last quarter of a model's layers, without the last one; at least one layer."""
    return paths[min(3 * len(paths) // 4, len(paths) - 2) : -1] or paths


def pair_statistic(
    features: Tensor, shares: Tensor, weights: Tensor, layers: Mapping[str, int], stride: int
) -> PairStatistic | None:
    """Find a pair statistic in late layers; None if they do not tell classes apart."""
    images, size = features.shape
    directions = min(shares.shape[1] - 1, LARGEST_RANK, size // 2)
    if images < IMAGES_A_FEATURE * size or directions < 1:
        return None
    # In an order that does not depend on that of the data.
    order = features[:, 0].argsort(stable=True)
    rows, by_class, counts = (each[order].double() for each in (features, shares, weights))
    halves = [torch.arange(images) % 2 == half for half in (0, 1)]
    found = []
    for fitted, other in (halves, halves[::-1]):
        matrix = _whitening(rows[fitted], by_class[fitted], counts[fitted])
        found.append(_log_f_of_pairs(rows[other] @ matrix, by_class[other], directions))
    same, other_mean, deviation = torch.tensor(found).mean(0).tolist()
    if not other_mean - same > CONSTANTS.pair_middle * deviation:
        return None
    matrix = _whitening(rows, by_class, counts).float()
    parts = dict(zip(layers, torch.split(matrix, list(layers.values())), strict=True))
    return PairStatistic(parts, stride, directions, same, other_mean, deviation)


def _whitening(rows: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """Return a matrix that makes the covariance within classes 1, classes in its first columns."""
    weighted = shares * weights[:, None]
    totals = weighted.sum(0).clamp(min=1e-6)
    means = (weighted.T @ rows) / totals[:, None]  # (classes, channels)
    total = weights.sum()
    # Sum over images and classes of p (x - m_k)(x - m_k)^T, multiplied out.
    within = (rows.T * weights) @ rows - (means.T * totals) @ means
    within = within / total
    # It is known from few images: a part of the mean variance is added to all.
    ridge = CONSTANTS.ridge * within.diagonal().mean()
    within += ridge * torch.eye(len(within), dtype=within.dtype)
    values, vectors = torch.linalg.eigh(within)
    whiten = vectors / values.clamp(min=1e-12).sqrt()
    away = (means - (weights @ rows) / total) @ whiten * (totals / total).sqrt()[:, None]
    turned: Tensor = torch.linalg.svd(away, full_matrices=True).Vh.T
    found: Tensor = whiten @ turned
    return found


def _log_f_of_pairs(features: Tensor, shares: Tensor, directions: int) -> list[float]:
    """Return the means of log F for one class and for two, and the deviation around them."""
    places = torch.linspace(0, len(features) - 1, min(len(features), 512)).round().long()
    rows, shares = features[places], shares[places]
    parts = [rows[:, :directions], rows[:, directions:]]
    distances = [torch.cdist(part, part).square() / part.shape[1] for part in parts]
    log_f = (distances[0].clamp(min=1e-30) / distances[1].clamp(min=1e-30)).log()
    together = shares @ shares.T
    pairs = ~torch.eye(len(rows), dtype=torch.bool)
    means, variances, totals = [], [], []
    for chance in (together, 1 - together):
        weight = torch.where(pairs, chance.square(), 0.0)  # unsure pairs say less
        totals.append(weight.sum().clamp(min=1e-12))
        means.append((weight * log_f).sum() / totals[-1])
        variances.append((weight * (log_f - means[-1]).square()).sum() / totals[-1])
    deviation = ((variances[0] + variances[1]) / 2).sqrt()
    return [float(means[0]), float(means[1]), float(deviation)]


class LayerClasses:
    """The statistics of classes in the source, for layers with their numbers of channels."""

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
        """Return the `corrections` of all layers' channels side by side, for (groups, classes)."""
        self._table = self._table.to(shares.device)
        place = (shares - self.classes.shares.to(shares)) @ self.classes.loadings.to(shares)
        return corrections(self._table, place)


@dataclass(frozen=True, eq=False)
class ClassPlan:
    """The classes to take out of the statistics of a batch, and the weights of images."""

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
        places: StreamPositions,
        size: int,
    ) -> ClassPlan:
        """Make the plan of `size` images, given recent images of streams, (streams,)."""
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


def by_stream(values: Tensor, places: StreamPositions) -> Any:
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


def in_batch(values: Any, places: StreamPositions, size: int) -> Tensor:
    """Return rows of streams in the order of the batch, the reverse of `by_stream`; else zeros."""
    if isinstance(places, int):
        found: Tensor = values.flatten(0, 1)
        return found
    if len(places) == 1 and len(places[0]) == size:
        return torch.from_numpy(np.ascontiguousarray(values[0]))
    rows = torch.zeros(size, *values.shape[2:], dtype=torch.float64)
    for number, own in enumerate(places):
        rows[own] = torch.from_numpy(values[number, : len(own)])
    return rows
