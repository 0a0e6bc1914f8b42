"""Which part of a difference from the source is surely a shift, and the gain that follows from it.

**Variances.** With r = s / t, the variance of a component in the source over that of now, gains are

    Wiener      min(r, 1)                        the optimal linear estimate under additive noise
    matching    sqrt(r)                          gives back the variance of the source
    two-sided   min(r, 1)^a clip(r, 1, limit)^b  Wiener is (1, 0), matching (1/2, 1/2)

**White noise.** The last components of natural images have hardly any variance. White noise has the
same in all, so there it stands out a hundredfold even in a single image, whatever the image shows.
In the bands in the middle, noise and detail are equally strong, and a single image does not tell
which it has. But the level of the noise is known from the end of the spectrum, and with it its
share everywhere.

**Means.** Fog and loss of contrast move the mean of an image's components. So does a batch of one
class, which must be left alone. Two things tell them apart: `fit` measures how far the mean of a
class lies from the mean of all, compared with the variance within classes; and a class varies
around its mean, while fog and low contrast leave little variance around the new one.

With m the mean of a component in n samples, and v their variance around it, both in units of the
source's deviation and variance, the part of m that counts is, after James and Stein,

    m max(0, 1 - (reach v + chance max(v, 1) / n) / m^2)

The first term is how far a class may lie. The second is the allowance for chance, in squares of the
deviation that a mean of n samples has. Few samples do not tell v, so the source's variance counts
for `prior` samples in it; and of the remainder, the share (n - 1) / n counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants


def two_sided_gain(
    log_ratio: Tensor,
    *,
    shrink: float = 1.0,
    restore: Tensor | float = 0.0,
    largest_ratio: float = 64.0,
) -> Tensor:
    """Return the gains min(r, 1)^shrink clip(r, 1, largest_ratio)^restore, given log r.

    Example:
        >>> gains = two_sided_gain(torch.tensor([0.25, 1.0, 4.0]).log(), restore=0.5)
        >>> [round(gain, 4) for gain in gains.tolist()]
        [0.25, 1.0, 2.0]
    """
    shrunk = shrink * log_ratio.clamp(max=0.0)
    restored = restore * log_ratio.clamp(0.0, math.log(largest_ratio))
    return shrunk.add_(restored).exp_()


def with_white_noise(
    excess: Tensor,
    log_energy: Tensor,
    noise: Tensor,
    samples: Tensor | float = 1.0,
    constants: Constants = CONSTANTS,
) -> Tensor:
    """Return by how much log energies exceed those of the source, counting noise in every band.

    The energy by which the last band exceeds the range of source batches gives a level of white
    noise. It is a lower bound, since energy within the range does not count, and no band may have
    more noise than energy: noise that is not white does not count either. If noise makes up the
    share q of a band's energy, that band exceeds its own signal by -log(1 - q), whether or not this
    shows in the band itself.

    Args:
        excess: By how much log energies are outside the range of source batches, with sign, shape
            (..., bands).
        log_energy: Logarithm of the energies, shape (..., bands).
        noise: Energy of white noise of variance 1, shape (bands,).
        samples: Number of images behind the energies, shape (...). All of the noise counts for one
            image, and evenly less for more of them: beyond `prior`, each band shows its own noise.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> noise = torch.tensor([1.0, 100.0, 1000.0])
        >>> energy = 1 + 0.5 * noise
        >>> usual = torch.tensor([2.0, 1.0, 1.0])  # the end of the range
        >>> found = (energy / usual).log().clamp(min=0)
        >>> [round(value, 2) for value in with_white_noise(found, energy.log(), noise).tolist()]
        [0.4, 3.93, 6.22]
    """
    fading = (torch.as_tensor(samples, dtype=excess.dtype) - 1) / constants.prior
    if not torch.compiler.is_exporting() and bool((fading >= 1).all()):
        return excess
    energy = log_energy.exp()
    surplus = -energy * torch.expm1(-excess.clamp(min=0))
    least = (energy / noise).amin(-1, keepdim=True)
    # No band exceeds its own signal by more than ratios are believed.
    most = (1 - 1 / constants.largest_ratio) * least
    level = torch.minimum((surplus / noise)[..., -1:], most)
    share = level * noise / energy
    more = (-torch.log1p(-share) - excess).clamp(min=0) * (share > 0)
    return excess + more * (1 - fading.clamp(0, 1))[..., None]


def class_reach(class_means: Tensor, shares: Tensor, variances: Tensor) -> Tensor:
    """Return how far the mean of the farthest class lies, in squared deviations within classes.

    Args:
        class_means: Mean of each component in each class, from the mean of all, shape (classes,
            components).
        shares: Share of each class, shape (classes,).
        variances: Variance of the components over all classes, shape (components,).

    Example:
        >>> means = torch.tensor([[3.0], [-3.0]])
        >>> class_reach(means, torch.tensor([0.5, 0.5]), torch.tensor([10.0])).tolist()
        [9.0]
    """
    squares = class_means.square()
    # If few samples make a class look as far as all variance, something within must be left.
    within = (variances - shares @ squares).clamp(min=variances / 64)
    return squares.amax(0) / within


def allowed_reach(reach: Tensor | None, like: Tensor, constants: Constants = CONSTANTS) -> Tensor:
    """Return how far a mean may lie before it counts, shape of `like`; see the module.

    Example:
        >>> allowed_reach(torch.tensor([9.0, 0.0]), torch.ones(2)).tolist()
        [4.5, 0.25]
    """
    if reach is None:  # the classes are not known
        return torch.full_like(like, constants.chance)
    return (constants.farthest_class * reach.to(like)).clamp(min=constants.smallest_reach)


def sure_share(
    square: Tensor,
    energy: Tensor,
    reach: Tensor,
    samples: Tensor | float,
    independent: Tensor | float,
    constants: Constants = CONSTANTS,
) -> Tensor:
    """Return which part of a mean's distance from the source's is surely a shift, from 0 to 1.

    Args:
        square: Squared distance of the mean over source variance; all shapes must broadcast.
        energy: Mean squared distance of samples from the source's mean, over source variance.
        reach: See `allowed_reach`.
        samples: Number of samples.
        independent: Number of independent ones; fewer if samples resemble each other.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> far = torch.tensor(25.0)
        >>> sure_share(far, far + 1, torch.tensor(0.25), 100, 100).item() > 0.9
        True
        >>> sure_share(far, far + 1, torch.tensor(0.25), 1, 1).item()  # one image has no mean
        0.0
    """
    # In place if possible: a large image has as many components as numbers.
    own = samples * (energy - square).clamp_(min=0)
    own = own.add_(constants.prior) / (samples + constants.prior)
    bound = reach * own
    bound = bound + own.clamp_(min=1).mul_(constants.chance) / independent
    sure = bound.div_(square.clamp(min=torch.finfo(square.dtype).tiny)).neg_().add_(1).clamp_(min=0)
    others = torch.as_tensor(independent - 1, dtype=square.dtype).clamp(min=0)
    return sure * (others / (others + 1))
