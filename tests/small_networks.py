"""Small networks in addition to those of `oracles`."""

from __future__ import annotations

from collections import OrderedDict

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


def with_last(*last: nn.Module) -> nn.Sequential:
    """A BatchNorm network for (n, 3, 6, 6) images that ends in these layers, the first one `fc`.

    What they take has 4 channels of 6 x 6 pixels.
    """
    layers = {"conv1": nn.Conv2d(3, 4, 3, padding=1), "bn1": nn.BatchNorm2d(4), "act": nn.ReLU()}
    ends = {("fc" if number == 0 else f"last{number}"): each for number, each in enumerate(last)}
    model = nn.Sequential(OrderedDict(layers | ends)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * draws)
        model.bn1.weight.add_(1.0)
    return model.eval()


def with_outputs(count: int, *after: nn.Module) -> nn.Sequential:
    """The same with so many numbers for each image, and these layers after them."""
    return with_last(nn.Sequential(nn.Flatten(), nn.Linear(144, count)), *after)


def pixelwise(count: int, *after: nn.Module) -> nn.Sequential:
    """The same with so many numbers for each pixel."""
    return with_last(nn.Conv2d(4, count, 1), *after)
