"""One way in: load images by a name or a path. Also readers for your own images, and digits."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.catalog import DATA_SETS, DataSet
from ttapca.datasets.cifar import (
    BINARY_VERSIONS,
    LABELS_FILE,
    PYTHON_VERSIONS,
    corruptions_in,
    read_cifar_binary,
    read_cifar_c,
    read_cifar_python,
)
from ttapca.datasets.images import Images
from ttapca.datasets.reading import (
    MAX_CLASSES,
    Split,
    check_split,
    make_images,
    read_npz_arrays,
    reading,
)
from ttapca.errors import (
    DataFormatError,
    DataNotFoundError,
    OptionError,
    ShapeError,
    did_you_mean,
)
from ttapca.support.parsing import read_bounded

DIGITS = "digits"
CLASS_NAMES = "class_names"
PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Pillow knows forty more formats, one of which starts another program.
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PICTURE_BYTES = 1 << 28
MAX_PIXELS = 50_000_000  # a larger picture takes a gigabyte while it is decoded


def load(
    what: str | Path,
    split: Split = "test",
    *,
    root: Path | str | None = None,
    corruption: str | None = None,
    severity: int | None = None,
    size: int | tuple[int, int] | None = None,
) -> Images:
    """Load labelled images by name, or from a path of any known layout.

    Args:
        what: `cifar10`, `cifar100`, `cifar10-c`, `cifar100-c`, `digits`, or a path to: a folder of
            CIFAR in its binary or python version, the folder above it (torchvision's root), a
            folder of the CIFAR-C layout or one `.npy` in it, an `.npz`, a folder of pictures by
            class, or the folder above its `train` and `test`.
        split: `train` or `test`. A path to a single set of images ignores it.
        root: The folder that holds the named data sets, as `ttapca data list` shows it.
        corruption: For CIFAR-C: which corruption.
        severity: For CIFAR-C: 1 to 5.
        size: For pictures: resize them to this side, or `(height, width)`.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It has no known layout, or is damaged.
        OptionError: The options do not fit.

    Example:
        >>> load("digits", "train")
        Images(1201 of 8x8x1, 10 classes)
    """
    check_split(split)
    if what == DIGITS:
        return read_digits(split)
    named = isinstance(what, str) and what in DATA_SETS
    path = _named_folder(DATA_SETS[str(what)], root) if named else Path(what)
    if not path.exists():
        known = [*DATA_SETS, DIGITS]
        raise DataNotFoundError(
            f"`{what}` is neither a data set nor a path.{did_you_mean(str(what), known)} "
            f"Data sets: {', '.join(known)}."
        )
    folder = path.parent if path.suffix == ".npy" else path
    if (folder / LABELS_FILE).is_file():
        chosen = corruption if path == folder else path.stem
        return _load_corrupted(folder, split, chosen, severity)
    if corruption is not None or severity is not None:
        raise OptionError(
            f"`corruption` and `severity` are for the CIFAR-C layout only; {path} has another."
        )
    if path.suffix == ".npz" and path.is_file():
        return read_npz(path)
    if path.is_file():
        raise DataFormatError(
            f"A file of images must be an `.npz`, or an `.npy` beside `{LABELS_FILE}`; not {path}."
        )
    return _load_folder(path, split, size)


def _named_folder(data_set: DataSet, root: Path | str | None) -> Path:
    if root is None:
        raise OptionError(
            f"To load the data set `{data_set.name}`, say with `root=` which folder holds it. "
            "`ttapca data list` shows the folder that `ttapca data get` fills."
        )
    folders = [Path(root) / layout.folder for layout in data_set.layouts]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise DataNotFoundError(
        f"`{data_set.name}` must be in {' or '.join(map(str, folders))}; it is not. "
        f"Get it with: ttapca data get {data_set.name}"
    )


def _load_corrupted(
    folder: Path, split: Split, corruption: str | None, severity: int | None
) -> Images:
    if split != "test":
        raise OptionError(f"CIFAR-C has a test split only; {folder} has no `{split}`.")
    if corruption is None or severity is None:
        raise OptionError(
            f"{folder} has the CIFAR-C layout: give `corruption=` and `severity=`. "
            f"Corruptions: {', '.join(corruptions_in(folder)) or 'none'}."
        )
    return read_cifar_c(folder, corruption, severity)


def _load_folder(folder: Path, split: Split, size: int | tuple[int, int] | None) -> Images:
    if any(version.is_in(folder) for version in BINARY_VERSIONS):
        return read_cifar_binary(folder, split)
    if any(version.is_in(folder) for version in PYTHON_VERSIONS):
        return read_cifar_python(folder, split)
    versions = (*BINARY_VERSIONS, *PYTHON_VERSIONS)
    inner = [each.folder for each in versions if each.is_in(folder / each.folder)]
    if len(inner) > 1:
        raise OptionError(
            f"{folder} holds several data sets: {', '.join(inner)}. Give the path of one."
        )
    if inner:
        return _load_folder(folder / inner[0], split, size)
    for pictures in (folder / split, folder):
        if _class_folders(pictures):
            return read_image_folder(pictures, size=size)
    other = "test" if split == "train" else "train"
    if _class_folders(folder / other):
        raise DataNotFoundError(
            f"The {split} split must be in {folder / split}; there are pictures in `{other}` only."
        )
    raise DataFormatError(
        f"{folder} has no known layout: neither CIFAR (binary or python version), nor CIFAR-C "
        "(`labels.npy` beside an `.npy` for each corruption), nor folders of pictures by class."
    )


def read_npz(path: Path | str, *, images: str = "images", labels: str = "labels") -> Images:
    """Read an `.npz` archive, as `numpy.savez` writes it, into memory.

    An optional array of text, `class_names`, names the classes; without it they are numbered.

    Args:
        path: The archive.
        images: The name of the uint8 array, `(n, height, width, channels)`.
        labels: The name of the integer array, `(n,)`.

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
    """Read a folder of pictures as RGB; it has one subfolder for each class.

    Classes are numbered by the sorted names of their folders, and pictures are sorted by name. So
    images come class by class; `ttapca.datasets.choose` mixes them.

    Args:
        folder: The folder that holds the class folders.
        size: Resize every picture to this side, or `(height, width)`. Without it all pictures must
            have the same size.

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
    classes = _class_folders(folder)
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


def _class_folders(folder: Path) -> list[Path]:
    """Return the subfolders that hold a picture, sorted by name."""
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
    """Read one picture in colour, `(height, width, 3)`; resize it if `size` is given."""
    from PIL import Image

    with reading(path, "is not a readable picture"):
        # From memory: on a file, Pillow asks for as many bytes as a chunk claims to have.
        content = io.BytesIO(read_bounded(path, DataFormatError, MAX_PICTURE_BYTES))
        opened = Image.open(content, formats=PICTURE_FORMATS)
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
    """Read scikit-learn's 1,797 handwritten digits, 8x8 in grey: real data without a download.

    The split is fixed: a third of each class, chosen once at random, is for testing. That makes
    1,201 training and 596 test images.

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
