"""What classes do to the statistics of a network, measured on the source without labels.

Three things are known of the classes that the network sees in source images:

- *Moments*: the channel means and mean squares of normalisation layers, by class. With them, what
  the classes of some images explain is taken out of their statistics. With m(pi) and v(pi) the mean
  and variance of a channel for shares pi of classes, and u those of the source,

      mean - (m(pi) - m(u))        var v(u) / v(pi)

- *Likeness*: of each layer, the share of the variance of per-image channel means that lies between
  classes, the intraclass correlation. It says for how many independent images a run of one class
  counts.
- *Pairs*: whether two images have one class, by their channel means in late layers. These are
  whitened by their covariance within classes. With d the difference of two images,

      F = mean of d^2 in the directions in which classes differ / mean of d^2 in all others

  A shift that both images have cancels in d, and a scale in F. log F is about normal, with one mean
  for two images of one class and a larger one for two classes.

There may be a thousand classes: moments are kept in a low-rank form, the principal components of
the class means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants

# Directions in which class moments may differ: 4.5 MB for a ResNet-50 with 1,000 classes.
LARGEST_RANK = 20
NO_DIRECTION = 1e-10  # a smaller share of the largest one, squared, is rounding
SMALLEST_RATIO = 0.05  # of variances: a low rank may overshoot

# Pairs: numbers that describe an image at most, and images for each of them at least.
MOST_FEATURES = 256
IMAGES_A_FEATURE = 2

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PairStatistic:
    """Tells by late layers whether two images have one class.

    Attributes:
        layers: By path of a layer: what to multiply the means of every `stride`-th channel by,
            shape (channels, features).
        stride: See `layers`.
        directions: In so many of the first features classes differ.
        same: Mean of log F for two images of one class.
        other: The same for two classes.
        deviation: Standard deviation of log F around them.
    """

    layers: dict[str, Tensor]
    stride: int
    directions: int
    same: float
    other: float
    deviation: float

    @property
    def numbers(self) -> Tensor:
        """All but `layers`, float64, for a file; see `of_numbers`."""
        found = [self.stride, self.directions, self.same, self.other, self.deviation]
        return torch.tensor(found, dtype=torch.float64)

    @classmethod
    def of_numbers(cls, layers: dict[str, Tensor], numbers: Tensor) -> PairStatistic:
        """Return what was written as `layers` and `numbers`."""
        stride, directions, same, other, deviation = numbers.tolist()
        return cls(layers, int(stride), int(directions), same, other, deviation)

    @property
    def features(self) -> int:
        """How many numbers describe an image."""
        return next(iter(self.layers.values())).shape[1]

    def described(self, means: Mapping[str, Tensor]) -> Tensor | None:
        """Return the features of images; None if a layer has not been called.

        Args:
            means: By path of a layer, the channel means of each image, shape (images, channels).
        """
        if self.layers.keys() - means.keys():
            return None
        parts = [
            means[path][:, :: self.stride] @ matrix.to(means[path])
            for path, matrix in self.layers.items()
        ]
        return torch.stack(parts).sum(0)

    def log_ratio(
        self,
        before: Numbers,
        features: Numbers,
        constants: Constants = CONSTANTS,
        xp: Any = np,
    ) -> Numbers:
        """Return how much likelier each pair is if both have one class, as a logarithm.

        Under a shift the network tells classes apart less well, and F of two classes falls. So
        there are two classes from a lower F on than halfway between the two means.

        Args:
            before: The image before the first one of each stream, shape (streams, features).
            features: Shape (streams, images, features).
            constants: See `ttapca.spectral.constants`.
            xp: Library that the arrays are of; see `ClassChain.computing_with`.

        Returns:
            Shape (streams, images).
        """
        earlier = xp.concatenate([before[:, None], features[:, :-1]], 1)
        squares = (features - earlier) ** 2
        between = squares[..., : self.directions].mean(-1).clip(min=1e-30)
        within = squares[..., self.directions :].mean(-1).clip(min=1e-30)
        log_f = xp.log(between / within)
        middle = self.same + constants.pair_middle * (self.other - self.same)
        slope = (self.same - self.other) / self.deviation**2
        found: Numbers = constants.pair_weight * slope * (log_f - middle)
        return found


@dataclass(frozen=True, eq=False)
class SourceClasses:
    """What is known of classes in the source.

    Attributes:
        shares: Share of each class in the source data, as predicted, shape (classes,).
        loadings: Coordinates of each class, shape (classes, rank).
        layers: By path of a layer: the moments at the source shares, then one direction for each
            coordinate, shape (1 + rank, 2, channels).
        likeness: By path of a layer: its intraclass correlation, from 0 to 1.
        pairs: Tells whether two images have one class; None if late layers do not.
    """

    shares: Tensor
    loadings: Tensor
    layers: dict[str, Tensor]
    likeness: dict[str, float] = field(default_factory=dict)
    pairs: PairStatistic | None = None

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

        Args:
            weights: Sum of the probabilities of each class, shape (classes,).
            sums: By path of a layer, the weighted sums of channel means and of mean squares, shape
                (classes, 2, channels).
            squares: By path of a layer, the sums of squared channel means, shape (channels,).
            pairs: See `SourceClasses`.
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
                likeness[path] = _likeness(shares @ away[:, 0].square(), total)
        return cls(shares.float(), loadings.float(), layers, likeness, pairs)


def corrections(table: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return what to take from the mean of each channel, and what to scale its variance by.

    Args:
        table: The moments at the source shares, then one direction for each coordinate, shape
            (1 + rank, 2, channels).
        place: Coordinates of what is there instead of the source shares, shape (groups, rank).

    Returns:
        Both of shape (groups, channels).

    Example:
        >>> sums = {"bn": torch.tensor([[[0.0], [1.0]], [[4.0], [20.0]]])}  # 2 classes, 1 channel
        >>> classes = SourceClasses.from_sums(torch.ones(2), sums)
        >>> place = (torch.tensor([[0.0, 1.0]]) - classes.shares) @ classes.loadings
        >>> shift, scale = corrections(classes.layers["bn"], place)
        >>> round(shift.item(), 4), round(scale.item(), 4)  # mean 4 for 2, variance 4 for 6.5
        (2.0, 1.625)
    """
    source_mean, source_square = table[0]
    moved = (place @ table[1:].flatten(1)).view(place.shape[0], 2, -1)
    mean, square = source_mean + moved[:, 0], source_square + moved[:, 1]
    source_var = source_square - source_mean.square()
    ratio = (square - mean.square()) / source_var.clamp(min=1e-12)
    scale = ratio.clamp(min=SMALLEST_RATIO, max=1 / SMALLEST_RATIO).reciprocal()
    return moved[:, 0], scale


def _likeness(between: Tensor, total: Tensor) -> float:
    """Return the intraclass correlation of a layer, given variances, shape (channels,) each."""
    alive = total > 1e-12
    if not alive.any():
        return 0.0
    return float((between[alive] / total[alive]).clamp(0, 1).mean())


def late_layers(paths: list[str]) -> list[str]:
    """Return the last quarter of the layers of a model, without the last one; at least one layer.

    Example:
        >>> late_layers([str(number) for number in range(8)]), late_layers(["0", "1", "2"])
        (['6'], ['1'])
    """
    return paths[min(3 * len(paths) // 4, len(paths) - 2) : -1] or paths


def pair_statistic(
    features: Tensor, shares: Tensor, weights: Tensor, layers: Mapping[str, int], stride: int
) -> PairStatistic | None:
    """Find what tells by late layers whether two images have one class; None if nothing does.

    How log F is distributed is measured on images that its directions were not found with.

    Args:
        features: Channel means of source images in all layers, shape (images, channels).
        shares: Their class probabilities, shape (images, classes).
        weights: For how many images each counts, shape (images,).
        layers: By path, how many of the channels each layer has.
        stride: Every which channel these are.
    """
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
