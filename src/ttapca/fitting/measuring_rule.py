"""Which source images are run through the whole network, to measure its normalisation layers.

Images are measured in blocks: the first ones all, and then one block in 32. Whether an image is
measured follows from its position alone, so parts of the data can be read by different processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.fitting.source_channels import IMAGES_A_CLASS, normalising_layers
from ttapca.spectral.composition import LARGEST_RANK
from ttapca.support.sample_norms import channels_of, is_sample_norm

# The first images are all measured, some for each class, and then one in 32: fitting reads many
# more images than moments need, and runs only a part of the network on them.
MEASURED_FIRST = 1024
MEASURED_PER_CLASS = 16
MOST_MEASURED_FIRST = 8192
ONE_IN = 32

# Running all of a large network takes longer than everything else, so that it sees no more images
# than this many multiply-adds allow, but at least this many images and numbers.
MOST_MULTIPLY_ADDS = 1e12
LEAST_IMAGES = 256
LEAST_NUMBERS = 2**23

NUMBER_BYTES = 4  # float32


@dataclass(frozen=True)
class MeasuringRule:
    """Says which images are measured.

    Attributes:
        first: How many images are measured at first, at least.
        block: Images that are measured together or not at all.
        classes: How many classes there are whose moments will be stored; 0 if none.
        needed: Whether anything is measured.
        expected: How many images will be measured, about; None if nobody knows.

    Example:
        >>> import torch
        >>> rule = MeasuringRule(first=30, block=20, classes=10)
        >>> measured = rule.of(torch.arange(2000))
        >>> int(measured.sum()), measured.nonzero()[[0, -1], 0].tolist()
        (80, [0, 1939])
    """

    first: int
    block: int
    classes: int
    needed: bool = True
    expected: int | None = None

    def of(self, positions: Tensor) -> Tensor:
        """Return whether the image at each of these positions is measured."""
        blocks = positions // self.block
        if not self.needed:
            return blocks < 0
        whole = math.ceil(self.first / self.block)
        return (blocks < whole) | ((blocks >= ONE_IN * whole) & (blocks % ONE_IN == 0))

    def stored_bytes(self, model: nn.Module) -> int:
        """Return the size of what is measured in a saved filter, about."""
        if not self.needed:
            return 0
        layers = normalising_layers(model).values()
        alone = sum(channels_of(layer) for layer in layers if is_sample_norm(layer))
        batch = sum(layer.num_features for layer in layers if isinstance(layer, _BatchNorm))
        directions = 1 + min(self.classes, LARGEST_RANK) if self.classes else 0
        return NUMBER_BYTES * 2 * (alone + directions * (alone + batch))


def measuring_rule(
    model: nn.Module,
    images: int | None,
    classes: int,
    *,
    block: int = 1,
    numbers: int = 1,
    multiply_adds: int = 0,
) -> MeasuringRule:
    """Choose the rule for a network and its data.

    Args:
        model: The network.
        images: How many there are; None if nobody knows.
        classes: How many the model predicts; 0 if none.
        block: How many images are usually read together.
        numbers: In one image.
        multiply_adds: Of the model for one image.
    """
    least = max(LEAST_IMAGES, LEAST_NUMBERS // numbers)
    most = max(least, int(MOST_MULTIPLY_ADDS / max(1, multiply_adds)))
    usual = max(MEASURED_FIRST, min(MEASURED_PER_CLASS * classes, MOST_MEASURED_FIRST))
    first = min(most, usual)
    measured = None if images is None else min(images, max(first, images // ONE_IN))
    if measured is not None and measured < IMAGES_A_CLASS * classes:
        classes = 0  # too few images to tell them apart
    needed = classes > 0 or any(map(is_sample_norm, normalising_layers(model).values()))
    return MeasuringRule(first, block, classes, needed, measured if needed else 0)
