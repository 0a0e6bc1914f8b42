"""Photographs that ship with the package: 500 test images of CIFAR-10, for the demo.

They lie in one PNG, `shipped/cifar10-500.png`, with their labels in a JSON file beside it and a
card that names their source. `scripts/pack_demo.py` writes all three.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ttapca._checks import Record
from ttapca.datasets.cifar import CHANNELS, CIFAR10_CLASSES, SIDE
from ttapca.datasets.images import Images
from ttapca.datasets.pictures import read_picture
from ttapca.datasets.reading import LABELS, Split, check_split, make_images, read_json
from ttapca.errors import DataNotFoundError

CIFAR10_500 = "cifar10-500"
FOLDER = Path(__file__).with_name("shipped")
SHEET_COLUMNS = 25  # images beside one another in the PNG


def read_cifar10_500(split: Split = "test") -> Images:
    """Read 500 test images of CIFAR-10 that ship with the package: photographs without a download.

    They are the first fifty of each class, in the order of the test set (Krizhevsky, 2009). There
    are no training images.

    Raises:
        DataNotFoundError: Training images are asked for.

    Example:
        >>> read_cifar10_500()
        Images(500 of 32x32x3, 10 classes)
    """
    check_split(split)
    if split != "test":
        raise DataNotFoundError(
            f"`{CIFAR10_500}` has test images only, so nothing can be fitted on it. Name a filter "
            "that was fitted on CIFAR-10 with --filter (one ships with cifar10-resnet20), or get "
            "all images with `ttapca data get cifar10` and use --data cifar10."
        )
    facts = read_json(FOLDER / f"{CIFAR10_500}.json", Record({"labels": LABELS, "rows": LABELS}))
    sheet = read_picture(FOLDER / f"{CIFAR10_500}.png")  # (rows x 32, columns x 32, 3)
    tiles = sheet.reshape(-1, SIDE, SHEET_COLUMNS, SIDE, CHANNELS).swapaxes(1, 2)
    pixels = np.ascontiguousarray(tiles).reshape(-1, SIDE, SIDE, CHANNELS)
    return make_images(FOLDER, pixels, np.array(facts["labels"], np.int64), CIFAR10_CLASSES)


def shipped_size() -> int:
    """Return how many bytes the images take in the package."""
    return (FOLDER / f"{CIFAR10_500}.png").stat().st_size
