"""Small networks beside those of `oracles`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
    """`small_convnet` with GroupNorm."""
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(3, 8, 3, padding=1))
    net.add_module("bn1", nn.GroupNorm(2, 8))
    net.add_module("act", nn.ReLU())
    net.add_module("conv2", nn.Conv2d(8, 6, 3, stride=2))
    net.add_module("bn2", nn.GroupNorm(3, 6))
    net.add_module("flat", nn.Flatten())
    net.add_module("fc", nn.Linear(24, 5))
    return net
