"""Labelled images, a choice among them, and their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

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
    """Labelled images of one size, in memory or memory-mapped; slices and batches are views.

    A reader may give arrays that are read-only and strided; `numpy.ascontiguousarray` makes a plain
    copy.

    Attributes:
        images: Pixels, uint8, `(n, height, width, channels)`.
        labels: Class numbers, int64, `(n,)`.
        class_names: The name of each class; a label is an index into it.

    Example:
        >>> images = Images(np.zeros((3, 8, 8, 1), np.uint8), np.arange(3), ("a", "b", "c"))
        >>> images[1:]
        Images(2 of 8x8x1, 3 classes)
        >>> [len(batch) for batch in images.batches(2)]
        [2, 1]
        >>> images.subset([2, 0]).labels.tolist()
        [2, 0]
        >>> images.channel_means()
        (0.0,)
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check shapes, types and labels."""
        self._check_array()
        if self.labels.shape != (len(self.images),):
            raise ShapeError(
                f"There must be one label for each sample, shape ({len(self.images)},); "
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

    def _check_array(self) -> None:
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

    def __repr__(self) -> str:
        """Return number, size and classes, without the arrays."""
        size = "x".join(map(str, self.images.shape[1:]))
        return f"{type(self).__name__}({len(self)} of {size}, {len(self.class_names)} classes)"

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, rows: slice) -> Images:
        """Return a slice without copying; raise `OptionError` for any other index."""
        if not isinstance(rows, slice):
            raise OptionError(
                f"Images takes slices such as images[100:200]; found {type(rows).__name__}. "
                "Use images.images[i] for one array and images.subset(indices) for chosen images."
            )
        return replace(self, images=self.images[rows], labels=self.labels[rows])

    def batches(self, size: int) -> Iterator[Images]:
        """Yield batches in order, without copying; the last one may have fewer images."""
        check_option("size", size, Whole(1))
        return (self[start : start + size] for start in range(0, len(self), size))

    def subset(self, indices: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> Images:
        """Copy chosen images: rows in any order and with repeats, or a mask."""
        chosen = np.asarray(indices) if len(indices) else np.empty(0, np.int64)
        try:
            return replace(self, images=self.images[chosen], labels=self.labels[chosen])
        except (IndexError, ShapeError) as error:
            raise OptionError(
                f"Images are chosen by a row of numbers or a mask, among {len(self)}: {error}."
            ) from error

    def fingerprint(self) -> str:
        """Return the SHA-256 of pixels and labels, whatever the file and the strides."""
        digest = hashlib.sha256()
        for batch in self.batches(HASHED_AT_ONCE):
            digest.update(np.ascontiguousarray(batch.images).data)
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def channel_means(self) -> tuple[float, ...]:
        """Return the mean of each channel, for pixels in [0, 1]; the order does not matter."""
        count = self.images[..., 0].size
        sums = self.images.sum(axis=(0, 1, 2), dtype=np.int64)  # integers: no rounding at any size
        return tuple(float(total) / (count * 255) for total in sums)


@dataclass(frozen=True, eq=False, repr=False)
class Series(Images):
    """Labelled time series of one length, which a comparison takes in the place of images.

    Its `images` are the series: floats, `(n, channels, length)`.

    Example:
        >>> Series(np.zeros((3, 2, 50), np.float32), np.array([0, 1, 1]), ("walks", "runs"))
        Series(3 of 2x50, 2 classes)
    """

    images: NDArray[Any]

    def _check_array(self) -> None:
        check_series(self.images)


def check_series(series: object, channels: int | None = None) -> None:
    """Raise an error unless these are finite floats of shape (samples, channels, length)."""
    if not isinstance(series, np.ndarray) or series.dtype.kind != "f":
        found = getattr(series, "dtype", type(series).__name__)
        raise DataFormatError(
            f"Series must be a numpy array of floats; found {found}. Use np.asarray(series, float)."
        )
    if series.ndim != 3 or channels not in (None, series.shape[1]):
        raise ShapeError(
            f"Series must have shape (samples, {channels or 'channels'}, length); found "
            f"{series.shape}. Add an axis for one channel; cut or pad series to one length."
        )
    if not np.isfinite(series).all():
        raise DataFormatError("Series must be finite; found NaN or infinity. Fill in values first.")


def to_tensor(images: NDArray[Any]) -> Tensor:
    """Copy pixels into a float32 tensor in [0, 1], as torchvision's `ToTensor` does.

    uint8 `(batch, height, width, channels)` becomes `(batch, channels, height, width)`. Series
    keep shape and values.

    Example:
        >>> to_tensor(np.full((1, 2, 2, 3), 255, np.uint8)).shape
        torch.Size([1, 3, 2, 2])
    """
    import torch

    if images.ndim == 3 and images.dtype.kind == "f":
        return torch.from_numpy(images.astype(np.float32))
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
    """A loader that yields pairs of image and label tensors, as often as you iterate.

    Args:
        data: The images; only one batch at a time is copied.
        size: Images per batch; the last batch may have fewer.
        order: Rows of the images to yield; by default all of them, as stored.

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

    @property
    def dataset(self) -> Sized:
        """The images or their rows; PyTorch's own loaders have an attribute of this name."""
        return self.data if self.order is None else self.order

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.dataset) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pixels `(batch, channels, height, width)` in [0, 1], and labels `(batch,)`."""
        import torch

        for start in range(0, len(self) * self.size, self.size):
            rows = slice(start, start + self.size)
            batch = self.data[rows] if self.order is None else self.data.subset(self.order[rows])
            yield to_tensor(batch.images), torch.from_numpy(batch.labels.copy())


@dataclass(frozen=True, eq=False)
class Choice:
    """Which images were chosen, and how.

    Attributes:
        rows: The chosen rows, in the order to use them, shape (chosen,).
        total: How many images there were to choose from.
        per_class: How many of each class, in words; empty if the first ones were taken.
        arrangement: The order, in words.

    Example:
        >>> print(choose(np.array([0, 0, 0, 1, 1, 1]), 4, order="sorted"))
        4 of 6 samples, 2 of each class, class by class
    """

    rows: NDArray[np.int64]
    total: int
    per_class: str
    arrangement: str

    @property
    def first(self) -> bool:
        """Whether these are the first images, in stored order."""
        return np.array_equal(self.rows, np.arange(len(self.rows)))

    @property
    def drawn(self) -> bool:
        """Whether these were drawn at random from a larger number."""
        return len(self.rows) < self.total and bool(self.per_class)

    @property
    def selection(self) -> str:
        """Which images these are, in words."""
        if len(self.rows) == self.total:
            return f"all {self.total:,} samples"
        words = f"{len(self.rows):,} of {self.total:,} samples"
        if self.per_class:
            return f"{words}, {self.per_class}"
        return f"the {'first' if 0 in self.rows else 'last'} {words}"

    def __str__(self) -> str:
        """Return selection and order in one line."""
        return f"{self.selection}, {self.arrangement}"

    def of(self, images: Images) -> Images:
        """Return the chosen images: a view if they are the first ones, otherwise a copy."""
        return images[: len(self.rows)] if self.first else images.subset(self.rows)


def choose(
    labels: NDArray[np.int64],
    limit: int | None = None,
    *,
    order: Order = "auto",
    seed: int = 0,
    last: bool = False,
) -> Choice:
    """Choose which images to use, and in which order.

    Images that are stored class by class are drawn at random, equally many of each class, and
    shuffled: a method that learns from its batches would see one class at a time. Images whose
    classes are mixed already, such as CIFAR's, keep their order, and a limit takes the first ones,
    which reproduces published numbers.

    Args:
        labels: The labels of all images, shape (n,).
        limit: How many to choose at most; all by default.
        order: `auto` as above; `shuffled` always draws and shuffles; `sorted` goes class by class;
            `stored` takes the images of `auto` in their stored order.
        seed: The seed for drawing and shuffling.
        last: Whether to choose from the end, and to draw others.

    Example:
        >>> by_class = np.repeat(np.arange(10), 500)
        >>> print(choose(by_class, 700))
        700 of 5,000 samples, 70 of each class, shuffled with seed 0
        >>> print(choose(np.tile(np.arange(10), 500), 700))
        the first 700 of 5,000 samples, in stored order
    """
    if last:
        mirrored = choose(labels[::-1], limit, order=order, seed=seed)
        rows = len(labels) - 1 - mirrored.rows
        return replace(mirrored, rows=np.sort(rows) if order == "stored" else rows)
    check_option("limit", limit, Maybe(Whole(1)))
    check_option("order", order, OneOf(get_args(Order)))
    check_option("seed", seed, Whole(0))
    random = np.random.default_rng(seed)
    drawn = order == "shuffled" or lies_by_class(labels)
    count = len(labels) if limit is None else min(limit, len(labels))
    rows = np.arange(count)
    if drawn and count < len(labels):
        rows = np.sort(_draw_evenly(labels, count, random))
    per_class = _per_class(labels, rows) if drawn else ""
    arrangement = "in stored order"
    if order == "sorted":
        rows = rows[np.argsort(labels[rows], kind="stable")]
        arrangement = "class by class"
    elif drawn and order != "stored":
        rows = random.permutation(rows)
        arrangement = f"shuffled with seed {seed}"
    return Choice(rows, len(labels), per_class, arrangement)


def lies_by_class(labels: NDArray[np.int64]) -> bool:
    """Return whether the class changes between neighbours less than half as often as by chance."""
    if len(labels) < 2:
        return False
    shares = np.bincount(labels) / len(labels)
    by_chance = (len(labels) - 1) * (1 - float(np.square(shares).sum()))
    return bool(np.count_nonzero(np.diff(labels)) <= by_chance / 2)


def _draw_evenly(
    labels: NDArray[np.int64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Draw random rows: one of each class in turn, until there are enough."""
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
