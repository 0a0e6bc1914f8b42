"""Which files make up CIFAR, in each of its official versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ttapca.datasets.classes import CIFAR10_CLASSES, CIFAR100_CLASSES
from ttapca.datasets.reading import Split
from ttapca.errors import DataNotFoundError

SIDE = 32
CHANNELS = 3
PIXEL_BYTES = SIDE * SIDE * CHANNELS


@dataclass(frozen=True)
class CifarVersion:
    """Where one CIFAR keeps its files.

    Attributes:
        folder: The name of the official folder.
        files: The files of each split, in order.
        names_file: The file of class names.
        class_names: The official names, used when that file is absent.

    Example:
        >>> CIFAR100_BINARY.files["test"]
        ('test.bin',)
    """

    folder: str
    files: Mapping[Split, tuple[str, ...]]
    names_file: str
    class_names: tuple[str, ...]

    def is_in(self, folder: Path) -> bool:
        """Whether any data file of this version lies in `folder`."""
        return any((folder / name).is_file() for files in self.files.values() for name in files)


@dataclass(frozen=True)
class BinaryVersion(CifarVersion):
    """A version in records of fixed size.

    Attributes:
        label_bytes: Bytes before the pixels; the last of them is the label that counts.

    Example:
        >>> CIFAR10_BINARY.record_bytes
        3073
    """

    label_bytes: int

    @property
    def record_bytes(self) -> int:
        """The size of one labelled image."""
        return self.label_bytes + PIXEL_BYTES


@dataclass(frozen=True)
class PythonVersion(CifarVersion):
    """A version in pickles, which is also torchvision's layout.

    Attributes:
        labels_key: The entry of a data file that holds its labels.
        names_key: The entry of the names file that holds the names.

    Example:
        >>> CIFAR100_PYTHON.labels_key
        'fine_labels'
    """

    labels_key: str
    names_key: str


CIFAR10_BINARY = BinaryVersion(
    folder="cifar-10-batches-bin",
    files={
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    },
    names_file="batches.meta.txt",
    class_names=CIFAR10_CLASSES,
    label_bytes=1,
)
CIFAR100_BINARY = BinaryVersion(
    folder="cifar-100-binary",
    files={"train": ("train.bin",), "test": ("test.bin",)},
    names_file="fine_label_names.txt",
    class_names=CIFAR100_CLASSES,
    label_bytes=2,  # the coarse label, then the fine one
)
CIFAR10_PYTHON = PythonVersion(
    folder="cifar-10-batches-py",
    files={
        "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test": ("test_batch",),
    },
    names_file="batches.meta",
    class_names=CIFAR10_CLASSES,
    labels_key="labels",
    names_key="label_names",
)
CIFAR100_PYTHON = PythonVersion(
    folder="cifar-100-python",
    files={"train": ("train",), "test": ("test",)},
    names_file="meta",
    class_names=CIFAR100_CLASSES,
    labels_key="fine_labels",
    names_key="fine_label_names",
)
BINARY_VERSIONS = (CIFAR10_BINARY, CIFAR100_BINARY)
PYTHON_VERSIONS = (CIFAR10_PYTHON, CIFAR100_PYTHON)

V = TypeVar("V", bound=CifarVersion)


def find_split(folder: Path, split: Split, versions: Sequence[V]) -> tuple[V, list[Path]]:
    """Find out which version lies in a folder, and the files of one split.

    Args:
        folder: Where to look.
        split: `train` or `test`.
        versions: The versions that would do.

    Returns:
        The version, and its files in order.

    Raises:
        DataNotFoundError: No version is there, or a file of the split is missing.

    Example:
        >>> find_split(Path("nowhere"), "test", BINARY_VERSIONS)
        Traceback (most recent call last):
        ttapca.errors.DataNotFoundError: nowhere holds none of `test_batch.bin`, `test.bin`.
    """
    version = next((known for known in versions if known.is_in(folder)), None)
    if version is None:
        expected = ", ".join(f"`{known.files[split][0]}`" for known in versions)
        raise DataNotFoundError(f"{folder} holds none of {expected}.")
    missing = [name for name in version.files[split] if not (folder / name).is_file()]
    if missing:
        raise DataNotFoundError(
            f"The {split} split needs {', '.join(version.files[split])}; "
            f"missing in {folder}: {', '.join(missing)}."
        )
    return version, [folder / name for name in version.files[split]]
