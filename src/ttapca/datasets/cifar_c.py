"""The CIFAR-C layout: one `.npy` a corruption, blocks of all images by severity, and `labels.npy`.

The official sets hold five blocks of 10,000. A generated set may hold fewer images or severities;
it says which severities in `corruptions.json`, as `ttapca corrupt` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttapca.datasets.arrays import map_npy
from ttapca.datasets.classes import CIFAR10_CLASSES, CIFAR100_CLASSES
from ttapca.datasets.images import Images
from ttapca.datasets.reading import make_images, read_json
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean

LABELS_FILE = "labels.npy"
MANIFEST_FILE = "corruptions.json"
OFFICIAL_SEVERITIES = (1, 2, 3, 4, 5)
CLASSES_OF_FOLDER = {"CIFAR-10-C": CIFAR10_CLASSES, "CIFAR-100-C": CIFAR100_CLASSES}


def read_cifar_c(
    folder: Path | str,
    corruption: str,
    severity: int,
    *,
    class_names: Sequence[str] | None = None,
) -> Images:
    """Read one corruption at one severity, memory-mapped.

    Args:
        folder: `CIFAR-10-C` or `CIFAR-100-C`, official or generated, under any name.
        corruption: The name of its file without `.npy`, such as `gaussian_noise`.
        severity: 1 to 5.
        class_names: The names of the classes. By default those of the manifest, then those that
            the folder's official name implies, then plain numbers.

    Returns:
        The images of that block, in the order of the clean test set.

    Raises:
        DataNotFoundError: The folder, the labels or the corruption are not there.
        OptionError: The severity is not there.
        DataFormatError: A file is damaged, holds pickled objects, or the lengths disagree.

    Example:
        >>> import tempfile, numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "labels.npy", np.tile(np.array([0, 1], np.uint8), 5))
        >>> blocks = np.repeat(np.arange(1, 6, dtype=np.uint8), 2)
        >>> np.save(folder / "fog.npy", np.broadcast_to(blocks[:, None, None, None], (10, 4, 4, 3)))
        >>> fog = read_cifar_c(folder, "fog", severity=3)
        >>> len(fog), int(fog.images.max())
        (2, 3)
    """
    folder = Path(folder)
    path = _corruption_file(folder, corruption)
    known = severities_in(folder)
    block, severities = _block_number(severity, known, folder), len(known)
    images, labels = map_npy(path), map_npy(folder / LABELS_FILE)
    if images.ndim != 4 or len(images) % severities:
        raise DataFormatError(
            f"{path} must have shape (n, height, width, channels) with n a multiple of its "
            f"{severities} severities; found {images.shape}."
        )
    if labels.shape[:1] != images.shape[:1]:
        raise DataFormatError(
            f"{folder / LABELS_FILE} must have a label for each of the {len(images)} images of "
            f"{path.name}; found {labels.shape[0] if labels.ndim else 'a single number'}."
        )
    size = len(images) // severities
    rows = slice(block * size, (block + 1) * size)
    names = tuple(class_names) if class_names else _class_names(folder)
    return make_images(path, images[rows], np.asarray(labels[rows]), names)


def corruptions_in(folder: Path | str) -> tuple[str, ...]:
    """The corruptions that a folder of the CIFAR-C layout holds.

    Args:
        folder: The folder.

    Returns:
        Their names, sorted.

    Example:
        >>> corruptions_in("nowhere")
        ()
    """
    return tuple(
        sorted(path.stem for path in Path(folder).glob("*.npy") if path.name != LABELS_FILE)
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `ttapca corrupt` wrote about a generated set; empty for the official ones.

    Args:
        folder: A folder of the CIFAR-C layout.

    Returns:
        The content of `corruptions.json`.

    Raises:
        DataFormatError: It is not a JSON object.

    Example:
        >>> read_manifest(Path("nowhere"))
        {}
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataFormatError(f"{path} must hold a JSON object; found {type(content).__name__}.")
    return content


def severities_in(folder: Path) -> tuple[int, ...]:
    """The severities of each corruption in a folder of the CIFAR-C layout.

    Args:
        folder: The folder.

    Returns:
        Those that its manifest lists, in the order of the blocks; 1 to 5 without one.

    Raises:
        DataFormatError: The manifest lists none, one twice, or what is no severity.

    Example:
        >>> severities_in(Path("nowhere"))
        (1, 2, 3, 4, 5)
    """
    found = read_manifest(folder).get("severities", list(OFFICIAL_SEVERITIES))
    path = folder / MANIFEST_FILE
    if not isinstance(found, list) or not found:
        raise DataFormatError(f"{path}: `severities` must list at least one.")
    if any(type(each) is not int or each not in OFFICIAL_SEVERITIES for each in found):
        raise DataFormatError(f"{path}: `severities` must be numbers from 1 to 5.")
    if len(set(found)) != len(found):
        raise DataFormatError(f"{path}: `severities` must list each one once; found {found[:9]}.")
    return tuple(found)


def _block_number(severity: int, severities: tuple[int, ...], folder: Path) -> int:
    if severity not in severities:
        raise OptionError(
            f"The severity must be one of {', '.join(map(str, severities))}, which {folder} holds; "
            f"found {severity!r}."
        )
    return severities.index(severity)


def _corruption_file(folder: Path, corruption: str) -> Path:
    known = corruptions_in(folder)
    if corruption in known:
        return folder / f"{corruption}.npy"
    if not known:
        raise DataNotFoundError(f"{folder} holds no corruption: no `.npy` beside `{LABELS_FILE}`.")
    raise DataNotFoundError(
        f"No corruption `{corruption}` in {folder}.{did_you_mean(corruption, known)} "
        f"There are: {', '.join(known)}."
    )


def _class_names(folder: Path) -> tuple[str, ...] | None:
    named = read_manifest(folder).get("class_names")
    if not named:
        return CLASSES_OF_FOLDER.get(folder.name)
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise DataFormatError(f"{folder / MANIFEST_FILE}: `class_names` must be a list of text.")
    return tuple(named)
