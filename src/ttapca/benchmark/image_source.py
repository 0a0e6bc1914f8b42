"""The test images of a comparison, clean and corrupted, and the order in which they arrive.

| setting | the stream | adaptation forgets |
|---|---|---|
| `episodic` | one corruption, shuffled | after each batch |
| `online` | one corruption, shuffled | before each corruption |
| `correlated` | one corruption, sorted by class | before each corruption |
| `continual` | one corruption after the other, each shuffled | never |
| `mixed` | all corruptions at once, shuffled image by image | never |

A seed stands for one order of the test images, and all methods see the same one. Every corruption
of a continual stream comes in that order, so its first corruption is what `online` sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.adaptation.adapter import Forgetting
from ttapca.benchmark.cells import CLEAN, Setting
from ttapca.corruptions import SMALLEST_SIDE, corrupt, find, load_textures
from ttapca.corruptions.pixels import Pixels
from ttapca.datasets import Images, read_cifar_c
from ttapca.errors import DataFormatError, NotEnoughDataError

Condition = tuple[str, int]
"""A corruption and its severity."""

FORGETTING: dict[Setting, Forgetting] = {
    "episodic": "episodic",
    "online": "online",
    "correlated": "online",
    "continual": "continual",
    "mixed": "continual",
}
JOINT: tuple[Setting, ...] = ("continual", "mixed")
"""Settings whose corruptions share one adaptation, and are run in one go."""

TEXTURE_SIDE = 256
COLOURS = 3


@dataclass(eq=False)
class ImageSource:
    """The test images of a data set, clean and corrupted.

    Only the images that were asked for last are kept: a run goes through all methods for one
    corruption before it goes on to the next.

    Args:
        clean: The test images; all of them are used.
        folder: A folder of the CIFAR-C layout; None to make the corrupted images in memory.
        seed: Of the images that are made.
        textures: The folder with the photographs of frost.
        rows: Which of all test images the clean ones are; the first ones by default.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> source = ImageSource(read_digits()[:50])
        >>> source.images([("fog", 5), ("clean", 0)])
        Images(100 of 8x8x1, 10 classes)
        >>> source.name
        'generated, seed 0'
    """

    clean: Images
    folder: Path | None = None
    seed: int = 0
    textures: Path | None = None
    rows: NDArray[np.int64] | None = None
    _kept: tuple[tuple[Condition, ...], Images] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """What the key of a result says about it."""
        return f"generated, seed {self.seed}" if self.folder is None else self.folder.name

    def check(self, conditions: Sequence[Condition]) -> None:
        """Raise now what would stop a run in hours: photographs or files that are not there."""
        if self.folder is not None:
            for condition in conditions:
                self._read(self.folder, *condition)
        elif not self._small and any(
            corruption != CLEAN and find(corruption).needs_textures for corruption, _ in conditions
        ):
            load_textures(self.textures)

    def images(self, conditions: Sequence[Condition]) -> Images:
        """All images of the first condition, followed by all of the next.

        Raises:
            DataNotFoundError: There are no photographs of frost, or no such corruption.
            DataFormatError: The folder holds images of something else.
        """
        wanted = tuple(conditions)
        if self._kept is None or self._kept[0] != wanted:
            self._kept = None  # before the new ones are made: there may not be room for both
            parts = [self._condition(*condition) for condition in wanted]
            self._kept = (wanted, parts[0] if len(parts) == 1 else self._joined(parts))
        return self._kept[1]

    def _condition(self, corruption: str, severity: int) -> Images:
        if corruption == CLEAN:
            return self.clean
        if self.folder is not None:
            return self._read(self.folder, corruption, severity)
        clean, seed = self.clean.images, self.seed
        if self._small:
            pixels = _corrupt_small(clean, corruption, severity, seed)
        else:
            pixels = corrupt(clean, corruption, severity, seed, textures=self.textures)
        return Images(pixels, self.clean.labels, self.clean.class_names)

    @property
    def _small(self) -> bool:
        """Whether the images are too small for the corruptions, or have no colours."""
        height, width, channels = self.clean.images.shape[1:]
        return bool(min(height, width) < SMALLEST_SIDE or channels == 1)

    def _read(self, folder: Path, corruption: str, severity: int) -> Images:
        if corruption == CLEAN:
            return self.clean
        found = read_cifar_c(folder, corruption, severity, class_names=self.clean.class_names)
        count = len(self.clean)
        if len(found) < count:
            raise NotEnoughDataError(
                f"{folder} must hold the {count} test images that are asked for; it has "
                f"{len(found)} of `{corruption}` {severity}. Ask for fewer with `images`."
            )
        if self.rows is not None and len(found) > int(self.rows.max()):
            found = found.subset(self.rows)
        if not np.array_equal(found.labels[:count], self.clean.labels):
            raise DataFormatError(
                f"{folder} must hold the test images of the data set in its order; the labels of "
                f"`{corruption}` are others. Name the folder that belongs to the data set."
            )
        return found[:count]

    def _joined(self, parts: list[Images]) -> Images:
        return Images(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            self.clean.class_names,
        )


def segments(
    setting: Setting, labels: NDArray[np.int64], corruptions: int, seed: int
) -> list[NDArray[np.int64]]:
    """The stream of a setting, in segments; the data change where one segment ends.

    Args:
        setting: Which one.
        labels: Of the clean images; every corruption has the same.
        corruptions: How many there are; 1 unless the setting joins them.
        seed: Of the order.

    Returns:
        For each segment the numbers of its images in the order of their arrival. The images of the
        second corruption are numbered after those of the first, and so on.

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
    if setting == "correlated":  # classes in a random order, and the images of each class too
        place = random.permutation(int(labels.max()) + 1)
        order = order[np.argsort(place[labels[order]], kind="stable")]
    return [order + number * count for number in range(corruptions)]


def _corrupt_small(images: Pixels, corruption: str, severity: int, seed: int) -> Pixels:
    """Corrupt images that are smaller than 32 by 32, or grey.

    An image is mirrored at its edges until it is large enough, and grey becomes three equal
    colours. The large image is corrupted, its middle is cut out, and of grey images one colour is
    kept. So noise and blur are as strong, pixel for pixel, as on the images of CIFAR. Frost is
    drawn, not photographed: such images belong to no published benchmark, and need no download.
    """
    height, width, channels = images.shape[1:]
    above, left = (max(0, SMALLEST_SIDE - side + 1) // 2 for side in (height, width))
    large = np.pad(images, [(0, 0), (above, above), (left, left), (0, 0)], mode="symmetric")
    if channels == 1:
        large = np.repeat(large, COLOURS, axis=3)
    spoilt = corrupt(large, corruption, severity, seed, textures=_drawn_frost())
    middle = spoilt[:, above : above + height, left : left + width]
    return np.ascontiguousarray(middle[..., 1:2] if channels == 1 else middle)


def _drawn_frost() -> tuple[Pixels, ...]:
    """Six pale textures with the spectrum of clouds, and bright ridges as ice has."""
    return tuple(_ridges(np.random.default_rng(number)) for number in range(6))


def _ridges(random: np.random.Generator) -> Pixels:
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_SIDE)[:, None], np.fft.rfftfreq(TEXTURE_SIDE)[None])
    amplitude = 1 / np.maximum(frequency, 1 / TEXTURE_SIDE) ** 1.5
    noise = np.fft.rfft2(random.standard_normal((TEXTURE_SIDE, TEXTURE_SIDE))) * amplitude
    cloud = np.fft.irfft2(noise, s=(TEXTURE_SIDE, TEXTURE_SIDE))
    ridges = np.exp(-np.abs(cloud) / cloud.std())  # 1 where the cloud changes sign
    grey: Pixels = np.rint(60 + 195 * ridges).astype(np.uint8)
    return np.repeat(grey[..., None], COLOURS, axis=2)
