"""CIFAR-10 and CIFAR-100 in the official binary and python versions, and the CIFAR-C layout.

docs/data.md has the layouts of their files.
"""

from __future__ import annotations

import hashlib
import pickle
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import ListOf, Plain, Record, Such, Text, Whole, conform
from ttapca.datasets.images import Images
from ttapca.datasets.reading import (
    MAX_CLASSES,
    Split,
    check_split,
    known_checksums,
    make_images,
    map_npy,
    reading,
)
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError, did_you_mean
from ttapca.support.parsing import parse_json, read_bounded

SIDE = 32
CHANNELS = 3
MAX_PICKLE_BYTES = 200_000_000  # the largest official file has 155 MB
PIXEL_BYTES = SIDE * SIDE * CHANNELS

_FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_CLASSES = {name: tuple(each) for name, each in _FACTS.pop("classes").items()}
CIFAR10_CLASSES, CIFAR100_CLASSES = _CLASSES["cifar10"], _CLASSES["cifar100"]

LABELS_FILE = "labels.npy"
CLASSES_OF_FOLDER = {"CIFAR-10-C": CIFAR10_CLASSES, "CIFAR-100-C": CIFAR100_CLASSES}
MANIFEST_FILE = "corruptions.json"
MANIFEST = Record(
    optional={
        "severities": Such(
            ListOf(Whole(1, 5), 1, 5), lambda found: len(set(found)) == len(found), "each one once"
        ),
        "class_names": ListOf(Text(), longest=MAX_CLASSES),
    },
    others=Plain(),
)


@dataclass(frozen=True)
class CifarVersion:
    """The files of one version of CIFAR; `label_bytes` or `labels_key` says which kind it is."""

    folder: str  # its official name
    files: Mapping[Split, tuple[str, ...]]  # of each split, in order
    class_names: tuple[str, ...]  # the official ones
    names_file: str = ""  # binary version: has the names, too
    label_bytes: int = 0  # binary version: bytes before the pixels; the last one is the label
    labels_key: str = ""  # python version: the entry of a data file that holds the labels

    def is_in(self, folder: Path) -> bool:
        """Return whether any data file of this version is in `folder`."""
        return any((folder / name).is_file() for files in self.files.values() for name in files)


def _version(folder: str, files: Mapping[Split, Sequence[str]], **facts: Any) -> CifarVersion:
    by_split = {split: tuple(names) for split, names in files.items()}
    return CifarVersion(folder, by_split, _CLASSES[facts.pop("classes")], **facts)


VERSIONS = tuple(_version(folder, **facts) for folder, facts in _FACTS.items())
CIFAR10_BINARY, CIFAR100_BINARY, *_ = VERSIONS
BINARY_VERSIONS = tuple(each for each in VERSIONS if each.label_bytes)
PYTHON_VERSIONS = tuple(each for each in VERSIONS if each.labels_key)


def find_split(
    folder: Path, split: Split, versions: Sequence[CifarVersion]
) -> tuple[CifarVersion, list[Path]]:
    """Return the version in a folder, and the files of one split."""
    check_split(split)
    version = next((known for known in versions if known.is_in(folder)), None)
    if version is None:
        expected = ", ".join(f"`{known.files[split][0]}`" for known in versions)
        raise DataNotFoundError(f"{folder} holds none of {expected}.")
    return version, [folder / name for name in version.files[split]]


def read_cifar_binary(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official binary version, under any name.

    A split in one file is memory-mapped; the five training files of CIFAR-10 are copied into one
    array of 154 MB. The files may hold fewer images than the official ones.

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
    version, files = find_split(folder, split, BINARY_VERSIONS)
    parts = [_map_records(path, version.label_bytes) for path in files]
    pixels, labels = parts[0]
    if len(parts) > 1:
        labels = np.concatenate([part for _, part in parts])
        # Filled rather than concatenated: numpy would keep the planar strides of the parts.
        pixels = np.empty((len(labels), SIDE, SIDE, CHANNELS), np.uint8)
        np.concatenate([part for part, _ in parts], out=pixels)
    return make_images(folder, pixels, labels, version.class_names)


def read_cifar_python(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official python version, under any name.

    A pickle is a program that Python runs. So only the publisher's own files are read: they are
    known by their checksums.

    Example:
        >>> read_cifar_python("cifar-10-batches-py")  # doctest: +SKIP
        Images(10000 of 32x32x3, 10 classes)
    """
    folder = Path(folder)
    version, files = find_split(folder, split, PYTHON_VERSIONS)
    pixels, labels = list[NDArray[np.uint8]](), list[int]()
    for path in files:
        with reading(path):
            content = read_bounded(path, DataFormatError, MAX_PICKLE_BYTES)
        found = f"md5:{hashlib.md5(content, usedforsecurity=False).hexdigest()}"
        if found != known_checksums(version.folder)[path.name]:
            raise DataFormatError(
                f"{path} must be the publisher's file, because Python would run what another "
                f"pickle asks for; it has another checksum, {found}. Nothing in it was run. Get "
                "the official file, or write your images and labels to an `.npz`."
            )
        # Latin 1 turns the text of Python 2 into as many characters as it has bytes.
        batch = pickle.loads(content, encoding="latin-1")  # noqa: S301
        pixels.append(batch["data"])
        labels += batch[version.labels_key]
    planes = np.concatenate(pixels).reshape(-1, CHANNELS, SIDE, SIDE)
    return make_images(folder, planes.transpose(0, 2, 3, 1), np.array(labels), version.class_names)


def _map_records(path: Path, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    record_bytes = label_bytes + PIXEL_BYTES
    with reading(path):
        size = path.stat().st_size
        count, rest = divmod(size, record_bytes)
        if rest or not count:
            raise DataFormatError(
                f"{path} must be a whole number of records of {record_bytes} bytes; found "
                f"{size} bytes, so it is truncated or of another kind. Get it again."
            )
        records = np.memmap(path, np.uint8, mode="r", shape=(count, record_bytes))
    planes = records[:, label_bytes:].reshape(count, CHANNELS, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), records[:, label_bytes - 1]


def write_cifar_binary(folder: Path, version: CifarVersion, splits: Mapping[Split, Images]) -> None:
    """Write images in the official binary version, which other tools read too.

    The coarse label of CIFAR-100 is written as 0: `Images` has fine labels only. `version` is
    `CIFAR10_BINARY` or `CIFAR100_BINARY`.

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
        records = np.zeros((len(images), version.label_bytes + PIXEL_BYTES), np.uint8)
        records[:, version.label_bytes - 1] = images.labels
        planes = images.images.transpose(0, 3, 1, 2)
        records[:, version.label_bytes :] = planes.reshape(len(images), PIXEL_BYTES)
        files = version.files[split]
        for name, part in zip(files, np.array_split(records, len(files)), strict=True):
            (folder / name).write_bytes(part.data)
    # The official file ends with an empty line; the same bytes, so that checksums agree.
    (folder / version.names_file).write_text("\n".join(version.class_names) + "\n\n")


def read_cifar_c(
    folder: Path | str,
    corruption: str,
    severity: int,
    *,
    class_names: Sequence[str] | None = None,
) -> Images:
    """Read one corruption at one severity, memory-mapped, in the order of the clean test set.

    Args:
        folder: `CIFAR-10-C` or `CIFAR-100-C`, official or generated, under any name.
        corruption: The name of its file without `.npy`, such as `gaussian_noise`.
        severity: 1 to 5.
        class_names: By default those in the manifest, the official ones if the folder has its
            official name, or plain numbers.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "labels.npy", np.tile(np.array([0, 1], np.uint8), 5))
        >>> blocks = np.repeat(np.arange(1, 6, dtype=np.uint8), 2)
        >>> np.save(folder / "fog.npy", np.broadcast_to(blocks[:, None, None, None], (10, 4, 4, 3)))
        >>> fog = read_cifar_c(folder, "fog", severity=3)
        >>> len(fog), int(fog.images.max())
        (2, 3)
    """
    folder = Path(folder)
    known, path = corruptions_in(folder), folder / f"{corruption}.npy"
    if corruption not in known:
        raise DataNotFoundError(
            f"No corruption `{corruption}` in {folder}.{did_you_mean(corruption, known)} "
            f"There are: {', '.join(known) or 'none'}."
        )
    severities = severities_in(folder)
    if severity not in severities:
        raise OptionError(
            f"The severity must be one of {', '.join(map(str, severities))}, which {folder} holds; "
            f"found {severity!r}."
        )
    images, labels = map_npy(path), map_npy(folder / LABELS_FILE)
    if images.ndim != 4 or len(images) % len(severities):
        raise DataFormatError(
            f"{path} must have shape (n, height, width, channels) with n a multiple of its "
            f"{len(severities)} severities; found {images.shape}."
        )
    if labels.shape[:1] != images.shape[:1]:
        raise DataFormatError(
            f"{folder / LABELS_FILE} must have a label for each of the {len(images)} images of "
            f"{path.name}; found {labels.shape[0] if labels.ndim else 'a single number'}."
        )
    size = len(images) // len(severities)
    start = size * severities.index(severity)
    rows = slice(start, start + size)
    names = class_names or read_manifest(folder).get("class_names")
    names = names or CLASSES_OF_FOLDER.get(folder.name)
    return make_images(path, images[rows], np.asarray(labels[rows]), names and tuple(names))


def corruptions_in(folder: Path | str) -> tuple[str, ...]:
    """Return the sorted names of the corruptions in a folder of the CIFAR-C layout.

    Example:
        >>> corruptions_in("nowhere")
        ()
    """
    found = (path.stem for path in Path(folder).glob("*.npy") if path.name != LABELS_FILE)
    return tuple(sorted(found))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of `corruptions.json`; empty for the official sets."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return {}
    with reading(path):
        content = read_bounded(path, DataFormatError)
        found: dict[str, Any] = parse_json(content, str(path), DataFormatError)
        conform(found, MANIFEST, str(path), DataFormatError)
    return found


def severities_in(folder: Path) -> tuple[int, ...]:
    """Return the severities in the order of their blocks; 1 to 5 without a manifest."""
    return tuple(read_manifest(folder).get("severities", range(1, 6)))
