"""A network small enough to train in seconds: for the digits demo, tests and first steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ttapca.networks.network import ImageNetwork, Normalisation, conv3x3

DIGITS_SHAPE = (1, 8, 8)


class SmallCNN(ImageNetwork):
    """Three 3x3 convolutions with BatchNorm, an average, a linear classifier.

    Args:
        classes: Length of the logits.
        normalisation: By name or as numbers.
        input_shape: Of one image.

    Example:
        >>> SmallCNN()(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = DIGITS_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        self.conv1 = conv3x3(self.input_shape[0], 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = conv3x3(16, 32, stride=2)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = conv3x3(32, 64)
        self.bn3 = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        x = torch.relu(self.bn1(self.conv1(self.normalise(images))))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits
