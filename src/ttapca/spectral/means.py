"""How far the mean of test data has surely moved, whatever classes they hold.

Fog and loss of contrast move the mean of an image's components. So does a batch of one class, which
must be left alone. Two things tell them apart: `fit` measures how far the mean of a class lies from
the mean of all, compared with the variance within classes; and a class varies around its mean,
while fog and low contrast leave little variance around the new one.

With m the mean of a component in n samples, and v their variance around it, both in units of the
source's deviation and variance, the part of m that counts is, after James and Stein,

    m max(0, 1 - (reach v + chance max(v, 1) / n) / m^2)

The first term is how far a class may lie. The second is what chance is granted, in squares of the
deviation that a mean of n samples has. Few samples do not tell v, so the source's variance
counts for `prior` samples in it; and of what is left, the share (n - 1) / n counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants


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
    # Where few samples make a class look as far as all variance, something within must be left.
    within = (variances - shares @ squares).clamp(min=variances / 64)
    return squares.amax(0) / within


def allowed_reach(reach: Tensor | None, like: Tensor, constants: Constants = CONSTANTS) -> Tensor:
    """Return how far a mean may lie before it counts, shape of `like`; see the module.

    Example:
        >>> allowed_reach(torch.tensor([9.0, 0.0]), torch.ones(2)).tolist()
        [4.5, 0.25]
    """
    if reach is None:  # nobody knows the classes
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
        square: Squared distance of the mean over source variance, any shape.
        energy: Mean squared distance of samples from the source's mean, over source variance.
        reach: See `allowed_reach`.
        samples: How many there are; of any shape that fits the others, as everything here is.
        independent: How many of them say something new; fewer where they resemble each other.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> far = torch.tensor(25.0)
        >>> sure_share(far, far + 1, torch.tensor(0.25), 100, 100).item() > 0.9
        True
        >>> sure_share(far, far + 1, torch.tensor(0.25), 1, 1).item()  # one image has no mean
        0.0
    """
    # In place where it can be: a large image has as many components as numbers.
    own = samples * (energy - square).clamp_(min=0)
    own = own.add_(constants.prior) / (samples + constants.prior)
    bound = reach * own
    bound = bound + own.clamp_(min=1).mul_(constants.chance) / independent
    sure = bound.div_(square.clamp(min=torch.finfo(square.dtype).tiny)).neg_().add_(1).clamp_(min=0)
    others = torch.as_tensor(independent - 1, dtype=square.dtype).clamp(min=0)
    return sure * (others / (others + 1))
