"""In which order images arrive: the five settings.

| setting | the stream | adaptation forgets |
|---|---|---|
| `episodic` | one corruption, shuffled | after each batch |
| `online` | one corruption, shuffled | before each corruption |
| `correlated` | one corruption, sorted by class | before each corruption |
| `continual` | one corruption after the other, each shuffled | never |
| `mixed` | all corruptions at once, shuffled image by image | never |

A seed stands for one order of the test images. All methods see the same one, and every corruption
of a continual stream comes in it; so its first corruption is what `online` sees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ttapca.adaptation.adapter import Forgetting
from ttapca.benchmark.cells import Setting

JOINT: tuple[Setting, ...] = ("continual", "mixed")
"""Settings whose corruptions share one adaptation: one unit of work, one row a corruption."""

FORGETTING: dict[Setting, Forgetting] = {
    "episodic": "episodic",
    "online": "online",
    "correlated": "online",
    "continual": "continual",
    "mixed": "continual",
}


def segments(
    setting: Setting, labels: NDArray[np.int64], corruptions: int, seed: int
) -> list[NDArray[np.int64]]:
    """The stream of a setting, in segments: the data change where one ends.

    Args:
        setting: Which one.
        labels: Of the clean images; every corruption has the same.
        corruptions: How many there are; 1 unless the setting joins them.
        seed: Of the order.

    Returns:
        For each segment the numbers of its images, in the order of their arrival, among those of
        all corruptions: the images of the second corruption follow those of the first.

    Example:
        >>> labels = np.array([0, 1, 0, 1])
        >>> labels[segments("correlated", labels, 1, seed=0)[0]]
        array([1, 1, 0, 0])
        >>> [sorted(part.tolist()) for part in segments("continual", labels, 2, seed=0)]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    random = np.random.default_rng(seed)
    count = len(labels)
    if setting == "mixed":
        return [random.permutation(corruptions * count)]
    order = random.permutation(count)
    if setting == "correlated":
        # One run a class: classes in a random order, the images of a class too.
        place = random.permutation(int(labels.max()) + 1)
        order = order[np.argsort(place[labels[order]], kind="stable")]
    return [order + number * count for number in range(corruptions)]
