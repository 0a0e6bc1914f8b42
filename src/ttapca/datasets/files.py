"""Images of one's own: an `.npz`, or a folder of pictures by class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.arrays import read_npz_arrays
from ttapca.datasets.images import MAX_CLASSES, Images
from ttapca.datasets.reading import make_images, reading
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError

if TYPE_CHECKING:
    from PIL import Image

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Pillow knows forty formats more, among them one that starts another program.
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
CLASS_NAMES = "class_names"
MAX_PIXELS = 50_000_000  # a picture of more takes a gigabyte while it is decoded


def read_npz(path: Path | str, *, images: str = "images", labels: str = "labels") -> Images:
    """Read an `.npz` archive of an image and a label array.

    An optional array of text, `class_names`, names the classes; without it they are numbered.

    Args:
        path: The archive, as `numpy.savez` writes it.
        images: The name of the uint8 array, `(n, height, width, channels)`.
        labels: The name of the integer array, `(n,)`.

    Returns:
        The images, in memory: an archive cannot be memory-mapped.

    Raises:
        DataNotFoundError: The file is not there.
        DataFormatError: An array is missing, damaged, pickled, or of another type.

    Example:
        >>> import tempfile, numpy as np
        >>> path = Path(tempfile.mkdtemp()) / "mine.npz"
        >>> np.savez(path, images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.array([0, 1]))
        >>> read_npz(path)
        Images(2 of 4x4x3, 2 classes)
    """
    path = Path(path)
    arrays = read_npz_arrays(path, [images, labels], optional=[CLASS_NAMES])
    names = _class_names(path, arrays[CLASS_NAMES]) if CLASS_NAMES in arrays else None
    return make_images(path, arrays[images], arrays[labels], names)


def _class_names(path: Path, names: NDArray[Any]) -> tuple[str, ...]:
    with reading(path):
        if names.ndim != 1 or names.size > MAX_CLASSES:
            raise DataFormatError(
                f"`{CLASS_NAMES}` must be a row of names; found an array of shape {names.shape}."
            )
        return tuple(names.astype(str).tolist())


def read_image_folder(folder: Path | str, *, size: int | tuple[int, int] | None = None) -> Images:
    """Read a folder of pictures, one subfolder a class, as RGB.

    Classes are numbered by the sorted names of their folders, pictures sorted by name. So they come
    class by class; `ttapca.datasets.choose` mixes them, and takes as many of each.

    Args:
        folder: The folder that holds the class folders.
        size: Resize every picture to this side, or `(height, width)`. Without it all pictures must
            have one size.

    Returns:
        The pictures, in memory.

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
            f"A folder of images must hold one folder of pictures a class; {folder} has none."
        )
    paths = [(path, label) for label, each in enumerate(classes) for path in pictures_in(each)]
    pixels: NDArray[np.uint8] | None = None
    for row, (path, _) in enumerate(paths):
        picture = read_picture(path, size)
        if pixels is None:
            with reading(folder):
                pixels = np.empty((len(paths), *picture.shape), np.uint8)
        if picture.shape != pixels.shape[1:]:
            raise ShapeError(
                f"All pictures must have one size; {paths[0][0]} has {pixels.shape[1:3]} and "
                f"{path} has {picture.shape[:2]} (height, width). Give `size=` to resize them."
            )
        pixels[row] = picture
    if pixels is None:  # pragma: no cover - a class folder has a picture by definition
        raise DataNotFoundError(f"No picture in {folder}.")
    labels = np.array([label for _, label in paths])
    return make_images(folder, pixels, labels, tuple(each.name for each in classes))


def pictures_in(folder: Path) -> list[Path]:
    """The pictures of one class folder, sorted by name.

    Args:
        folder: The folder.

    Returns:
        Their paths.

    Example:
        >>> pictures_in(Path("nowhere"))
        []
    """
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in PICTURE_SUFFIXES and not path.name.startswith(".")
    )


def picture_folders(folder: Path) -> list[Path]:
    """The subfolders that hold a picture, sorted by name.

    Args:
        folder: The folder above them.

    Returns:
        Their paths.

    Example:
        >>> picture_folders(Path("nowhere"))
        []
    """
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pictures_in(path))


def read_picture(path: Path, size: int | tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Read one picture in colour.

    Args:
        path: A PNG, JPEG, WebP, BMP, GIF or TIFF.
        size: Resize it to this side, or `(height, width)`.

    Returns:
        Pixels, `(height, width, 3)`.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It is no picture, damaged, or of more than 50 million pixels.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> path = Path(tempfile.mkdtemp()) / "tom.png"
        >>> Image.new("RGB", (6, 4)).save(path)
        >>> read_picture(path).shape
        (4, 6, 3)
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
        return np.asarray(picture if size is None else _resized(picture, size), np.uint8)


def _resized(picture: Image.Image, size: int | tuple[int, int]) -> Image.Image:
    height, width = (size, size) if isinstance(size, int) else size
    return picture.resize((width, height))  # pillow says width first; bicubic with antialiasing
