"""Orders of arrival: how a setting (`docs/bench.md`) shows the images, and when it forgets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ttapca.adaptation.adapter import Forgetting
from ttapca.benchmark.rows import CHANGE_EVERY, EPISODIC, JOINT, ROUNDS, SETTINGS, Setting
from ttapca.corruptions import SEVERITIES

FORGETTING: dict[Setting, Forgetting] = {
    setting: "episodic" if setting in EPISODIC else "continual" if setting in JOINT else "online"
    for setting in SETTINGS
}
SORTED = ("correlated", "episodic-sorted", "continual-correlated")
CONCENTRATIONS: dict[Setting, float] = {"dirichlet-0.1": 0.1, "dirichlet-1": 1.0}
MOST_STRETCHES = 100  # as in RoTTA's code


def segments(
    setting: Setting, labels: NDArray[np.int64], corruptions: int, seed: int
) -> list[NDArray[np.int64]]:
    """Return the order in which images arrive, in segments; adaptation may forget between them."""
    # `labels` are those of the clean images. A segment has numbers of images; those of the second
    # of the joined corruptions are numbered after those of the first, and so on. In `gradual`, all
    # severities of the first corruption come before those of the second.
    random = np.random.default_rng(seed)
    count = len(labels)
    if setting == "mixed":
        return [random.permutation(corruptions * count)]
    order = random.permutation(count)
    if setting in SORTED:  # classes in a random order, and the images of each class too
        place = random.permutation(int(labels.max()) + 1)
        order = order[np.argsort(place[labels[order]], kind="stable")]
    elif setting in CONCENTRATIONS:
        stretches = dirichlet_stretches(labels[order], CONCENTRATIONS[setting], random)
        order = order[np.concatenate(stretches)]
    elif setting in ("changing", "recurring"):  # a batch may hold the end of a corruption
        rounds = np.array_split(order, ROUNDS)
        if setting == "changing":
            rounds = np.split(order, range(CHANGE_EVERY, count, CHANGE_EVERY))
        return [np.concatenate([part + n * count for part in rounds for n in range(corruptions)])]
    elif setting == "drifting":  # each corruption comes while the one before goes, evenly
        condition = np.repeat(np.arange(corruptions), count)
        arrival = condition + random.triangular(-1, 0, 1, len(condition))
        return [np.argsort(arrival)]
    elif setting == "gradual":  # half of the images on the way up, the others on the way down
        first, second = np.array_split(order, 2)
        up = list(enumerate([first] * len(SEVERITIES)))
        both = [*up, *((at, second) for at, _ in reversed(up))]
        starts = range(0, corruptions, len(SEVERITIES))
        return [np.concatenate([part + (n + at) * count for n in starts for at, part in both])]
    return [order + number * count for number in range(corruptions)]


def dirichlet_stretches(
    labels: NDArray[np.int64], concentration: float, random: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Divide images into stretches of a stream, with classes that come and go."""
    # There are as many stretches as classes, but at most 100. Each class is distributed over them
    # in shares from a symmetric Dirichlet distribution; within a stretch, its classes come one
    # after another in a random order. This is the order of NOTE (Gong et al., 2022) as the code of
    # RoTTA (Yuan et al., 2023) makes it. A stretch has the places of its images in `labels`.
    classes, own = np.unique(labels, return_inverse=True)
    count = min(len(classes), MOST_STRETCHES)
    shares = random.dirichlet(np.full(count, concentration), len(classes))  # (classes, stretches)
    turns = np.tile(np.arange(len(classes)), (count, 1))
    turns = random.permuted(turns, axis=1)  # (stretches, classes): when each class has its turn
    stretch = np.empty_like(own)
    for number, share in enumerate(shares):
        images = np.flatnonzero(own == number)
        ends = np.floor(share.cumsum()[:-1] * len(images))  # of all stretches but the last
        stretch[images] = np.searchsorted(ends, np.arange(len(images)), side="right")
    order = np.lexsort((turns[stretch, own], stretch))  # by stretch, then by turn; it is stable
    return np.split(order, np.searchsorted(stretch[order], np.arange(1, count)))
