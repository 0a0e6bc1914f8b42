"""Folders of pictures: a folder for each class, or the number of the class in each file's name."""

from __future__ import annotations

import io
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Either, ListOf, Maybe, Whole, check_option
from ttapca.datasets.images import Images
from ttapca.datasets.reading import make_images, reading
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError
from ttapca.support.parsing import read_bounded

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Pillow knows forty more formats, one of which starts another program.
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PICTURE_BYTES = 1 << 28
MAX_PIXELS = 50_000_000  # a larger picture takes a gigabyte while it is decoded
LONGEST_SIDE = 16_384
# Numbers of 16 or 32 bits, and fractions: Pillow would cut off what is brighter than 255.
WIDE_MODES = ("I", "F")
NUMBERED = re.compile(r"(\d{1,9})[_-](.+)")  # 0007_n01514668_cock


@dataclass(frozen=True)
class PictureSize:
    """How pictures are brought to one size: `size` and `shorter_side` of `load`."""

    size: int | tuple[int, int] | None = None
    shorter_side: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        side = Whole(1, LONGEST_SIDE)
        words = f"a side of 1 to {LONGEST_SIDE:,} pixels, or height and width"
        check_option("size", self.size, Maybe(Either((side, ListOf(side, 2, 2)), words)))
        check_option("shorter_side", self.shorter_side, Maybe(side))
        if self.shorter_side is None:
            return
        if not isinstance(self.size, int) or self.shorter_side < self.size:
            raise OptionError(
                "`shorter_side=` says how large a picture is made before a square is cut out of "
                "its centre, so it needs `size=`, one number that is not larger; found "
                f"{self.size} with a shorter side of {self.shorter_side}."
            )

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height that a picture gets before its centre is cut out."""
        if self.size is None:
            return width, height
        if not isinstance(self.size, int):
            return self.size[1], self.size[0]
        target, shorter = self.shorter_side or self.size, min(width, height)
        return width * target // shorter, height * target // shorter

    def of(self, picture: Image) -> Image:
        """Return a picture in this size; resizing is bicubic with antialiasing."""
        if self.size is None:
            return picture
        width, height = self.resized(*picture.size)
        if width * height > MAX_PIXELS:
            raise ValueError(f"it would have {width:,} x {height:,} pixels, as it is so narrow")
        resized = picture.resize((width, height))
        if not isinstance(self.size, int):
            return resized
        left, top = ((side - self.size) // 2 for side in resized.size)
        return resized.crop((left, top, left + self.size, top + self.size))


def read_image_folder(
    folder: Path | str,
    *,
    size: int | tuple[int, int] | None = None,
    shorter_side: int | None = None,
) -> Images:
    """Read a folder of pictures as RGB, with one subfolder for each class or with numbered files.

    Classes are numbered by the sorted names of their folders, and pictures are sorted by name. So
    images come class by class; `ttapca.datasets.choose` mixes them. Without folders, the name of
    each picture starts with the number of its class and `_` or `-`: `0007_cock.jpg`. `size` and
    `shorter_side` are those of `load`; without them all pictures must have one size.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "cat").mkdir()
        >>> Image.new("RGB", (6, 4)).save(folder / "cat" / "tom.png")
        >>> read_image_folder(folder)
        Images(1 of 4x6x3, 1 classes)
        >>> read_image_folder(folder, size=2)
        Images(1 of 2x2x3, 1 classes)
    """
    return read_pictures(Path(folder), PictureSize(size, shorter_side))


def read_pictures(folder: Path, size: PictureSize) -> Images:
    """Read a folder of pictures, as `read_image_folder` does."""
    classes = class_folders(folder)
    if classes:
        paths = [(path, label) for label, each in enumerate(classes) for path in pictures_in(each)]
        names: tuple[str, ...] | None = tuple(each.name for each in classes)
    else:
        paths, names = _numbered(folder)
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
    return make_images(folder, pixels, np.array([label for _, label in paths]), names)


def class_folders(folder: Path) -> list[Path]:
    """Return the subfolders that hold a picture, sorted by name."""
    return sorted(filter(pictures_in, folder.iterdir())) if folder.is_dir() else []


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures that lie in a folder itself, sorted by name."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in PICTURE_SUFFIXES and not path.name.startswith(".")
    )


def _numbered(folder: Path) -> tuple[list[tuple[Path, int]], tuple[str, ...] | None]:
    """Return pictures with the classes in their names, and class names if each has one picture."""
    paths: list[tuple[Path, int]] = []
    names: dict[int, str] = {}
    for path in pictures_in(folder):
        match = NUMBERED.fullmatch(path.stem)
        if match is None:
            raise DataFormatError(
                "Pictures lie in a folder for each class, or their names start with the number of "
                f"their class, such as `0007_cock.jpg`; found {path}."
            )
        paths.append((path, int(match[1])))
        names[int(match[1])] = match[2]
    if not paths:
        raise DataNotFoundError(
            "A folder of images must hold a folder of pictures for each class, or pictures whose "
            f"names start with the number of their class; {folder} has neither."
        )
    one_each = sorted(names) == list(range(len(paths)))
    return paths, tuple(names[label] for label in range(len(paths))) if one_each else None


def read_picture(path: Path, size: PictureSize | None = None) -> NDArray[np.uint8]:
    """Read one picture in colour, `(height, width, 3)`, in its own or another size."""
    with reading(path, "is not a readable picture"):
        # From memory: on a file, Pillow asks for as many bytes as a chunk claims to have.
        picture = open_picture(read_bounded(path, DataFormatError, MAX_PICTURE_BYTES))
        return picture_pixels(picture, size)


def open_picture(content: bytes, formats: tuple[str, ...] = PICTURE_FORMATS) -> Image:
    """Open a picture in memory, inside `reading`: its header is read, and its size is checked."""
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(content), formats=formats)
    except UnidentifiedImageError:  # its own message names an address in memory
        raise ValueError(f"it is none of {', '.join(formats)}") from None
    if opened.width * opened.height > MAX_PIXELS:
        raise ValueError(
            f"it has {opened.width:,} x {opened.height:,} pixels, more than {MAX_PIXELS:,}"
        )
    if opened.mode.startswith(WIDE_MODES):
        raise ValueError(
            f"it has more than 8 bits a channel ({opened.mode}), so convert it to 8 bits first"
        )
    return opened


def picture_pixels(
    picture: Image, size: PictureSize | None = None, mode: Literal["RGB", "L"] = "RGB"
) -> NDArray[np.uint8]:
    """Decode a picture, upright: `(height, width, 3)`, or `(height, width)` for grey levels."""
    from PIL import ImageOps

    picture.load()
    with suppress(Exception):  # damaged EXIF data say nothing, and are no fault of the pixels
        ImageOps.exif_transpose(picture, in_place=True)
    # A copy of a large picture would take as much memory again.
    converted = picture if picture.mode == mode else picture.convert(mode)
    return np.asarray(converted if size is None else size.of(converted), np.uint8)
