"""Small networks in addition to those of `oracles`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oracles import convnet


class TokenNet(nn.Module):
    """LayerNorm on the patches of an image, for (n, 3, 6, 6) images and five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=3)
        self.scaling = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv1(x).flatten(2).transpose(1, 2)
        return self.fc(torch.relu(self.mix(self.scaling(tokens))).mean(1))


def group_norm_convnet() -> nn.Module:
    """`small_convnet` with GroupNorm, as torch initialises it."""
    return convnet(nn.GroupNorm(2, 8), nn.GroupNorm(3, 6))
