"""What all readers share: the splits, and errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ttapca.data.images import Images, numbered_classes
from ttapca.errors import (
    DataFormatError,
    DataNotFoundError,
    OptionError,
    ShapeError,
    did_you_mean,
)

Split = Literal["train", "test"]


def check_split(split: str) -> Split:
    """Refuse a split that does not exist.

    Args:
        split: `train` or `test`.

    Returns:
        The same word.

    Raises:
        OptionError: It is neither.

    Example:
        >>> check_split("test")
        'test'
    """
    if split not in get_args(Split):
        raise OptionError(
            f"A split is `train` or `test`; found `{split}`.{did_you_mean(split, get_args(Split))}"
        )
    return cast("Split", split)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file an error is about.

    Args:
        path: The file or folder being read.

    Yields:
        Nothing; read inside.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It cannot be read, or breaks a rule of `Images`.
        ShapeError: Its arrays have the wrong shapes.

    Example:
        >>> with reading(Path("labels.npy")):
        ...     pass
    """
    try:
        yield
    except (DataFormatError, ShapeError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except FileNotFoundError as error:
        if isinstance(error, DataNotFoundError):
            raise
        raise DataNotFoundError(f"{path} does not exist.") from error
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror or error}.") from error


def make_images(
    path: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.integer],
    class_names: tuple[str, ...] | None,
) -> Images:
    """Make an `Images` whose errors name the file.

    Args:
        path: Where the arrays come from.
        images: Pixels, `(n, height, width, channels)`.
        labels: Class numbers of any integer type, `(n,)`.
        class_names: One name a class; plain numbers if `None`.

    Returns:
        The images.

    Raises:
        DataFormatError: A type or a label breaks the rules.
        ShapeError: A shape does.

    Example:
        >>> import numpy as np
        >>> make_images(Path("x"), np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1, np.uint8), ("a",))
        Images(1 of 2x2x3, 1 classes)
    """
    with reading(path):
        if labels.dtype.kind not in "iu":
            raise DataFormatError(f"Labels must be integers; found {labels.dtype}.")
        names = numbered_classes(labels) if class_names is None else class_names
        return Images(images, labels.astype(np.int64), names)
