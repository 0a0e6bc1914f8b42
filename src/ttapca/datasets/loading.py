"""One way in: a name or a path, whatever the layout."""

from __future__ import annotations

from pathlib import Path

from ttapca.datasets.catalog import DATA_SETS
from ttapca.datasets.cifar import read_cifar_binary
from ttapca.datasets.cifar_c import LABELS_FILE, corruptions_in, read_cifar_c
from ttapca.datasets.cifar_python import read_cifar_python
from ttapca.datasets.cifar_versions import BINARY_VERSIONS, PYTHON_VERSIONS
from ttapca.datasets.digits import read_digits
from ttapca.datasets.files import picture_folders, read_image_folder, read_npz
from ttapca.datasets.images import Images
from ttapca.datasets.reading import Split, check_split
from ttapca.datasets.sources import DataSet
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

    Returns:
        The images.

    Raises:
        DataNotFoundError: It is not there.
        DataFormatError: It is of no known layout, or damaged.
        OptionError: The options do not fit.

    Example:
        >>> load("digits", "train")
        Images(1201 of 8x8x1, 10 classes)
    """
    split = check_split(split)
    if what == DIGITS:
        return read_digits(split)
    if isinstance(what, str) and what in DATA_SETS:
        folder = _named_folder(DATA_SETS[what], root)
    else:
        folder = Path(what)
    if not folder.exists():
        known = [*DATA_SETS, DIGITS]
        raise DataNotFoundError(
            f"`{what}` is neither a data set nor a path.{did_you_mean(str(what), known)} "
            f"Data sets: {', '.join(known)}."
        )
    if (corruption is not None or severity is not None) and not _is_corrupted(folder):
        raise OptionError(
            f"`corruption` and `severity` are for the CIFAR-C layout only; {folder} is not of it."
        )
    if folder.is_file():
        return _load_file(folder, split, severity)
    return _load_folder(folder, split, corruption, severity, size)


def _named_folder(data_set: DataSet, root: Path | str | None) -> Path:
    if root is None:
        raise OptionError(
            f"The data set `{data_set.name}` is looked for in a folder: give `root=`. "
            "`ttapca data list` shows which one `ttapca data get` fills."
        )
    for layout in data_set.layouts:
        if (Path(root) / layout.folder).is_dir():
            return Path(root) / layout.folder
    folders = " or ".join(str(Path(root) / layout.folder) for layout in data_set.layouts)
    raise DataNotFoundError(
        f"`{data_set.name}` must lie in {folders}; it does not. "
        f"Get it with: ttapca data get {data_set.name}"
    )


def _is_corrupted(path: Path) -> bool:
    """Whether a path is a folder of the CIFAR-C layout, or a file in one."""
    folder = path.parent if path.suffix == ".npy" else path
    return (folder / LABELS_FILE).is_file()


def _load_file(path: Path, split: Split, severity: int | None) -> Images:
    if path.suffix == ".npz":
        return read_npz(path)
    if _is_corrupted(path) and path.suffix == ".npy":
        return _load_corrupted(path.parent, split, path.stem, severity)
    raise DataFormatError(
        f"A file of images must be an `.npz`, or an `.npy` beside `{LABELS_FILE}`; found {path}."
    )


def _load_folder(
    folder: Path,
    split: Split,
    corruption: str | None,
    severity: int | None,
    size: int | tuple[int, int] | None,
) -> Images:
    if _is_corrupted(folder):
        return _load_corrupted(folder, split, corruption, severity)
    if any(version.is_in(folder) for version in BINARY_VERSIONS):
        return read_cifar_binary(folder, split)
    if any(version.is_in(folder) for version in PYTHON_VERSIONS):
        return read_cifar_python(folder, split)
    inner = _known_folders_in(folder)
    if len(inner) == 1:
        return _load_folder(inner[0], split, corruption, severity, size)
    if inner:
        raise OptionError(
            f"{folder} holds several data sets: {', '.join(path.name for path in inner)}. "
            "Give the path of one."
        )
    if picture_folders(folder / split):
        return read_image_folder(folder / split, size=size)
    if picture_folders(folder):
        return read_image_folder(folder, size=size)
    other = "test" if split == "train" else "train"
    if picture_folders(folder / other):
        raise DataNotFoundError(
            f"The {split} split must lie in {folder / split}; there are pictures in `{other}` only."
        )
    raise DataFormatError(
        f"{folder} is of no known layout: neither CIFAR (binary or python version), nor CIFAR-C "
        "(`labels.npy` beside one `.npy` a corruption), nor folders of pictures by class."
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


def _known_folders_in(folder: Path) -> list[Path]:
    versions = (*BINARY_VERSIONS, *PYTHON_VERSIONS)
    return [
        folder / version.folder for version in versions if version.is_in(folder / version.folder)
    ]
