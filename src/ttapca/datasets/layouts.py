"""One way in: load images by a name or a path, whatever the layout."""

from __future__ import annotations

from pathlib import Path

from ttapca.datasets.catalog import DATA_SETS, DataSet
from ttapca.datasets.cifar import (
    BINARY_VERSIONS,
    PYTHON_VERSIONS,
    read_cifar_binary,
    read_cifar_python,
)
from ttapca.datasets.cifar_c import LABELS_FILE, corruptions_in, read_cifar_c
from ttapca.datasets.images import Images
from ttapca.datasets.own_images import picture_folders, read_digits, read_image_folder, read_npz
from ttapca.datasets.reading import Split, check_split
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean

DIGITS = "digits"


def load(
    what: str | Path,
    split: Split = "test",
    *,
    root: Path | str | None = None,
    corruption: str | None = None,
    severity: int | None = None,
    size: int | tuple[int, int] | None = None,
) -> Images:
    """Load labelled images by name or from a path of any known layout.

    Args:
        what: `cifar10`, `cifar100`, `cifar10-c`, `cifar100-c`, `digits`, or a path to: a folder of
            CIFAR in its binary or python version, the folder above it (torchvision's root), a
            folder of the CIFAR-C layout or one `.npy` in it, an `.npz`, a folder of pictures by
            class, or one above its `train` and `test`.
        split: `train` or `test`. A path to one set of images is read whatever the split.
        root: Where the data sets with a name lie: what `ttapca data list` shows.
        corruption: For CIFAR-C: which corruption.
        severity: For CIFAR-C: 1 to 5.
        size: For pictures: resize them to this side, or `(height, width)`.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It is of no known layout, or damaged.
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
            f"`corruption` and `severity` are for the CIFAR-C layout only; {path} is not of it."
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
            f"The data set `{data_set.name}` is looked for in a folder: give `root=`. "
            "`ttapca data list` shows which one `ttapca data get` fills."
        )
    folders = [Path(root) / layout.folder for layout in data_set.layouts]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise DataNotFoundError(
        f"`{data_set.name}` must lie in {' or '.join(map(str, folders))}; it does not. "
        f"Get it with: ttapca data get {data_set.name}"
    )


def _load_corrupted(
    folder: Path, split: Split, corruption: str | None, severity: int | None
) -> Images:
    if split != "test":
        raise OptionError(f"CIFAR-C has a test split only; {folder} has no `{split}`.")
    if corruption is None or severity is None:
        raise OptionError(
            f"{folder} is of the CIFAR-C layout: give `corruption=` and `severity=`. "
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
    if len(inner) == 1:
        return _load_folder(folder / inner[0], split, size)
    if inner:
        raise OptionError(
            f"{folder} holds several data sets: {', '.join(inner)}. Give the path of one."
        )
    for pictures in (folder / split, folder):
        if picture_folders(pictures):
            return read_image_folder(pictures, size=size)
    other = "test" if split == "train" else "train"
    if picture_folders(folder / other):
        raise DataNotFoundError(
            f"The {split} split must lie in {folder / split}; there are pictures in `{other}` only."
        )
    raise DataFormatError(
        f"{folder} is of no known layout: neither CIFAR (binary or python version), nor CIFAR-C "
        "(`labels.npy` beside an `.npy` for each corruption), nor folders of pictures by class."
    )
