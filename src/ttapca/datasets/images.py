"""Labelled images: the value that every reader gives, a choice among them, and their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Maybe, OneOf, Whole, check_option
from ttapca.errors import DataFormatError, OptionError, ShapeError

if TYPE_CHECKING:  # torch takes seconds to import; fetching and listing data do without it
    from torch import Tensor

Order = Literal["auto", "shuffled", "sorted", "stored"]
HASHED_AT_ONCE = 1000  # images, so that a strided view is copied in small parts


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Labelled images of one size, in memory or memory-mapped.

    Slices and batches are views of the same pixels: nothing is copied. The arrays of a reader may
    be read-only and strided; `numpy.ascontiguousarray` gives a plain copy.

    Attributes:
        images: Pixels, uint8, `(n, height, width, channels)`.
        labels: Class numbers, int64, `(n,)`.
        class_names: The name of each class; a label is an index into it.

    Raises:
        ShapeError: The arrays are not of these shapes or lengths.
        DataFormatError: The arrays are not of these types, or a label has no class.

    Example:
        >>> images = Images(np.zeros((10, 8, 8, 1), np.uint8), np.zeros(10, np.int64), ("cat",))
        >>> images
        Images(10 of 8x8x1, 1 classes)
        >>> np.shares_memory(images[2:5].images, images.images)
        True
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the rules that everything downstream relies on."""
        if self.images.ndim != 4:
            raise ShapeError(
                "Images must be an array of shape (n, height, width, channels); "
                f"found shape {self.images.shape}."
            )
        if self.images.dtype != np.uint8:
            raise DataFormatError(
                f"Images must be uint8, 0 to 255; found {self.images.dtype}. "
                "Convert floats in [0, 1] with (images * 255).round().astype('uint8')."
            )
        if self.labels.shape != (len(self.images),):
            raise ShapeError(
                f"There must be one label for each image, shape ({len(self.images)},); "
                f"found shape {self.labels.shape}."
            )
        if self.labels.dtype != np.int64:
            raise DataFormatError(
                f"Labels must be int64; found {self.labels.dtype}. Use labels.astype('int64')."
            )
        low, high = (int(self.labels.min()), int(self.labels.max())) if len(self) else (0, -1)
        if low < 0 or high >= len(self.class_names):
            raise DataFormatError(
                f"Labels must lie in 0 to {len(self.class_names) - 1}, one for each class name; "
                f"found {low} to {high}."
            )

    def __repr__(self) -> str:
        """Number, size and classes, without the arrays."""
        size = "x".join(map(str, self.images.shape[1:]))
        return f"Images({len(self)} of {size}, {len(self.class_names)} classes)"

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def __getitem__(self, rows: slice) -> Images:
        """A slice, without copying; an `OptionError` for any other index."""
        if not isinstance(rows, slice):
            raise OptionError(
                f"Images takes slices such as images[100:200]; found {type(rows).__name__}. "
                "Use images.images[i] for one array and images.subset(indices) for chosen images."
            )
        return Images(self.images[rows], self.labels[rows], self.class_names)

    def batches(self, size: int, *, drop_last: bool = False) -> Iterator[Images]:
        """Go through the images in order, without copying.

        Args:
            size: Images in a batch; the last batch may have fewer.
            drop_last: Leave a shorter last batch out.

        Example:
            >>> images = Images(np.zeros((5, 2, 2, 3), np.uint8), np.zeros(5, np.int64), ("a",))
            >>> [len(batch) for batch in images.batches(2)]
            [2, 2, 1]
            >>> [len(batch) for batch in images.batches(2, drop_last=True)]
            [2, 2]
        """
        check_option("size", size, Whole(1))
        stop = len(self) - len(self) % size if drop_last else len(self)
        return (self[start : start + size] for start in range(0, stop, size))

    def subset(self, indices: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> Images:
        """Choose images by number or by mask. This copies the pixels; a slice does not.

        Args:
            indices: Numbers of images, in any order and with repeats, or a mask with one truth
                value for each image.

        Raises:
            OptionError: A number is out of range, or the mask is of another length.

        Example:
            >>> images = Images(np.zeros((3, 2, 2, 1), np.uint8), np.arange(3), ("a", "b", "c"))
            >>> images.subset([2, 0]).labels.tolist()
            [2, 0]
        """
        chosen = np.asarray(indices)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iub":
            raise OptionError(
                "Images are chosen by a list of numbers or a mask; "
                f"found an array of {chosen.dtype} with shape {chosen.shape}."
            )
        try:
            return Images(self.images[chosen], self.labels[chosen], self.class_names)
        except IndexError as error:
            raise OptionError(f"No such image among {len(self)}: {error}.") from error

    def fingerprint(self) -> str:
        """The SHA-256 of pixels and labels, the same whatever file they were read from.

        It covers the pixels in `(n, height, width, channels)` order, then the labels as
        little-endian 64-bit integers.

        Example:
            >>> one = Images(np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 0]), ("a",))
            >>> one.fingerprint() == one[:].fingerprint()
            True
        """
        digest = hashlib.sha256()
        for batch in self.batches(HASHED_AT_ONCE):
            digest.update(np.ascontiguousarray(batch.images).data)
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def channel_means(self) -> tuple[float, ...]:
        """The mean of each channel, of pixels scaled to [0, 1], in whatever order the images are.

        Example:
            >>> white = Images(np.full((2, 1, 1, 3), 255, np.uint8), np.array([0, 0]), ("a",))
            >>> white.channel_means()
            (1.0, 1.0, 1.0)
        """
        count = self.images[..., 0].size
        sums = self.images.sum(axis=(0, 1, 2), dtype=np.int64)  # integers: no rounding at any size
        return tuple(float(total) / (count * 255) for total in sums)


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Copy pixels into a float32 tensor in [0, 1], as torchvision's `ToTensor` does.

    Args:
        images: Pixels, uint8, `(batch, height, width, channels)`.

    Returns:
        A tensor `(batch, channels, height, width)`.

    Raises:
        ShapeError: `images` does not have four axes.

    Example:
        >>> to_tensor(np.full((1, 2, 2, 3), 255, np.uint8)).shape
        torch.Size([1, 3, 2, 2])
    """
    import torch

    if images.ndim != 4:
        raise ShapeError(
            f"Pixels must have shape (batch, height, width, channels); found {images.shape}. "
            "Give one image as image[None]."
        )
    # `astype` always copies, so a read-only memory map never becomes a writable tensor.
    planes = images.transpose(0, 3, 1, 2).astype(np.float32, order="C")
    return torch.from_numpy(planes).div_(255)


@dataclass(frozen=True, eq=False)
class TensorBatches:
    """A loader: pairs of image and label tensors, in order, as often as you iterate.

    Args:
        data: Where the images come from; only one batch at a time is copied.
        size: Images in a batch; the last batch may have fewer.
        order: Numbers of the images to give, in that order; by default all of them as they lie.

    Example:
        >>> data = Images(np.zeros((5, 2, 2, 3), np.uint8), np.zeros(5, np.int64), ("a",))
        >>> [tuple(pixels.shape) for pixels, labels in TensorBatches(data, 4)]
        [(4, 3, 2, 2), (1, 3, 2, 2)]
    """

    data: Images
    size: int
    order: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Refuse a size that gives no batch."""
        check_option("size", self.size, Whole(1))

    def __len__(self) -> int:
        """The number of batches."""
        return -(-len(self.data if self.order is None else self.order) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs `(batch, channels, height, width)` in [0, 1] and `(batch,)`."""
        import torch

        for start in range(0, len(self) * self.size, self.size):
            rows = slice(start, start + self.size)
            batch = self.data[rows] if self.order is None else self.data.subset(self.order[rows])
            yield to_tensor(batch.images), torch.from_numpy(batch.labels.copy())


@dataclass(frozen=True, eq=False)
class Choice:
    """Which images were chosen, and how.

    Attributes:
        rows: Their numbers, in the order in which they come, shape (chosen,).
        total: How many images there were to choose from.
        per_class: How many are of each class, for people; empty where the first ones were taken.
        arrangement: What their order is, for people.

    Example:
        >>> print(choose(np.array([0, 0, 0, 1, 1, 1]), 4, order="sorted"))
        4 of 6 images, 2 of each class, class by class
    """

    rows: NDArray[np.int64]
    total: int
    per_class: str
    arrangement: str

    @property
    def first(self) -> bool:
        """Whether they are the first ones, as they lie."""
        return np.array_equal(self.rows, np.arange(len(self.rows)))

    @property
    def drawn(self) -> bool:
        """Whether they were drawn at random from a larger number."""
        return len(self.rows) < self.total and bool(self.per_class)

    @property
    def selection(self) -> str:
        """Which ones they are, for people."""
        count = f"{len(self.rows):,}"
        if len(self.rows) == self.total:
            return f"all {count} images"
        if self.per_class:
            return f"{count} of {self.total:,} images, {self.per_class}"
        return f"the first {count} of {self.total:,} images"

    def __str__(self) -> str:
        """One line for a person."""
        return f"{self.selection}, {self.arrangement}"

    def of(self, images: Images) -> Images:
        """The chosen images: a view if they are the first ones, a copy otherwise."""
        return images[: len(self.rows)] if self.first else images.subset(self.rows)


def choose(
    labels: NDArray[np.int64], limit: int | None = None, *, order: Order = "auto", seed: int = 0
) -> Choice:
    """Choose which images to use, and in which order.

    A folder of pictures is read class by class. A method that learns from its batches would then
    see one class at a time, which is another problem. So images that lie class by class are drawn
    at random, as many of each class, and shuffled. Images whose classes are mixed already, as those
    of CIFAR are, stay as they lie, and a limit takes the first ones: published numbers can be
    reproduced. Images of a single class are drawn at random too, as nothing tells how they lie.

    Args:
        labels: Of all images, shape (n,).
        limit: How many to choose at most; all by default.
        order: `auto` does as said above; `shuffled` always draws and shuffles; `sorted` goes class
            by class; `stored` takes the images of `auto` as they lie.
        seed: Of drawing and shuffling.

    Raises:
        OptionError: An option makes no sense.

    Example:
        >>> by_class = np.repeat(np.arange(10), 500)
        >>> choice = choose(by_class, 700)
        >>> print(choice)
        700 of 5,000 images, 70 of each class, shuffled with seed 0
        >>> np.bincount(by_class[choice.rows]).tolist()
        [70, 70, 70, 70, 70, 70, 70, 70, 70, 70]
        >>> print(choose(np.tile(np.arange(10), 500), 700))
        the first 700 of 5,000 images, as they lie
    """
    check_option("limit", limit, Maybe(Whole(1)))
    check_option("order", order, OneOf(get_args(Order)))
    check_option("seed", seed, Whole(0))
    random = np.random.default_rng(seed)
    drawn = order == "shuffled" or lies_by_class(labels)
    count = len(labels) if limit is None else min(limit, len(labels))
    rows = np.arange(count)
    if drawn and count < len(labels):
        rows = np.sort(_drawn_evenly(labels, count, random))
    per_class = _per_class(labels, rows) if drawn else ""
    if order == "sorted":
        rows = rows[np.argsort(labels[rows], kind="stable")]
        return Choice(rows, len(labels), per_class, "class by class")
    if drawn and order != "stored":
        rows = random.permutation(rows)
        return Choice(rows, len(labels), per_class, f"shuffled with seed {seed}")
    return Choice(rows, len(labels), per_class, "as they lie")


def lies_by_class(labels: NDArray[np.int64]) -> bool:
    """Whether images of one class lie together, as in a folder of pictures.

    They do if the class changes from one image to the next less than half as often as by chance.
    """
    if len(labels) < 2:
        return False
    shares = np.bincount(labels) / len(labels)
    by_chance = (len(labels) - 1) * (1 - float(np.square(shares).sum()))
    return bool(np.count_nonzero(np.diff(labels)) <= by_chance / 2)


def _drawn_evenly(
    labels: NDArray[np.int64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Numbers of random images: one of each class in turn, until there are enough."""
    shuffled = random.permutation(len(labels))
    by_class = np.argsort(labels[shuffled], kind="stable")
    sorted_labels = labels[shuffled][by_class]
    turn = np.empty_like(by_class)
    turn[by_class] = np.arange(len(labels)) - np.searchsorted(sorted_labels, sorted_labels)
    drawn: NDArray[np.int64] = shuffled[np.argsort(turn, kind="stable")][:count]
    return drawn


def _per_class(labels: NDArray[np.int64], rows: NDArray[np.int64]) -> str:
    classes = np.unique(labels)
    if len(classes) < 2:
        return "drawn at random"
    counts = np.bincount(labels[rows], minlength=int(classes.max()) + 1)[classes]
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,} of each class" if low == high else f"{low:,} to {high:,} of each class"
