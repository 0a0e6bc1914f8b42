"""Pixels and their neighbours: outliers, which are repaired, and the texture of images.

A median removes impulses such as salt and pepper, but also detail. So it is applied only to values
that *stray* far from the median of their 3 x 3 neighbourhood, in images that have clearly more of
these than source images. Texture and lines stray in neighbouring pixels, so only values that stray
by themselves are counted. They stray mostly in all colours at once and an impulse in one channel,
so pixels with one channel that strays tell outliers from texture even in a single image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.support.tensors import at_least_float32

# A median absolute deviation times this is the standard deviation of normal noise.
NORMAL = 1.4826

# Images of a batch, evenly spread, that tell whether it has outliers.
LOOKED_AT = 64
LOOKED_AT_VALUES = 2**21  # and of large images fewer: 13 of 3 x 224 x 224
# Of large images, strips are looked at first, and all of an image only if more values stray in its
# strips than this share of the limit.
LARGE = 128 * 128  # pixels
STRIP = 10  # rows of a strip
EVERY = 40  # rows from the beginning of one strip to that of the next
GLANCED = 0.5
# Values of an image, evenly spread, that tell its noise.
NOISE_VALUES = 2**12
# Batches that are drawn for one batch size, and the seed they are drawn with.
DRAWS = 512
SEED = 0
# Numbers that are worked on at once, so that they stay in the processor's cache.
TOGETHER = 2**16

# Distances of pixels that are compared for textures, along rows and along columns.
DISTANCES = (1, 2)
# Three averages for each distance and direction, and for the curvature.
TEXTURES = 3 * (2 * len(DISTANCES) + 1)

LEAST_SIDE = 5
MOST_CHANNELS = 4

Finder = Callable[[Tensor, float, Constants], Tensor]


def is_image(shape: Sequence[int] | None) -> bool:
    """Return whether samples of this shape look like images: (channels, height, width)."""
    if shape is None or len(shape) != 3:
        return False
    channels, height, width = shape
    return 1 <= channels <= MOST_CHANNELS and min(height, width) >= LEAST_SIDE


def local_median(images: Tensor) -> Tensor:
    """Return the median of the 3 x 3 neighbourhood of every value of (batch, channels, H, W)."""
    return _median_within(F.pad(images, (1, 1, 1, 1), mode="replicate"))


def _median_within(padded: Tensor) -> Tensor:
    """Return the local median of all values but those at the border."""
    # Sort every column of three. The median of nine is then the median of the largest low value,
    # the median middle value and the smallest high value (Smith, 1996).
    above, below = padded[..., :-2, :], padded[..., 2:, :]
    lower = torch.minimum(above, padded[..., 1:-1, :])
    upper = torch.maximum(above, padded[..., 1:-1, :])
    middle = torch.clamp(below, lower, upper)
    low, high = torch.minimum(lower, below), torch.maximum(upper, below)
    largest_low = torch.maximum(torch.maximum(low[..., :-2], low[..., 1:-1]), low[..., 2:])
    smallest_high = torch.minimum(torch.minimum(high[..., :-2], high[..., 1:-1]), high[..., 2:])
    middle = _median_of_three(middle[..., :-2], middle[..., 1:-1], middle[..., 2:])
    return _median_of_three(largest_low, middle, smallest_high)


def _median_of_three(one: Tensor, two: Tensor, three: Tensor) -> Tensor:
    return torch.clamp(three, torch.minimum(one, two), torch.maximum(one, two))


@torch.no_grad()
def strays(images: Tensor, floor: float, constants: Constants = CONSTANTS) -> tuple[Tensor, Tensor]:
    """Return whether each value strays from its local median, and the medians."""
    precise = at_least_float32(images)
    median = local_median(precise)
    return _is_far(precise, median, floor, constants), median


def _is_far(images: Tensor, median: Tensor, floor: float, constants: Constants) -> Tensor:
    distance = (images - median).abs_()
    values = distance.flatten(1)
    # An odd step, so that it meets rows and columns of every kind.
    some = values[:, :: values.shape[1] // NOISE_VALUES | 1]
    limits = constants.stray_deviations * NORMAL * some
    half = (limits.shape[1] + 1) // 2
    if torch.compiler.is_exporting():
        # The lower median.
        middle = torch.topk(limits, half, dim=1, largest=False).values[:, -1]
        return distance > middle.clamp(min=floor).view(-1, 1, 1, 1)
    # To count takes a tenth of the time of a median. Most images have so little noise that their
    # limit is the floor, and others so much that nothing strays.
    limit = torch.full_like(limits[:, 0], floor)
    noisy = (limits <= floor).sum(1) < half
    if bool(noisy.any()):
        most = values.amax(1, keepdim=True)
        limit = torch.where(noisy, most[:, 0], limit)
        unsure = (noisy & ((limits < most).sum(1) >= half)).nonzero()[:, 0]
        if len(unsure):
            limit[unsure] = limits[unsure].median(1).values
    return distance > limit.view(-1, 1, 1, 1)


@torch.no_grad()
def strays_at_a_glance(images: Tensor, floor: float, constants: Constants = CONSTANTS) -> Tensor:
    """Return whether each value within strips of large images strays; see `strays`."""
    batch, channels, _, width = images.shape
    strips = images.unfold(2, STRIP, EVERY).permute(0, 2, 1, 4, 3)  # (batch, strips, channels, ...)
    padded = F.pad(at_least_float32(strips).flatten(0, 1), (1, 1, 0, 0), mode="replicate")

    def by_image(values: Tensor) -> Tensor:
        some = values.reshape(batch, -1, channels, STRIP - 2, width)
        return some.transpose(1, 2).reshape(batch, channels, -1, width)

    inside = by_image(padded[..., 1:-1, 1:-1])
    return _is_far(inside, by_image(_median_within(padded)), floor, constants)


def shares_of(stray: Tensor) -> Tensor:
    """Return the shares of values that stray by themselves, and of pixels: (batch, 2), float64.

    On a line two neighbours stray, too: lines are no outliers. Of a pixel just one channel strays.
    """
    neighbourhood = F.avg_pool2d(stray.float(), 3, 1, 1)
    alone = stray & (neighbourhood < 2.5 / 9)  # of the nine, the value itself is one
    pixels = alone.any(1) & (stray.sum(1) == 1)
    shares = [alone.flatten(1).float().mean(1), pixels.flatten(1).float().mean(1)]
    found = torch.stack(shares, dim=1)
    return found if torch.compiler.is_exporting() else found.double()


def measure(images: Tensor) -> Tensor | None:
    """Measure source images for `SourceOutliers`, (images, 3); None if most do not vary."""
    found = []
    for part in _parts(images):
        precise = at_least_float32(part)
        distance = (precise - local_median(precise)).abs().flatten(1)
        rank = distance.shape[1] - int(distance.shape[1] * CONSTANTS.stray_share)
        found.append(distance.kthvalue(rank, dim=1).values.float())
    distances = torch.cat(found)
    floor = floor_of(distances)
    if floor <= 0:
        return None
    # The distance that one value in a thousand exceeds, and both shares of each image.
    shares = torch.cat([shares_of(strays(part, floor)[0]) for part in _parts(images)])
    return torch.cat([distances[:, None], shares.float().to(distances)], dim=1).cpu()


def floor_of(distances: Tensor, constants: Constants = CONSTANTS) -> float:
    """Return the smallest distance that counts, given the first column from `measure`."""
    return float(torch.quantile(distances.to("cpu", torch.float64), constants.stray_images))


def _parts(images: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(images, max(1, TOGETHER // images[0].numel())))


class SourceOutliers:
    """Knows how many values of source images stray by `measure`, and repairs batches with more."""

    def __init__(self, measured: Tensor, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        known = measured.detach().to("cpu", torch.float64)
        self.floor = floor_of(known[:, 0], constants)
        self.shares = known[:, 1:]
        # Images with no more stay as they are: if conditions are mixed, most of the clean ones.
        self._ordinary = torch.quantile(self.shares, 1 - constants.rare, dim=0)
        # One odd image does not make a batch: in a batch, it counts for at most this.
        self._most = constants.beyond * self._ordinary.clamp(min=constants.stray_share)
        self._limits: dict[int, Tensor] = {}

    def mean_shares(self, shares: Tensor) -> Tensor:
        """Return the mean shares of batches, single images bounded: (..., size, 2) to (..., 2)."""
        return (shares.clamp(max=self._most) if shares.shape[-2] > 1 else shares).mean(-2)

    def limit(self, size: int) -> Tensor:
        """Return how large `mean_shares` may be in a batch of this size, shape (2,)."""
        if size not in self._limits:
            rare = self._ordinary if size == 1 else self._rare(size)
            least = self._constants.stray_share
            self._limits[size] = self._constants.beyond * rare.clamp(min=least)
        return self._limits[size]

    def _rare(self, size: int) -> Tensor:
        """Return the shares that only few source batches exceed, by draws of such batches."""
        images = len(self.shares)
        generator = torch.Generator().manual_seed(SEED)
        chosen = torch.randint(images, (DRAWS, size), generator=generator)
        means = self.mean_shares(self.shares[chosen])  # (draws, 2)
        usual = means.mean(0)
        # The images are a sample themselves, so their shares vary, too.
        away = torch.quantile(means, 1 - self._constants.rare, dim=0) - usual
        return usual + away * math.sqrt(1 + size / images)

    def repaired(self, images: Tensor) -> tuple[Tensor, float]:
        """Return a batch with local medians for outliers, and the share of values astray."""
        mended, [share] = self.repaired_each(images, [len(images)])
        return mended, share

    def repaired_each(self, images: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Repair batches of these sizes, one after the other; return all images and each share."""
        most = max(1, min(LOOKED_AT, LOOKED_AT_VALUES // images[0].numel()))
        batches = torch.split(images, list(sizes))
        looks = [batch[:: math.ceil(len(batch) / most)] for batch in batches]
        finders: list[tuple[Finder, float]] = [(lambda *given: strays(*given)[0], 1.0)]
        if _has_strips(images):
            finders.insert(0, (strays_at_a_glance, GLANCED))
        suspects, shares = list(range(len(looks))), [0.0] * len(looks)
        for find, part in finders:
            found = self._shares(find, [looks[number] for number in suspects])
            suspected, suspects = suspects, []
            for number, own in zip(suspected, found, strict=True):
                shares[number] = float(own[:, 0].mean())
                if bool((self.mean_shares(own) > part * self.limit(len(own))).any()):
                    suspects.append(number)
        if not suspects:
            return images, shares
        parts = [
            self._mended(part) if number in suspects else part
            for number, batch in enumerate(batches)
            for part in _parts(batch)
        ]
        return torch.cat(parts), shares

    def repaired_alike(self, images: Tensor, each: int) -> Tensor:
        """Repair batches of `each` images, by the same operations for all images: for exporters."""
        median = local_median(images)
        stray = _is_far(images, median, self.floor, self._constants)
        astray = self._many_alike(stray, each, 1.0)
        if _has_strips(images):
            glanced = strays_at_a_glance(images, self.floor, self._constants)
            astray = astray & self._many_alike(glanced, each, GLANCED)
        shares = shares_of(stray)
        unusual = (shares > self._ordinary.to(shares)).any(1)
        unusual = unusual & astray[:, None].expand(-1, each).flatten()
        return torch.where(stray & unusual.view(-1, 1, 1, 1), median.to(images.dtype), images)

    def _many_alike(self, stray: Tensor, each: int, part: float) -> Tensor:
        """Return for each batch whether more values stray than this part of the limit."""
        shares = shares_of(stray).reshape(-1, each, 2)
        if each > 1:
            shares = torch.minimum(shares, self._most.to(shares))
        return (shares.mean(1) > part * self.limit(each).to(shares)).any(1)

    def _shares(self, find: Finder, looks: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the shares of the images of each of some batches, on the CPU."""
        if not looks:
            return []
        together = looks[0] if len(looks) == 1 else torch.cat(list(looks))
        found = [find(some, self.floor, self._constants) for some in _parts(together)]
        shares = torch.cat([shares_of(each) for each in found]).cpu()
        return torch.split(shares, [len(look) for look in looks])

    def _mended(self, images: Tensor) -> Tensor:
        stray, median = strays(images, self.floor, self._constants)
        unusual = (shares_of(stray) > self._ordinary.to(images.device)).any(1)
        return torch.where(stray & unusual.view(-1, 1, 1, 1), median.to(images.dtype), images)


def _has_strips(images: Tensor) -> bool:
    return images.shape[2] * images.shape[3] >= LARGE and images.shape[2] >= STRIP


@torch.no_grad()
def textures(images: Tensor) -> Tensor:
    """Return three averages of each kind of difference between near pixels, (batch, `TEXTURES`).

    Noise has many medium differences, edges few large ones. Colours are averaged first. The kinds
    are differences along rows and columns for each of `DISTANCES`, and the curvature: four times a
    pixel less its four neighbours. The averages are the squared mean of square roots, the mean, and
    the root of the mean square. Images have at least 5 x 5 pixels.
    """
    precise = torch.promote_types(images.dtype, torch.float32)
    return torch.cat([_textures(part.mean(1, dtype=precise)) for part in _parts(images)])


def _textures(grey: Tensor) -> Tensor:
    """Return the averages for images without colours, (batch, height, width)."""
    across = grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    along = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1]
    found = []
    for distance in DISTANCES:
        found.append(grey[..., distance:] - grey[..., :-distance])
        found.append(grey[..., distance:, :] - grey[..., :-distance, :])
    found.append(4 * grey[..., 1:-1, 1:-1] - across - along)
    # One table for all kinds, zero beyond their ends: of small images, each step takes its time.
    table = grey.new_zeros(len(found), *grey.shape)
    for each, difference in zip(table, found, strict=True):
        each[:, : difference.shape[1], : difference.shape[2]] = difference
    size = table.abs_().flatten(2)  # (kinds, batch, pixels)
    count = grey.new_tensor([each[0].numel() for each in found])[:, None]
    root_mean_square = torch.linalg.vector_norm(size, dim=2) / count.sqrt()
    mean = size.sum(2) / count
    mean_root = size.sqrt_().sum(2) / count
    averages = torch.stack([mean_root.square(), mean, root_mean_square], 2)
    return averages.transpose(0, 1).flatten(1)
