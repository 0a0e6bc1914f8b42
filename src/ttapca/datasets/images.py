"""`Images`: the one value that every reader gives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttapca.errors import DataFormatError, OptionError, ShapeError

FINGERPRINT_CHUNK = 1000  # images hashed at a time, so that a strided view is copied in small parts
MAX_CLASSES = 1_000_000  # a higher label is damage, and not worth a list of names


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Labelled images of one size, in memory or memory-mapped.

    Slices and batches are views of the same pixels: nothing is copied until you do. The arrays of a
    reader may be read-only and strided; `numpy.ascontiguousarray` gives a plain copy.

    Attributes:
        images: Pixels, uint8, `(n, height, width, channels)`.
        labels: Class numbers, int64, `(n,)`.
        class_names: One name a class; a label is an index into it.

    Raises:
        ShapeError: The arrays are not of these shapes or lengths.
        DataFormatError: The arrays are not of these types, or a label has no class.

    Example:
        >>> import numpy as np
        >>> images = Images(np.zeros((10, 8, 8, 1), np.uint8), np.zeros(10, np.int64), ("cat",))
        >>> images
        Images(10 of 8x8x1, 1 classes)
        >>> [len(batch) for batch in images.batches(4)]
        [4, 4, 2]
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
                f"There must be one label an image, shape ({len(self.images)},); "
                f"found shape {self.labels.shape}."
            )
        if self.labels.dtype != np.int64:
            raise DataFormatError(
                f"Labels must be int64; found {self.labels.dtype}. Use labels.astype('int64')."
            )
        self._check_label_range()

    def _check_label_range(self) -> None:
        if not len(self.labels):
            return
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.class_names):
            raise DataFormatError(
                f"Labels must lie in 0 to {len(self.class_names) - 1}, one for each class name; "
                f"found {low} to {high}."
            )

    def __repr__(self) -> str:
        """The size at a glance; arrays of thousands of images are no reading."""
        height, width, channels = self.images.shape[1:]
        return (
            f"Images({len(self)} of {height}x{width}x{channels}, {len(self.class_names)} classes)"
        )

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def __getitem__(self, rows: slice) -> Images:
        """A slice, without copying.

        Raises:
            OptionError: `rows` is not a slice.
        """
        if not isinstance(rows, slice):
            raise OptionError(
                f"Images takes slices such as images[100:200]; found {type(rows).__name__}. "
                "Use images.images[i] for one array and images.subset(indices) for chosen images."
            )
        return Images(self.images[rows], self.labels[rows], self.class_names)

    def batches(self, size: int, *, drop_last: bool = False) -> Iterator[Images]:
        """Go through the images in order, without copying.

        Args:
            size: Images a batch; the last batch may have fewer.
            drop_last: Leave a shorter last batch out.

        Yields:
            Views of `size` images.

        Raises:
            OptionError: `size` is not positive.

        Example:
            >>> import numpy as np
            >>> images = Images(np.zeros((5, 2, 2, 3), np.uint8), np.zeros(5, np.int64), ("a",))
            >>> [len(batch) for batch in images.batches(2, drop_last=True)]
            [2, 2]
        """
        if size < 1:
            raise OptionError(f"A batch must hold at least 1 image; found size={size}.")
        return self._batches(size, drop_last)

    def _batches(self, size: int, drop_last: bool) -> Iterator[Images]:
        stop = len(self) - len(self) % size if drop_last else len(self)
        for start in range(0, stop, size):
            yield self[start : start + size]

    def subset(self, indices: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> Images:
        """Choose images by number or by mask. This copies the pixels; a slice does not.

        Args:
            indices: Numbers of images, in any order and with repeats, or one truth value an image.

        Returns:
            A copy of the chosen images, in the order of `indices`.

        Raises:
            OptionError: A number is out of range, or the mask is of another length.

        Example:
            >>> import numpy as np
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

        Returns:
            A hexadecimal digest of the pixels in `(n, height, width, channels)` order, followed by
            the labels as little-endian 64-bit integers.

        Example:
            >>> import numpy as np
            >>> one = Images(np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 0]), ("a",))
            >>> one.fingerprint() == one[:].fingerprint()
            True
        """
        digest = hashlib.sha256()
        for batch in self.batches(FINGERPRINT_CHUNK):
            digest.update(np.ascontiguousarray(batch.images).data)
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def channel_means(self) -> tuple[float, ...]:
        """The mean of each channel, of pixels scaled to [0, 1]: free of the order of the images.

        Returns:
            One exact mean a channel.

        Example:
            >>> import numpy as np
            >>> white = Images(np.full((2, 1, 1, 3), 255, np.uint8), np.array([0, 0]), ("a",))
            >>> white.channel_means()
            (1.0, 1.0, 1.0)
        """
        count = self.images[..., 0].size
        sums = self.images.sum(axis=(0, 1, 2), dtype=np.int64)  # integers: no rounding at any size
        return tuple(float(total) / (count * 255) for total in sums)


def numbered_classes(labels: NDArray[np.integer]) -> tuple[str, ...]:
    """Names `0` to the highest label, for files that carry none.

    Args:
        labels: Class numbers.

    Returns:
        One name a class.

    Raises:
        DataFormatError: A label is so high that it cannot be meant as one.

    Example:
        >>> import numpy as np
        >>> numbered_classes(np.array([0, 2]))
        ('0', '1', '2')
    """
    highest = int(labels.max()) if labels.size else -1
    if highest >= MAX_CLASSES:
        raise DataFormatError(f"Labels must be class numbers from 0 up; found {highest}.")
    return tuple(str(number) for number in range(highest + 1))
