"""The CIFAR-C layout: an `.npy` for each corruption, with a block for each severity; `labels.npy`.

The official sets hold five blocks of 10,000 images. A generated set may hold fewer images or
severities; it says which severities in `corruptions.json`, as `ttapca corrupt` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttapca._checks import ListOf, Plain, Record, Such, Text, Whole
from ttapca.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES
from ttapca.datasets.images import Images
from ttapca.datasets.reading import MAX_CLASSES, make_images, map_npy, read_json
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean

LABELS_FILE = "labels.npy"
MANIFEST_FILE = "corruptions.json"
OFFICIAL_SEVERITIES = (1, 2, 3, 4, 5)
CLASSES_OF_FOLDER = {"CIFAR-10-C": CIFAR10_CLASSES, "CIFAR-100-C": CIFAR100_CLASSES}
MANIFEST = Record(
    optional={
        "severities": Such(
            ListOf(Whole(1, 5), 1, 5), lambda found: len(set(found)) == len(found), "each one once"
        ),
        "class_names": ListOf(Text(), longest=MAX_CLASSES),
    },
    others=Plain(),
)


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
        class_names: The names of the classes. By default those of the manifest, then those that
            the folder's official name implies, then plain numbers.

    Raises:
        DataNotFoundError: The folder, the labels or the corruption are not there.
        OptionError: The severity is not there.
        DataFormatError: A file is damaged, holds pickled objects, or the lengths disagree.

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
    path = _corruption_file(folder, corruption)
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
    size, block = len(images) // len(severities), severities.index(severity)
    rows = slice(block * size, (block + 1) * size)
    names = class_names or read_manifest(folder).get("class_names")
    names = tuple(names) if names else CLASSES_OF_FOLDER.get(folder.name)
    return make_images(path, images[rows], np.asarray(labels[rows]), names)


def corruptions_in(folder: Path | str) -> tuple[str, ...]:
    """The sorted names of the corruptions that a folder of the CIFAR-C layout holds.

    Example:
        >>> corruptions_in("nowhere")
        ()
    """
    return tuple(
        sorted(path.stem for path in Path(folder).glob("*.npy") if path.name != LABELS_FILE)
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of `corruptions.json` in a generated set; empty for the official ones."""
    path = folder / MANIFEST_FILE
    content: dict[str, Any] = read_json(path, MANIFEST) if path.is_file() else {}
    return content


def severities_in(folder: Path) -> tuple[int, ...]:
    """The severities that a manifest lists, in the order of the blocks; 1 to 5 without one."""
    return tuple(read_manifest(folder).get("severities", OFFICIAL_SEVERITIES))


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
