"""Conditions on which constants may be chosen: none of them is part of any reported test.

Training images, spoilt by the four extra corruptions, or by one of the fifteen at a severity below
5. What is reported is measured on test images, by the fifteen at severity 5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions import corrupt
from ttapca.datasets import Images

SEED = 1
STANDARD = (
    *("gaussian_noise", "impulse_noise", "defocus_blur", "glass_blur", "zoom_blur", "snow"),
    *("frost", "fog", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
CONDITIONS = [(name, 4) for name in STANDARD] + [(name, 5) for name in EXTRA]


def held_out(train: Images, count: int, home: Path) -> dict[str, Images]:
    """The last `count` training images, clean and in every condition.

    Frost takes its photographs from `home`; without them those that ship, which are the same for
    images of 32 x 32.
    """
    frost = home / "frost" if (home / "frost").is_dir() else None
    first = len(train) - count
    clean = train[first:]
    pixels: NDArray[np.uint8] = np.asarray(clean.images)
    found = {"clean": clean}
    for name, severity in CONDITIONS:
        spoilt = corrupt(pixels, name, severity, SEED, start=first, textures=frost)
        found[f"{name}_{severity}"] = Images(spoilt, clean.labels, clean.class_names)
    return found
