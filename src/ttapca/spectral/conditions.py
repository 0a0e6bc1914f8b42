"""Which of several conditions each image of a stream has: noise, fog, none, and so on.

One set of gains and statistics cannot serve a batch in which every image may have another
condition. So a stream can have several *states*, one for each condition, and each image is served
by the state that it is nearest to.

**Appearance.** An image is described by the logarithms of its band energies and of its textures
(`ttapca.spectral.textures`), in units in which source images vary by 1 in every direction. So what
an image shows counts little, and what happened to it counts much.

**A new state.** There is one state at first. The images that a state had of late are split in two
along a direction in which they vary most, where the split leaves two clearly separate groups: far
apart, and each so narrow that they cannot be the two halves of one. One condition does not do that,
however much its images vary: two halves of a normal distribution keep 36 % of its variance, two
halves of an even one 25 %. The images of two conditions keep less than that.

**One condition at a time** is what most streams have. Where the images of a batch are about as
near to their own mean as each is to its nearest state, the whole batch belongs to one state: the
one nearest to its mean, or a new one if all are far from it.

States are not forgotten: a condition that comes back finds the state that it had.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttapca.spectral.stream import Stream

# Chosen on held-out conditions; docs/closed-form.md has the measurements.
MOST_STATES = 16
RECENT = 400  # images that are looked at for a new state
ENOUGH = 64  # with fewer than these, none is looked for ...
OFTEN = 16  # ... nor before so many others have come
FEWEST = 8  # images in each of two groups
FAR = 3.5  # distance of means from which there are two, in standard deviations of source images
VARIED = 4.0  # variance of the images along the direction, where source images have 1
DIRECTIONS = 4  # that are tried
# Share of the variance along the direction that is left in two separate groups; the second number
# is for streams that are known to have several conditions.
APART, APART_LATER = 0.28, 0.32
STEPS = 5  # of k-means, after a split
TOGETHER = 32  # images that are looked at together, to see whether they have one condition
# So much nearer, in squared distance, are the images of one condition to the states at most.
ONE = 3.0
MEMORY = 200.0  # images that the centre of a state stands for, at most

# Source images for each number that describes an image; fewer do not tell how images vary.
FEWEST_SOURCE = 4
# Added to correlations, so that directions in which source images hardly vary do not dominate.
RIDGE = 3e-3
# An image without any detail has no logarithm; as a share of what source images have.
LEAST = 1e-3


class Appearances:
    """Describes images in units of how source images vary.

    Args:
        energies: Band energies of source images, shape (images, bands).
        textures: Textures of the same images, shape (images, numbers); None where they have none.

    Attributes:
        known: Whether there were enough source images to say how they vary.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> energies = torch.rand(500, 3, generator=generator) + 0.5
        >>> source = Appearances(energies)(energies)
        >>> [round(value, 2) for value in source.std(0).tolist()]
        [1.0, 1.0, 1.0]
    """

    def __init__(self, energies: Tensor, textures: Tensor | None = None) -> None:
        measured = _beside(energies, textures)
        self._least = LEAST * measured.median(0).values.clamp(min=torch.finfo(torch.float32).tiny)
        logarithms = (measured + self._least).log()
        self._mean, self._deviation = logarithms.mean(0), logarithms.std(0).clamp(min=1e-6)
        unit = (logarithms - self._mean) / self._deviation
        correlations = unit.T @ unit / (len(unit) - 1)
        ridge = RIDGE * torch.eye(len(correlations), dtype=torch.float64)
        self._whiten = torch.linalg.cholesky(torch.linalg.inv(correlations + ridge))

        self.known = len(measured) >= FEWEST_SOURCE * self.size

    @property
    def size(self) -> int:
        """How many numbers describe an image."""
        return len(self._mean)

    def __call__(self, energies: Tensor, textures: Tensor | None = None) -> Tensor:
        """Return one row for each image, float64 on the CPU, shape (images, `size`)."""
        logarithms = (_beside(energies, textures) + self._least).log()
        whitened: Tensor = (logarithms - self._mean) / self._deviation @ self._whiten
        return whitened


def _beside(energies: Tensor, textures: Tensor | None) -> Tensor:
    both = energies if textures is None else torch.cat([energies, textures.to(energies)], 1)
    return both.detach().to("cpu", torch.float64)


class ConditionStates:
    """The states of a stream: finds them, and says which one each image belongs to.

    Args:
        describe: Describes images.
        most: How many states there may be.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> source = torch.rand(500, 2, generator=generator) + 0.5
        >>> conditions = ConditionStates(Appearances(source), most=4)
        >>> conditions.join(Stream())
        >>> both = torch.cat([source[:50], 9 * source[50:100]])
        >>> conditions.route(conditions.describe(both)).tolist() == [0] * 50 + [1] * 50
        True
    """

    def __init__(self, describe: Appearances, most: int = MOST_STATES) -> None:
        self.describe = describe
        self.most = most

    def join(self, stream: Stream) -> None:
        """Keep what is seen in this stream."""
        self.stream = stream
        # The centres of the states, and how many images each stands for.
        stream.declare("conditions/states", ((), ()))
        # The last images, how many of the rows are filled, and how many are new since a search.
        recent = torch.zeros(RECENT, self.describe.size, dtype=torch.float64)
        stream.declare("conditions/recent", (recent, 0, 0))

    @torch.no_grad()
    def route(self, appearances: Tensor) -> Tensor:
        """Add images to the stream, and return the number of the state of each, shape (images,).

        Args:
            appearances: Shape (images, numbers).
        """
        stream = self.stream
        centres, counts = (list(each) for each in stream.past("conditions/states"))
        recent, unsearched = self._recent(appearances)
        if not centres:
            centres, counts = [appearances.mean(0)], [0.0]
        middles = torch.stack([centre.to(appearances) for centre in centres])
        weights = torch.tensor(counts, dtype=appearances.dtype)
        if len(recent) >= ENOUGH and unsearched >= OFTEN:
            unsearched = 0
            middles, weights = self._searched(recent, middles, weights)
        together = recent[-max(len(appearances), TOGETHER) :]
        if len(together) >= TOGETHER and _of_one_condition(together, middles):
            mean = together.mean(0, keepdim=True)
            far = bool(torch.cdist(mean, middles).min() > FAR)
            # Images of several small batches may have several conditions, which a search tells.
            if far and len(appearances) >= TOGETHER and len(middles) < self.most:
                middles, weights = torch.cat([middles, mean]), _with_zero(weights)
            nearest = _nearest(mean, middles).expand(len(appearances))
        else:
            nearest = _nearest(appearances, middles)
        middles, weights = _moved(middles, weights, appearances, nearest)
        stream.write(
            "conditions/states", (tuple(middles), tuple(weights.clamp(max=MEMORY).tolist()))
        )
        rows = torch.zeros(RECENT, appearances.shape[1], dtype=appearances.dtype)
        rows[: len(recent)] = recent
        stream.write("conditions/recent", (rows, len(recent), unsearched))
        return nearest

    def _recent(self, appearances: Tensor) -> tuple[Tensor, int]:
        """Return the last images, and how many of them are new since states were looked for."""
        rows, filled, unsearched = self.stream.past("conditions/recent")
        recent = torch.cat([rows[: int(filled)].to(appearances), appearances])[-RECENT:]
        return recent, int(unsearched) + len(appearances)

    def _searched(self, recent: Tensor, centres: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Split states as long as there are two conditions in one."""
        while len(centres) < self.most:
            apart = APART if len(centres) == 1 else APART_LATER
            nearest = _nearest(recent, centres)
            found = [
                (*split, state)
                for state in range(len(centres))
                if (split := _two_groups(recent[nearest == state], apart)) is not None
            ]
            if not found:
                break
            _, stays, leaves, state = max(found, key=lambda each: each[0])
            if _distance(stays, centres[state]) > _distance(leaves, centres[state]):
                stays, leaves = leaves, stays
            # What the state has seen belongs to the group that is nearer to it, but its centre
            # stood for both.
            centres = torch.cat([centres, leaves[None]])
            centres[state] = stays
            counts = _with_zero(counts)
            kept = counts.clone()
            kept[state] = 0.0
            start = centres
            for _ in range(STEPS):
                centres, _ = _moved(start, kept, recent, _nearest(recent, centres))
        return centres, counts


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(rows, centres).argmin(1)


def _of_one_condition(rows: Tensor, centres: Tensor) -> bool:
    """Return whether images are about as near to their mean as each is to its nearest centre."""
    to_mean = (rows - rows.mean(0)).square().sum() / (len(rows) - 1)
    to_centres = torch.cdist(rows, centres).square().min(1).values.mean()
    return float(to_mean - to_centres) < ONE


def _with_zero(counts: Tensor) -> Tensor:
    return torch.cat([counts, counts.new_zeros(1)])


def _distance(one: Tensor, two: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - two))


def _moved(centres: Tensor, counts: Tensor, rows: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of all that centres stand for, with the rows that are theirs, and counts."""
    belongs = torch.nn.functional.one_hot(nearest, len(centres)).to(rows)  # (rows, centres)
    total = counts + belongs.sum(0)
    means = (counts[:, None] * centres + belongs.T @ rows) / total.clamp(min=1.0)[:, None]
    return torch.where(total[:, None] > 0, means, centres), total


def _two_groups(rows: Tensor, apart: float) -> tuple[float, Tensor, Tensor] | None:
    """Split images in two groups that are clearly separate, if there are such.

    Args:
        rows: Appearances, shape (images, numbers).
        apart: The largest share of variance that may be left in the groups.

    Returns:
        By how much the split lowers the sum of squares, and the means of the groups.
    """
    if len(rows) < 2 * FEWEST:
        return None
    mean = rows.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov(rows.T))
    best = None
    for number in range(1, 1 + min(DIRECTIONS, len(variances))):
        if variances[-number] < VARIED:
            break
        places = (rows - mean) @ directions[:, -number]
        left, cut, distance = _two_means(places)
        upper = places > cut
        fewer = min(int(upper.sum()), int((~upper).sum()))
        gain = (1 - left) * float(variances[-number]) * len(rows)
        if left > apart or distance < FAR or fewer < FEWEST or (best and gain <= best[0]):
            continue
        best = (gain, rows[upper].mean(0), rows[~upper].mean(0))
    return best


def _two_means(places: Tensor) -> tuple[float, float, float]:
    """Cut numbers in two groups so that as little variance as possible is left in them.

    Returns:
        The share of variance that is left, where the cut is, and the distance of the means.

    Example:
        >>> _two_means(torch.tensor([0.0, 1.0, 9.0, 10.0], dtype=torch.float64))[1:]
        (5.0, 9.0)
    """
    rising = places.sort().values
    number = len(rising)
    below = torch.arange(1, number, dtype=rising.dtype)
    sums = rising.cumsum(0)
    lower, upper = sums[:-1] / below, (sums[-1] - sums[:-1]) / (number - below)
    between = below * (number - below) / number**2 * (upper - lower).square()
    best = int(between.argmax())
    left = 1 - float(between[best]) / float(rising.var(correction=0))
    cut = float(rising[best] + rising[best + 1]) / 2
    return left, cut, float(upper[best] - lower[best])
