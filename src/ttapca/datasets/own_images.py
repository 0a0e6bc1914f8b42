"""Images of one's own, in an `.npz` or a folder of pictures; and the digits of scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.images import Images
from ttapca.datasets.reading import (
    MAX_CLASSES,
    Split,
    check_split,
    make_images,
    read_npz_arrays,
    reading,
)
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Pillow knows forty formats more, among them one that starts another program.
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 50_000_000  # a picture of more takes a gigabyte while it is decoded
CLASS_NAMES = "class_names"


def read_npz(path: Path | str, *, images: str = "images", labels: str = "labels") -> Images:
    """Read an `.npz` archive, as `numpy.savez` writes it, into memory.

    An optional array of text, `class_names`, names the classes; without it they are numbered.

    Args:
        path: The archive.
        images: The name of the uint8 array, `(n, height, width, channels)`.
        labels: The name of the integer array, `(n,)`.

    Raises:
        DataNotFoundError: The file is not there.
        DataFormatError: An array is missing, damaged, pickled, or of another type.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "mine.npz"
        >>> np.savez(path, images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.array([0, 1]))
        >>> read_npz(path)
        Images(2 of 4x4x3, 2 classes)
    """
    path = Path(path)
    arrays = read_npz_arrays(path, [images, labels], optional=[CLASS_NAMES])
    names = arrays.get(CLASS_NAMES)
    with reading(path):
        if names is not None and (names.ndim != 1 or names.size > MAX_CLASSES):
            raise DataFormatError(
                f"`{CLASS_NAMES}` must be a row of names; found an array of shape {names.shape}."
            )
        class_names = None if names is None else tuple(names.astype(str).tolist())
    return make_images(path, arrays[images], arrays[labels], class_names)


def read_image_folder(folder: Path | str, *, size: int | tuple[int, int] | None = None) -> Images:
    """Read a folder of pictures, one subfolder for each class, as RGB.

    Classes are numbered by the sorted names of their folders; pictures are sorted by name. So they
    come class by class; `ttapca.datasets.choose` mixes them, and takes as many of each.

    Args:
        folder: The folder that holds the class folders.
        size: Resize every picture to this side, or `(height, width)`. Without it all pictures must
            have one size.

    Raises:
        DataNotFoundError: There is no class folder with a picture.
        ShapeError: The pictures differ in size and `size` is not given.
        DataFormatError: A file is not a picture.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "cat").mkdir()
        >>> Image.new("RGB", (6, 4)).save(folder / "cat" / "tom.png")
        >>> read_image_folder(folder)
        Images(1 of 4x6x3, 1 classes)
    """
    folder = Path(folder)
    classes = picture_folders(folder)
    if not classes:
        raise DataNotFoundError(
            f"A folder of images must hold a folder of pictures for each class; {folder} has none."
        )
    paths = [(path, label) for label, each in enumerate(classes) for path in _pictures_in(each)]
    first = read_picture(paths[0][0], size)
    with reading(folder):
        pixels = np.empty((len(paths), *first.shape), np.uint8)
    for row, (path, _) in enumerate(paths):
        picture = read_picture(path, size) if row else first
        if picture.shape != first.shape:
            raise ShapeError(
                f"All pictures must have one size; {paths[0][0]} has {first.shape[:2]} and "
                f"{path} has {picture.shape[:2]} (height, width). Give `size=` to resize them."
            )
        pixels[row] = picture
    labels = np.array([label for _, label in paths])
    return make_images(folder, pixels, labels, tuple(each.name for each in classes))


def picture_folders(folder: Path) -> list[Path]:
    """The subfolders that hold a picture, sorted by name."""
    return sorted(filter(_pictures_in, folder.iterdir())) if folder.is_dir() else []


def _pictures_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in PICTURE_SUFFIXES and not path.name.startswith(".")
    )


def read_picture(path: Path, size: int | tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Read one picture in colour, `(height, width, 3)`; resized if `size` is given.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It is no picture, damaged, or of more than 50 million pixels.
    """
    from PIL import Image

    with (
        reading(path, "is not a readable picture"),
        path.open("rb") as file,
        Image.open(file, formats=PICTURE_FORMATS) as opened,
    ):
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width:,} x {opened.height:,} pixels, more than {MAX_PIXELS:,}"
            )
        picture = opened.convert("RGB")
        if size is not None:
            height, width = (size, size) if isinstance(size, int) else size
            picture = picture.resize((width, height))  # bicubic with antialiasing
        return np.asarray(picture, np.uint8)


def read_digits(split: Split = "test") -> Images:
    """Read the 1,797 handwritten digits of scikit-learn, 8x8 in grey: real data without a download.

    The split is fixed: a third of each class, chosen once at random, is for testing. There are
    1,201 training and 596 test images.

    Raises:
        OptionError: The split does not exist.

    Example:
        >>> read_digits("test").images.shape
        (596, 8, 8, 1)
    """
    check_split(split)
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # counts of 0 to 16
    labels: NDArray[np.int64] = digits.target.astype(np.int64)
    random = np.random.default_rng(0)
    is_test = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        is_test[rows[: len(rows) // 3]] = True
    everything = Images(pixels, labels, tuple(str(name) for name in digits.target_names))
    return everything.subset(is_test if split == "test" else ~is_test)
