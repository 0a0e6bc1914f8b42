"""Which source images are run through the whole network, to measure its normalisation layers.

They are spread evenly over all data: data are often sorted by class, and the first thousand images
of a folder may have one class. Whether an image is measured follows from its position alone, so
parts of the data can be read by different processes. If nobody knows how many images there are, the
later ones are measured more rarely, and each of them counts for more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.fitting.source_channels import IMAGES_A_CLASS, normalising_layers
from ttapca.spectral.even_sample import spread_of
from ttapca.spectral.source_classes import LARGEST_RANK
from ttapca.support.sample_norms import channels_of, is_sample_norm

# So many images are measured, some for each class, or one in 32 if that is more: fitting reads many
# more images than moments need, and runs only a part of the network on them.
MEASURED = 1024
MEASURED_PER_CLASS = 16
MOST_MEASURED = 8192
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
        wanted: How many images are measured, at least.
        images: How many there are; None if nobody knows.
        classes: How many classes there are whose moments will be stored; 0 if none.
        needed: Whether anything is measured.

    Example:
        >>> rule = MeasuringRule(wanted=100, images=2000, classes=10)
        >>> measured = rule.of(torch.arange(2000))
        >>> int(measured.sum()), [int(each.sum()) for each in measured.split(500)]
        (101, [26, 24, 26, 25])
    """

    wanted: int
    images: int | None
    classes: int
    needed: bool = True

    def rates(self, positions: Tensor) -> Tensor:
        """Return the share of images that is measured around each position, above 0 to 1."""
        images = positions + 1.0 if self.images is None else torch.full_like(positions, self.images)
        return (self.wanted / images.clamp(min=1)).clamp(1 / ONE_IN, 1).double()

    def of(self, positions: Tensor) -> Tensor:
        """Return whether the image at each of these positions is measured."""
        if not self.needed:
            return torch.zeros_like(positions, dtype=torch.bool)
        return spread_of(positions) < self.rates(positions)

    @property
    def expected(self) -> int | None:
        """How many images will be measured, about; None if nobody knows."""
        if not self.needed:
            return 0
        if self.images is None:
            return None
        return min(self.images, max(self.wanted, self.images // ONE_IN))

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
    numbers: int = 1,
    multiply_adds: int = 0,
) -> MeasuringRule:
    """Choose the rule for a network and its data.

    Args:
        model: The network.
        images: How many there are; None if nobody knows.
        classes: How many the model predicts; 0 if none.
        numbers: In one image.
        multiply_adds: Of the model for one image.
    """
    least = max(LEAST_IMAGES, LEAST_NUMBERS // numbers)
    most = max(least, int(MOST_MULTIPLY_ADDS / max(1, multiply_adds)))
    wanted = min(most, max(MEASURED, min(MEASURED_PER_CLASS * classes, MOST_MEASURED)))
    rule = MeasuringRule(wanted, images, classes)
    if rule.expected is not None and rule.expected < IMAGES_A_CLASS * classes:
        classes = 0  # too few images to tell them apart
    needed = classes > 0 or any(map(is_sample_norm, normalising_layers(model).values()))
    return MeasuringRule(wanted, images, classes, needed)
