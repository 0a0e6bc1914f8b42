"""The official binary versions of CIFAR-10 and CIFAR-100.

A file is a row of records of one size: the label (CIFAR-100: the coarse label, then the fine one),
a byte each, and 3,072 bytes of pixels: the red, the green and the blue plane, 32 rows of 32 each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.cifar_versions import (
    BINARY_VERSIONS,
    CHANNELS,
    PIXEL_BYTES,
    SIDE,
    BinaryVersion,
    find_split,
)
from ttapca.datasets.images import Images
from ttapca.datasets.reading import Split, check_split, make_images, read_bytes, reading
from ttapca.errors import DataFormatError, ShapeError

MAX_NAMES_BYTES = 1_000_000  # the names of a hundred classes have less than a thousand


def read_cifar_binary(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official binary version.

    A split in one file is memory-mapped; the five training files of CIFAR-10 are copied into one
    array of 154 MB.

    Args:
        folder: `cifar-10-batches-bin` or `cifar-100-binary`, under any name.
        split: `train` or `test`.

    Returns:
        The images, in the order of the files. CIFAR-100 may hold fewer than the official number.

    Raises:
        DataNotFoundError: A file of the split is missing.
        DataFormatError: A file is truncated or holds impossible labels.

    Example:
        >>> import tempfile, numpy as np
        >>> from ttapca.datasets.cifar_versions import CIFAR10_BINARY, CIFAR10_CLASSES
        >>> folder = Path(tempfile.mkdtemp())
        >>> pixels = np.zeros((2, 32, 32, 3), np.uint8)
        >>> images = Images(pixels, np.array([3, 5]), CIFAR10_CLASSES)
        >>> write_cifar_binary(folder, CIFAR10_BINARY, {"test": images})
        >>> read_cifar_binary(folder).labels.tolist()
        [3, 5]
    """
    folder, split = Path(folder), check_split(split)
    version, files = find_split(folder, split, BINARY_VERSIONS)
    parts = [_map_records(path, version) for path in files]
    pixels, labels = parts[0] if len(parts) == 1 else _join(parts)
    return make_images(folder, pixels, labels, _class_names(folder, version))


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


def _join(
    parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    count = sum(len(labels) for _, labels in parts)
    # Filled rather than concatenated: numpy would keep the planar strides of the parts.
    pixels = np.empty((count, SIDE, SIDE, CHANNELS), np.uint8)
    np.concatenate([part for part, _ in parts], out=pixels)
    return pixels, np.concatenate([labels for _, labels in parts])


def _class_names(folder: Path, version: BinaryVersion) -> tuple[str, ...]:
    path = folder / version.names_file
    if not path.is_file():
        return version.class_names
    content = read_bytes(path, MAX_NAMES_BYTES)
    return tuple(content.decode("utf-8", errors="replace").split()) or version.class_names


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
        >>> import tempfile, numpy as np
        >>> from ttapca.datasets.cifar_versions import CIFAR10_BINARY, CIFAR10_CLASSES
        >>> folder = Path(tempfile.mkdtemp())
        >>> images = Images(np.zeros((1, 32, 32, 3), np.uint8), np.array([9]), CIFAR10_CLASSES)
        >>> write_cifar_binary(folder, CIFAR10_BINARY, {"test": images})
        >>> (folder / "test_batch.bin").stat().st_size
        3073
    """
    for split, images in splits.items():
        if images.images.shape[1:] != (SIDE, SIDE, CHANNELS):
            raise ShapeError(f"CIFAR images are 32x32x3; found {images}.")
        files = version.files[split]
        edges = np.linspace(0, len(images), len(files) + 1).astype(int)
        for name, start, stop in zip(files, edges, edges[1:], strict=False):
            (folder / name).write_bytes(_records(images[start:stop], version).data)
    # The official file ends with an empty line; the same bytes, so that checksums agree.
    (folder / version.names_file).write_text("\n".join(version.class_names) + "\n\n")


def _records(images: Images, version: BinaryVersion) -> NDArray[np.uint8]:
    records = np.zeros((len(images), version.record_bytes), np.uint8)
    records[:, version.label_bytes - 1] = images.labels
    planes = images.images.transpose(0, 3, 1, 2)
    records[:, version.label_bytes :] = planes.reshape(len(images), PIXEL_BYTES)
    return records
