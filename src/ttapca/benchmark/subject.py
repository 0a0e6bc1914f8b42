"""What methods are compared on: the network, the filter, and the images in their order of arrival.

`docs/bench.md` has a table of the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca.adaptation.adapter import Forgetting
from ttapca.benchmark.cells import CHANGE_EVERY, CLEAN, Claim, Setting
from ttapca.benchmark.image_shelf import ImageShelf
from ttapca.benchmark.network_source import fingerprint
from ttapca.corruptions import CIFAR_C, default_table, load_textures
from ttapca.corruptions.apply import corrupt_any_size, needs_photographs
from ttapca.datasets import Choice, Images, Split, choose, load, read_cifar_c
from ttapca.errors import DataFormatError, EngineError, NotEnoughDataError, OptionError
from ttapca.fitting.fitted_filter import FittedFilter

Condition = tuple[str, int]  # a corruption and its severity

FORGETTING: dict[Setting, Forgetting] = {
    "episodic": "episodic",
    "episodic-sorted": "episodic",
    "online": "online",
    "correlated": "online",
    "dirichlet-0.1": "online",
    "dirichlet-1": "online",
    "continual": "continual",
    "changing": "continual",
    "mixed": "continual",
}
SORTED = ("correlated", "episodic-sorted")
CONCENTRATIONS: dict[Setting, float] = {"dirichlet-0.1": 0.1, "dirichlet-1": 1.0}
MOST_STRETCHES = 100  # as in RoTTA's code


@dataclass(eq=False)
class Subject:
    """What stays the same in a comparison.

    Attributes:
        name: The network's name as the user gave it.
        network: The network; after every run it is as it was before.
        data: The data set's name.
        source: The test images, clean and corrupted.
        fitted: The filter, with at least as many components as the plan asks for.
        filter_name: Tells the filter from others of the same layer and rank: the name of one that
            the user brought, or the route that was asked for; empty for the one that is fitted on
            the training images by the usual route.
        provided: Options of methods that are objects and not text: `{"ttt": {"head": head}}`.
        stated: What a `Cell` says about these options, by method.
        claims: What the names stand for, which a file of results compares with what it knows.
    """

    name: str
    network: nn.Module
    data: str
    source: ImageSource
    fitted: FittedFilter | None = None
    filter_name: str = ""
    provided: dict[str, dict[str, Any]] = field(default_factory=dict)
    stated: dict[str, dict[str, str]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    # The last test spectrum and the images it belongs to: methods in a row share it.
    spectrum: tuple[object, Tensor] | None = field(default=None, init=False, repr=False)

    @cached_property
    def weights(self) -> str:
        """The fingerprint, which tells this network from others of the same name."""
        return fingerprint(self.network)

    def filter(self, components: int) -> FittedFilter:
        """Return the filter with its first components.

        Raises:
            OptionError: There is no filter.
            NotEnoughDataError: It has fewer components.
        """
        if self.fitted is None:
            raise OptionError("This comparison needs a fitted filter; found none.")
        if components == self.fitted.n_components_:
            return self.fitted
        return self.fitted.truncated(components)


@dataclass(eq=False)
class ImageSource:
    """The test images of a data set, clean and corrupted.

    Only the images of the last request are kept: a run goes through all methods for one corruption
    before it starts the next.

    Args:
        clean: The test images; all of them are used.
        folder: A folder in the CIFAR-C layout; None to make the corrupted images in memory.
        seed: For making corrupted images.
        textures: The folder with the photographs of frost.
        rows: Which of all test images the clean ones are; the first ones by default.
        shelf: Where several processes share the images that they make.
        again: Reads the clean images on another machine, or raises if it has other images there.

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
    shelf: ImageShelf | None = None
    again: Callable[[], Images] | None = None
    _kept: tuple[tuple[Condition, ...], Images] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """Where corrupted images come from, as a `Cell` says it."""
        if self.folder is not None:
            return self.folder.name
        table = default_table(*self.clean.images.shape[1:3])
        with_table = "" if table == CIFAR_C else f" with {table}"
        return f"generated{with_table}, seed {self.seed}"

    @cached_property
    def fingerprint(self) -> str:
        """Tells the clean images from others of the same name."""
        return self.clean.fingerprint()

    def check(self, conditions: Sequence[Condition]) -> None:
        """Raise now what would stop a run hours later: missing photographs or files."""
        corrupted = [condition for condition in conditions if condition[0] != CLEAN]
        if self.folder is not None:
            for condition in corrupted:
                self._read(self.folder, *condition)
        elif any(needs_photographs(self.clean.images, name) for name, _ in corrupted):
            load_textures(self.textures)

    def images(self, conditions: Sequence[Condition]) -> Images:
        """Return all images of the first condition, followed by all of the next.

        Raises:
            DataNotFoundError: There are no photographs of frost, or no such corruption.
            DataFormatError: The folder holds images of something else.
        """
        wanted = tuple(conditions)
        if self._kept is None or self._kept[0] != wanted:
            self._kept = None  # before the new ones are made: there may not be room for both
            self._kept = (wanted, self._gathered(wanted))
        return self._kept[1]

    def _gathered(self, wanted: tuple[Condition, ...]) -> Images:
        stored = self.folder is not None or wanted[0][0] == CLEAN
        if len(wanted) == 1 and (stored or self.shelf is None):
            return self._condition(*wanted[0])

        def parts() -> Iterator[NDArray[np.uint8]]:
            return (self._condition(*condition).images for condition in wanted)

        if self.shelf is None:
            pixels = np.concatenate(list(parts()))
        else:
            pixels = self.shelf.get(repr(wanted), len(wanted) * len(self.clean), parts)
        labels = np.tile(self.clean.labels, len(wanted))
        return Images(pixels, labels, self.clean.class_names)

    def _condition(self, corruption: str, severity: int) -> Images:
        if corruption == CLEAN:
            return self.clean
        if self.folder is not None:
            return self._read(self.folder, corruption, severity)
        pixels = corrupt_any_size(
            self.clean.images, corruption, severity, self.seed, textures=self.textures
        )
        return Images(pixels, self.clean.labels, self.clean.class_names)

    def _read(self, folder: Path, corruption: str, severity: int) -> Images:
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
                f"{folder} must hold the test images of the data set in the same order; the labels "
                f"of `{corruption}` differ. Name the folder that belongs to the data set."
            )
        return found[:count]


def choose_measured(labels: NDArray[np.int64], count: int | None, split: Split) -> Choice:
    """Choose the images that are measured; a setting decides about their order.

    Of training images these are the last ones: methods that need source data get the first ones.
    """
    return choose(labels, count, order="stored", last=split == "train")


@dataclass(frozen=True)
class ImageRecipe:
    """How to read test images on another machine, under the same path.

    Attributes:
        data: The data set, by name or path.
        root: The folder of data sets.
        size: Side of the centre that is cut out of pictures.
        shorter_side: What the shorter side of a picture is brought to first.
        count: How many images; None for all.
        fingerprint: Of the images, as `Images.fingerprint` gives it.
        split: Which images of the data set; of those for training, the last ones.
    """

    data: str
    root: Path | None
    size: int | None
    shorter_side: int | None
    count: int | None
    fingerprint: str
    split: Split = "test"

    def __call__(self) -> Images:
        """Return the images.

        Raises:
            DataNotFoundError: There is no such data set.
            EngineError: There are other images in its place.
        """
        found = load(
            self.data, self.split, root=self.root, size=self.size, shorter_side=self.shorter_side
        )
        found = choose_measured(found.labels, self.count, self.split).of(found)
        if found.fingerprint() != self.fingerprint:
            raise EngineError(
                f"Every worker must have the same test images; here those of `{self.data}` are "
                "others. Copy the data, or put the results into a folder that all workers share."
            )
        return found


def segments(
    setting: Setting, labels: NDArray[np.int64], corruptions: int, seed: int
) -> list[NDArray[np.int64]]:
    """Return the order in which images arrive, in segments; adaptation may forget between them.

    Args:
        setting: How the images arrive.
        labels: Of the clean images; every corruption has the same.
        corruptions: How many there are; 1 unless the setting joins them.
        seed: For the order.

    Returns:
        For each segment the numbers of its images. The images of the second corruption are
        numbered after those of the first, and so on.

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
    if setting in SORTED:  # classes in a random order, and the images of each class too
        place = random.permutation(int(labels.max()) + 1)
        order = order[np.argsort(place[labels[order]], kind="stable")]
    elif setting in CONCENTRATIONS:
        stretches = dirichlet_stretches(labels[order], CONCENTRATIONS[setting], random)
        order = order[np.concatenate(stretches)]
    elif setting == "changing":  # one stream, so that a batch may hold the end of a corruption
        turns = np.split(order, range(CHANGE_EVERY, count, CHANGE_EVERY))
        return [np.concatenate([part + n * count for part in turns for n in range(corruptions)])]
    return [order + number * count for number in range(corruptions)]


def dirichlet_stretches(
    labels: NDArray[np.int64], concentration: float, random: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Divide images into stretches of a stream, with classes that come and go.

    There are as many stretches as classes, but at most 100. Each class is distributed over the
    stretches in shares from a symmetric Dirichlet distribution; within a stretch, its classes come
    one after another, in a random order. This is the order of NOTE (Gong et al., 2022) as the code
    of RoTTA (Yuan et al., 2023) makes it.

    Args:
        labels: Of the images; those of a class stay in the order that they have here.
        concentration: Of the distribution, for every stretch. The lower it is, the fewer stretches
            a class is found in.
        random: Draws the shares, and the order of the classes.

    Returns:
        For each stretch the places of its images in `labels`. It may be empty.

    Example:
        >>> labels = np.repeat([0, 1], 4)
        >>> parts = dirichlet_stretches(labels, 1.0, np.random.default_rng(0))
        >>> [labels[part].tolist() for part in parts]
        [[0, 1, 1, 1], [1, 0, 0, 0]]
    """
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
