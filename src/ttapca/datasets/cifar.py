"""CIFAR-10 and CIFAR-100 in their official binary and python versions.

A binary file is a row of records of one size: the label in one byte (CIFAR-100: the coarse label,
then the fine one), then 3,072 bytes of pixels: the red, the green and the blue plane, 32 rows of 32
each. A python file, which is also torchvision's layout, is a pickled dict: `data` of shape
(n, 3072) in the same planes, and `labels` or `fine_labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import conform
from ttapca.datasets.images import Images
from ttapca.datasets.plain_pickle import read_plain_pickle
from ttapca.datasets.reading import LABELS, Split, check_split, make_images, reading
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError
from ttapca.support.parsing import read_bounded

SIDE = 32
CHANNELS = 3
PIXEL_BYTES = SIDE * SIDE * CHANNELS
SHOWN = 20  # entries that an error lists, and characters of each

CIFAR10_CLASSES = tuple(
    "airplane automobile bird cat deer dog frog horse ship truck".split()  # noqa: SIM905
)
CIFAR100_CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905 - a hundred quoted lines would hide the list
)


@dataclass(frozen=True)
class CifarVersion:
    """Where one version of CIFAR keeps its files."""

    folder: str  # its official name
    files: Mapping[Split, tuple[str, ...]]  # of each split, in order
    names_file: str
    class_names: tuple[str, ...]  # the official ones, for when that file is absent

    def is_in(self, folder: Path) -> bool:
        """Whether any data file of this version lies in `folder`."""
        return any((folder / name).is_file() for files in self.files.values() for name in files)


@dataclass(frozen=True)
class BinaryVersion(CifarVersion):
    """Records of fixed size; the last of `label_bytes` is the label, the pixels follow."""

    label_bytes: int

    @property
    def record_bytes(self) -> int:
        """The size of one labelled image."""
        return self.label_bytes + PIXEL_BYTES


@dataclass(frozen=True)
class PythonVersion(CifarVersion):
    """Pickles; the keys are those of the labels in a data file, and of the names in theirs."""

    labels_key: str
    names_key: str


_PARTS = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10_BINARY = BinaryVersion(
    folder="cifar-10-batches-bin",
    files={"train": tuple(f"{name}.bin" for name in _PARTS), "test": ("test_batch.bin",)},
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
    files={"train": _PARTS, "test": ("test_batch",)},
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


def _find_split(folder: Path, split: Split, versions: Sequence[V]) -> tuple[V, list[Path]]:
    """Which of some versions lies in a folder, and the files of one split."""
    check_split(split)
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


def read_cifar_binary(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official binary version.

    A split in one file is memory-mapped; the five training files of CIFAR-10 are copied into one
    array of 154 MB. CIFAR-100 may hold fewer images than the official number.

    Args:
        folder: `cifar-10-batches-bin` or `cifar-100-binary`, under any name.
        split: `train` or `test`.

    Raises:
        DataNotFoundError: A file of the split is missing.
        DataFormatError: A file is truncated or holds impossible labels.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> pixels = np.zeros((2, 32, 32, 3), np.uint8)
        >>> images = Images(pixels, np.array([3, 5]), CIFAR10_CLASSES)
        >>> write_cifar_binary(folder, CIFAR10_BINARY, {"test": images})
        >>> read_cifar_binary(folder).labels.tolist()
        [3, 5]
    """
    folder = Path(folder)
    version, files = _find_split(folder, split, BINARY_VERSIONS)
    parts = [_map_records(path, version) for path in files]
    pixels, labels = parts[0]
    if len(parts) > 1:
        labels = np.concatenate([part for _, part in parts])
        # Filled rather than concatenated: numpy would keep the planar strides of the parts.
        pixels = np.empty((len(labels), SIDE, SIDE, CHANNELS), np.uint8)
        np.concatenate([part for part, _ in parts], out=pixels)
    names, path = version.class_names, folder / version.names_file
    if path.is_file():
        with reading(path):
            content = read_bounded(path, DataFormatError)
        names = tuple(content.decode("utf-8", errors="replace").split()) or names
    return make_images(folder, pixels, labels, names)


def _map_records(path: Path, version: BinaryVersion) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    size = path.stat().st_size
    count, rest = divmod(size, version.record_bytes)
    if rest or not count:
        raise DataFormatError(
            f"{path} must be a whole number of records of {version.record_bytes} bytes; found "
            f"{size} bytes, so it is truncated or of another kind. Get it again."
        )
    with reading(path):
        records = np.memmap(path, np.uint8, mode="r", shape=(count, version.record_bytes))
    planes = records[:, version.label_bytes :].reshape(count, CHANNELS, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), records[:, version.label_bytes - 1]


def write_cifar_binary(
    folder: Path, version: BinaryVersion, splits: Mapping[Split, Images]
) -> None:
    """Write images in the official binary version, so that other tools read them too.

    The coarse label of CIFAR-100 is written as 0: `Images` carries fine labels only.

    Args:
        folder: An existing folder.
        version: Which CIFAR to write.
        splits: The images of each split; those of `train` are spread evenly over its files.

    Raises:
        ShapeError: The images are not 32x32x3.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> images = Images(np.zeros((1, 32, 32, 3), np.uint8), np.array([9]), CIFAR10_CLASSES)
        >>> write_cifar_binary(folder, CIFAR10_BINARY, {"test": images})
        >>> (folder / "test_batch.bin").stat().st_size
        3073
    """
    for split, images in splits.items():
        if images.images.shape[1:] != (SIDE, SIDE, CHANNELS):
            raise ShapeError(f"CIFAR images are 32x32x3; found {images}.")
        records = np.zeros((len(images), version.record_bytes), np.uint8)
        records[:, version.label_bytes - 1] = images.labels
        planes = images.images.transpose(0, 3, 1, 2)
        records[:, version.label_bytes :] = planes.reshape(len(images), PIXEL_BYTES)
        files = version.files[split]
        edges = np.linspace(0, len(images), len(files) + 1).astype(int)
        for name, start, stop in zip(files, edges, edges[1:], strict=False):
            (folder / name).write_bytes(records[start:stop].data)
    # The official file ends with an empty line; the same bytes, so that checksums agree.
    (folder / version.names_file).write_text("\n".join(version.class_names) + "\n\n")


def read_cifar_python(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official python version.

    The files are pickles; only arrays and plain containers are admitted, nothing is executed.

    Args:
        folder: `cifar-10-batches-py` or `cifar-100-python`, under any name.
        split: `train` or `test`.

    Raises:
        DataNotFoundError: A file of the split is missing.
        DataFormatError: A file is damaged, of another kind, or tries to run something.

    Example:
        >>> import pickle, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [7]}
        >>> _ = (folder / "test_batch").write_bytes(pickle.dumps(batch))
        >>> read_cifar_python(folder).labels.tolist()
        [7]
    """
    folder = Path(folder)
    version, files = _find_split(folder, split, PYTHON_VERSIONS)
    parts = [_read_batch(path, version) for path in files]
    pixels = np.concatenate([planes for planes, _ in parts])  # (n, 3, 32, 32)
    labels = np.concatenate([numbers for _, numbers in parts])
    names, path = version.class_names, folder / version.names_file
    if path.is_file():
        found = _entries(path).get(version.names_key)
        if not isinstance(found, list) or not found:
            raise DataFormatError(f"{path} must have a list `{version.names_key}`.")
        if not all(isinstance(name, str | bytes) for name in found):
            raise DataFormatError(f"{path}: `{version.names_key}` must be a list of text.")
        names = tuple(map(_text, found))
    return make_images(folder, pixels.transpose(0, 2, 3, 1), labels, names)


def _read_batch(path: Path, version: PythonVersion) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    entries = _entries(path)
    data, labels = entries.get("data"), entries.get(version.labels_key)
    if data is None or labels is None:
        there = ", ".join(f"`{key[:SHOWN]}`" for key in list(entries)[:SHOWN])
        raise DataFormatError(
            f"{path} must have the entries `data` and `{version.labels_key}`; "
            f"found {there or 'none'}."
        )
    if isinstance(labels, np.ndarray):  # a copy that somebody made; the official file has a list
        labels = labels.tolist()
    conform(labels, LABELS, str(path), DataFormatError, version.labels_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2:
        raise DataFormatError(f"{path}: `data` must be a uint8 array of shape (n, {PIXEL_BYTES}).")
    if data.shape[1] != PIXEL_BYTES or len(data) != len(labels):
        raise DataFormatError(
            f"{path}: `data` must have shape (n, {PIXEL_BYTES}) with n labels; "
            f"found {data.shape} and {len(labels)} labels."
        )
    return data.reshape(len(data), CHANNELS, SIDE, SIDE), np.array(labels, np.int64)


def _entries(path: Path) -> dict[str, Any]:
    content = read_plain_pickle(path)
    if not isinstance(content, dict):
        raise DataFormatError(f"{path} must hold a dict; found {type(content).__name__}.")
    # Keys are bytes when a Python 3 program copied what it had read with encoding="bytes".
    return {_text(key): value for key, value in content.items()}


def _text(found: str | bytes) -> str:
    return found if isinstance(found, str) else found.decode("utf-8", errors="replace")
