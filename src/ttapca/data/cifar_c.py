"""The CIFAR-C layout: one `.npy` a corruption, blocks of all images by severity, and `labels.npy`.

The official sets hold five blocks of 10,000. A generated set may hold fewer images or severities;
it says which severities in `corruptions.json`, as `ttapca corrupt` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca.data.classes import CIFAR10_CLASSES, CIFAR100_CLASSES
from ttapca.data.images import Images
from ttapca.data.reading import make_images, reading
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
    manifest = read_manifest(folder)
    block = _block_number(severity, manifest, folder)
    severities = len(_severities(manifest, folder))
    images, labels = _map_npy(path), _map_npy(folder / LABELS_FILE)
    if images.ndim != 4 or len(images) % severities:
        raise DataFormatError(
            f"{path} must have shape (n, height, width, channels) with n a multiple of its "
            f"{severities} severities; found {images.shape}."
        )
    if len(labels) != len(images):
        raise DataFormatError(
            f"{folder / LABELS_FILE} must have a label for each of the {len(images)} images of "
            f"{path.name}; found {len(labels)}."
        )
    size = len(images) // severities
    rows = slice(block * size, (block + 1) * size)
    names = tuple(class_names) if class_names else _class_names(folder, manifest)
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
    try:
        with reading(path):
            content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON or UTF-8; our own errors are ValueErrors too, and say more
        if isinstance(error, DataFormatError):
            raise
        raise DataFormatError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(content, dict):
        raise DataFormatError(f"{path} must hold a JSON object; found {type(content).__name__}.")
    return content


def _severities(manifest: dict[str, Any], folder: Path) -> tuple[int, ...]:
    found = manifest.get("severities", OFFICIAL_SEVERITIES)
    if not isinstance(found, list | tuple) or not found:
        raise DataFormatError(f"{folder / MANIFEST_FILE}: `severities` must list at least one.")
    return tuple(found)


def _block_number(severity: int, manifest: dict[str, Any], folder: Path) -> int:
    severities = _severities(manifest, folder)
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


def _map_npy(path: Path) -> NDArray[Any]:
    with reading(path):
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:  # not an .npy, cut off, or pickled objects
            raise DataFormatError(
                f"{path} is not a plain `.npy` array: {error}. Files with pickled objects are "
                "refused; a truncated one must be fetched again."
            ) from error
    return array


def _class_names(folder: Path, manifest: dict[str, Any]) -> tuple[str, ...] | None:
    named = manifest.get("class_names")
    if isinstance(named, list) and named:
        return tuple(str(name) for name in named)
    return CLASSES_OF_FOLDER.get(folder.name)
