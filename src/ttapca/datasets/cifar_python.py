"""The official python versions of CIFAR, which are also torchvision's folder layout.

Each file is a pickled dict: `data` of shape (n, 3072), planes as in the binary version, and
`labels` (CIFAR-10) or `fine_labels` (CIFAR-100). Class names lie in `batches.meta` or `meta`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.cifar_versions import (
    CHANNELS,
    PIXEL_BYTES,
    PYTHON_VERSIONS,
    SIDE,
    PythonVersion,
    find_split,
)
from ttapca.datasets.images import Images
from ttapca.datasets.plain_pickle import read_plain_pickle
from ttapca.datasets.reading import Split, check_labels, check_split, make_images
from ttapca.errors import DataFormatError

SHOWN = 20  # entries that an error lists, and characters of each


def read_cifar_python(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official python version.

    The files are pickles; only arrays and plain containers are admitted, nothing is executed.

    Args:
        folder: `cifar-10-batches-py` or `cifar-100-python`, under any name.
        split: `train` or `test`.

    Returns:
        The images, in the order of the files.

    Raises:
        DataNotFoundError: A file of the split is missing.
        DataFormatError: A file is damaged, of another kind, or tries to run something.

    Example:
        >>> import pickle, tempfile, numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [7]}
        >>> _ = (folder / "test_batch").write_bytes(pickle.dumps(batch))
        >>> read_cifar_python(folder).labels.tolist()
        [7]
    """
    folder, split = Path(folder), check_split(split)
    version, files = find_split(folder, split, PYTHON_VERSIONS)
    parts = [_read_batch(path, version) for path in files]
    pixels = np.concatenate([planes for planes, _ in parts])  # (n, 3, 32, 32)
    labels = np.concatenate([numbers for _, numbers in parts])
    return make_images(folder, pixels.transpose(0, 2, 3, 1), labels, _class_names(folder, version))


def _entries(path: Path) -> dict[str, Any]:
    content = read_plain_pickle(path)
    if not isinstance(content, dict):
        raise DataFormatError(f"{path} must hold a dict; found {type(content).__name__}.")
    # Keys are bytes when a Python 3 program copied what it had read with encoding="bytes".
    return {_text(key): value for key, value in content.items()}


def _read_batch(path: Path, version: PythonVersion) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    entries = _entries(path)
    data, found = entries.get("data"), entries.get(version.labels_key)
    if data is None or found is None:
        there = ", ".join(f"`{key[:SHOWN]}`" for key in list(entries)[:SHOWN])
        raise DataFormatError(
            f"{path} must have the entries `data` and `{version.labels_key}`; "
            f"found {there or 'none'}."
        )
    # Someone's copy may hold an array where the official file has a list.
    labels = check_labels(path, found.tolist() if isinstance(found, np.ndarray) else found)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2:
        raise DataFormatError(f"{path}: `data` must be a uint8 array of shape (n, {PIXEL_BYTES}).")
    if data.shape[1] != PIXEL_BYTES or len(data) != len(labels):
        raise DataFormatError(
            f"{path}: `data` must have shape (n, {PIXEL_BYTES}) with n labels; "
            f"found {data.shape} and {len(labels)} labels."
        )
    return data.reshape(len(data), CHANNELS, SIDE, SIDE), np.array(labels, np.int64)


def _class_names(folder: Path, version: PythonVersion) -> tuple[str, ...]:
    path = folder / version.names_file
    if not path.is_file():
        return version.class_names
    names = _entries(path).get(version.names_key)
    if not isinstance(names, list) or not names:
        raise DataFormatError(f"{path} must have a list `{version.names_key}`.")
    if not all(isinstance(name, str | bytes) for name in names):
        raise DataFormatError(f"{path}: `{version.names_key}` must be a list of text.")
    return tuple(map(_text, names))


def _text(found: str | bytes) -> str:
    return found if isinstance(found, str) else found.decode("utf-8", errors="replace")
