"""What all readers share: the splits, and errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.images import MAX_CLASSES, Images, numbered_classes
from ttapca.errors import (
    DataFormatError,
    DataNotFoundError,
    OptionError,
    ShapeError,
    TtapcaError,
    did_you_mean,
)

Split = Literal["train", "test"]
GET_IT = "It is damaged or of another kind; get it again."
MAX_JSON_BYTES = 16 << 20
MAX_REASON = 300  # characters of a parser's own message


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
def reading(path: Path, complaint: str = "cannot be read", advice: str = GET_IT) -> Iterator[None]:
    """Say which file an error is about, whatever went wrong inside.

    Parsers of other people's formats fail in any way that Python knows: `struct.error`,
    `IndexError`, `NotImplementedError`, ... Here they all become one error that names the file.

    Args:
        path: The file or folder being read.
        complaint: What to say about it when a parser fails.
        advice: What to do about it then.

    Yields:
        Nothing; read inside.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It cannot be read, or breaks a rule of `Images`.
        ShapeError: Its arrays have the wrong shapes.

    Example:
        >>> with reading(Path("mine.npz"), "is not an archive", "Get it again."):
        ...     raise IndexError("no such member")
        Traceback (most recent call last):
        ttapca.errors.DataFormatError: mine.npz is not an archive: no such member. Get it again.
    """
    try:
        yield
    except (DataFormatError, ShapeError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except TtapcaError:
        raise
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{path} does not exist.") from error
    except MemoryError as error:
        raise DataFormatError(f"{path} needs more memory than there is.") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # the system's word, not that of a parser
            raise DataFormatError(f"{path} cannot be read: {error.strerror}.") from error
        reason = str(error)[:MAX_REASON] or type(error).__name__
        raise DataFormatError(f"{path} {complaint}: {reason}. {advice}") from error


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a whole file that is known to be small.

    Args:
        path: The file.
        limit: Bytes that it may have.

    Returns:
        Its content.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It is larger, or cannot be read.

    Example:
        >>> read_bytes(Path("nowhere"), 1000)
        Traceback (most recent call last):
        ttapca.errors.DataNotFoundError: nowhere does not exist.
    """
    with reading(path):
        size = path.stat().st_size
        if size > limit:
            raise DataFormatError(f"{path} is larger than {limit:,} bytes; found {size:,}.")
        return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a small JSON file.

    Args:
        path: The file.

    Returns:
        What it says.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It is no JSON, or more than 16 MB of it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels.json"
        >>> _ = path.write_text("[3, 8]")
        >>> read_json(path)
        [3, 8]
    """
    with reading(path, "is not readable JSON"):
        return json.loads(read_bytes(path, MAX_JSON_BYTES).decode("utf-8"))


def check_labels(path: Path, labels: Any) -> list[int]:
    """Refuse what is no list of class numbers.

    Args:
        path: Where it comes from.
        labels: What was found there.

    Returns:
        The same list.

    Raises:
        DataFormatError: It is no list, or something in it is no number that a label can be.

    Example:
        >>> check_labels(Path("test_batch"), [3, 8])
        [3, 8]
    """
    if not isinstance(labels, list):
        raise DataFormatError(f"{path}: labels must be a list; found {type(labels).__name__}.")
    for label in labels:
        if type(label) is not int or not 0 <= label < MAX_CLASSES:
            raise DataFormatError(
                f"{path}: labels must be integers from 0 up; found {str(label)[:MAX_REASON]!r}."
            )
    return labels


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
        if not images.size:
            raise DataFormatError(f"There must be an image to read; found shape {images.shape}.")
        names = numbered_classes(labels) if class_names is None else class_names
        if labels.shape == images.shape[:1]:  # any other shape is refused before it costs memory
            labels = labels.astype(np.int64)
        return Images(images, cast("NDArray[np.int64]", labels), names)
