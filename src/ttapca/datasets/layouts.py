"""Load images by a name or a path; readers of arrays, digits and shipped images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets import cifar
from ttapca.datasets.images import Images
from ttapca.datasets.pictures import (
    PictureSize,
    class_folders,
    pictures_in,
    read_picture,
    read_pictures,
)
from ttapca.datasets.reading import (
    MAX_CLASSES,
    Split,
    check_split,
    make_images,
    npz_names,
    read_npz_arrays,
    reading,
)
from ttapca.datasets.sources import DATA_SETS, DataSet
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean

DIGITS = "digits"
CIFAR10_500 = "cifar10-500"
SHIPPED_FOLDER = Path(__file__).with_name("shipped")
SHEET_COLUMNS = 25  # images beside one another in the PNG that ships
CLASS_NAMES = "class_names"


def load(
    what: str | Path,
    split: Split = "test",
    *,
    root: Path | str | None = None,
    corruption: str | None = None,
    severity: int | None = None,
    size: int | tuple[int, int] | None = None,
    shorter_side: int | None = None,
) -> Images:
    """Load labelled images by name, or from a path of any known layout.

    Args:
        what: `cifar10`, `cifar100`, `cifar10-c`, `cifar100-c`, `cifar10-500`, `digits`, or a path
            of one of the layouts in docs/data.md, or to the folder above it.
        split: `train` or `test`. A path to a single set of images ignores it.
        root: The folder that holds the named data sets, as `ttapca data list` shows it.
        corruption: For CIFAR-C: which corruption.
        severity: For CIFAR-C: 1 to 5.
        size: For pictures: resize them, keeping their proportions, and cut out the centre of this
            side; `(height, width)` resizes to exactly that.
        shorter_side: For pictures: the shorter side before the centre is cut out; `size` by
            default. Networks of ImageNet mostly expect `size=224, shorter_side=256`.

    Example:
        >>> load("digits", "train")
        Images(1201 of 8x8x1, 10 classes)
    """
    check_split(split)
    pictures = PictureSize(size, shorter_side)
    named = isinstance(what, str) and what in DATA_SETS
    shipped = {DIGITS: read_digits, CIFAR10_500: read_cifar10_500}
    if named or what in shipped:
        _check_no_size(what, pictures)
    if what in shipped:
        _check_clean(what, corruption, severity)
        return shipped[str(what)](split)
    path = _named_folder(DATA_SETS[str(what)], root) if named else Path(what)
    if not path.exists():
        known = [*DATA_SETS, *shipped]
        raise DataNotFoundError(
            f"`{what}` is neither a data set nor a path.{did_you_mean(str(what), known)} "
            f"Data sets: {', '.join(known)}."
        )
    folder = path.parent if path.suffix == ".npy" else path
    if (folder / cifar.LABELS_FILE).is_file():
        _check_no_size(path, pictures)
        if path != folder and corruption not in (None, path.stem):
            raise OptionError(
                f"{path} holds images with `{path.stem}`; asked for is `{corruption}`. Leave "
                f"`corruption=` out, or name the folder {folder}."
            )
        corruption = corruption if path == folder else path.stem
        if split != "test":
            raise OptionError(f"CIFAR-C has a test split only; {folder} has no `{split}`.")
        if corruption is None or severity is None:
            raise OptionError(
                f"{folder} has the CIFAR-C layout: give `corruption=` and `severity=`. "
                f"Corruptions: {', '.join(cifar.corruptions_in(folder)) or 'none'}."
            )
        return cifar.read_cifar_c(folder, corruption, severity)
    _check_clean(path, corruption, severity)
    if path.suffix == ".npz" and path.is_file():
        _check_no_size(path, pictures)
        both = f"x_{split}" in npz_names(path)  # splits are in one file
        return read_npz(path, images=f"x_{split}", labels=f"y_{split}") if both else read_npz(path)
    if path.is_file():
        raise DataFormatError(
            f"A file of images is an `.npz`, or an `.npy` beside `{cifar.LABELS_FILE}`; not {path}."
        )
    return _load_folder(path, split, pictures)


def _check_no_size(what: str | Path, size: PictureSize) -> None:
    if size != PictureSize():
        raise OptionError(
            f"`size=` and `shorter_side=` are for folders of pictures; the images of `{what}` have "
            "one size already. Leave them out."
        )


def _check_clean(what: str | Path, corruption: str | None, severity: int | None) -> None:
    if corruption is not None or severity is not None:
        raise OptionError(
            f"`corruption` and `severity` are for the CIFAR-C layout only; {what} has another. "
            "`ttapca corrupt` writes that layout, and `ttapca bench` corrupts images by itself."
        )


def _named_folder(data_set: DataSet, root: Path | str | None) -> Path:
    if root is None:
        raise OptionError(
            f"To load the data set `{data_set.name}`, say with `root=` which folder holds it. "
            "`ttapca data list` shows the folder that `ttapca data get` fills."
        )
    folders = [Path(root) / layout.folder for layout in data_set.layouts]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        raise DataNotFoundError(
            f"`{data_set.name}` must be in {' or '.join(map(str, folders))}; it is not. "
            f"Get it with: ttapca data get {data_set.name}"
        )
    return found


def _load_folder(folder: Path, split: Split, size: PictureSize) -> Images:
    versions = cifar.VERSIONS
    if any(version.is_in(folder) for version in versions):
        _check_no_size(folder, size)
        binary = any(version.is_in(folder) for version in cifar.BINARY_VERSIONS)
        return (cifar.read_cifar_binary if binary else cifar.read_cifar_python)(folder, split)
    inner = [each.folder for each in versions if each.is_in(folder / each.folder)]
    if len(inner) > 1:
        raise OptionError(
            f"{folder} holds several data sets: {', '.join(inner)}. Give the path of one."
        )
    if inner:
        return _load_folder(folder / inner[0], split, size)
    # Folders of numbered pictures are splits only if no other folder holds any: `train` may be a
    # class beside `bus`.
    direct = {each.name for each in class_folders(folder)}
    numbered = bool(direct) and direct <= set(get_args(Split))
    if class_folders(folder / split) or (numbered and split in direct):
        return read_pictures(folder / split, size)
    if not numbered and (direct or pictures_in(folder)):
        return read_pictures(folder, size)
    other = "test" if split == "train" else "train"
    if numbered or class_folders(folder / other):
        raise DataNotFoundError(
            f"The {split} split must be in {folder / split}; there are pictures in `{other}` only."
        )
    raise DataFormatError(
        f"{folder} has no known layout: neither CIFAR (binary or python version), nor CIFAR-C "
        "(`labels.npy` beside an `.npy` for each corruption), nor pictures."
    )


def read_npz(path: Path | str, *, images: str = "images", labels: str = "labels") -> Images:
    """Read an `.npz` archive, as `numpy.savez` writes it, into memory.

    `images` and `labels` are the names of its arrays: uint8, `(n, height, width, channels)`, or
    floats, `(n, channels, length)`, which become `Series`; and integers, `(n,)`. An optional array
    of text, `class_names`, names the classes; without it they are numbered.

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


def read_digits(split: Split = "test") -> Images:
    """Read scikit-learn's handwritten digits, 8x8 in grey: 1,201 for training and 596 for tests.

    The split is fixed: a third of each class, chosen once at random, is for tests.

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


def read_cifar10_500(split: Split = "test") -> Images:
    """Read 500 test images of CIFAR-10 (Krizhevsky, 2009) that ship with the package.

    They are the first fifty of each class, in the order of the test set. `scripts/pack_demo.py`
    wrote them as one PNG. There are no training images.

    Example:
        >>> read_cifar10_500()
        Images(500 of 32x32x3, 10 classes)
    """
    check_split(split)
    if split != "test":
        raise DataNotFoundError(
            f"`{CIFAR10_500}` has test images only, so nothing can be fitted on it. Name a filter "
            "that was fitted on CIFAR-10 with --filter (one ships with cifar10-resnet20), or get "
            "all images with `ttapca data get cifar10` and use --data cifar10."
        )
    facts = json.loads((SHIPPED_FOLDER / f"{CIFAR10_500}.json").read_text())
    sheet = read_picture(SHIPPED_FOLDER / f"{CIFAR10_500}.png")  # (rows x 32, columns x 32, 3)
    tiles = sheet.reshape(-1, cifar.SIDE, SHEET_COLUMNS, cifar.SIDE, cifar.CHANNELS).swapaxes(1, 2)
    pixels = np.ascontiguousarray(tiles).reshape(-1, cifar.SIDE, cifar.SIDE, cifar.CHANNELS)
    return make_images(
        SHIPPED_FOLDER, pixels, np.array(facts["labels"], np.int64), cifar.CIFAR10_CLASSES
    )
