"""Small networks in addition to those of `oracles`."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
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


class PatchTransformer(nn.Module):
    """A vision transformer for square images of three colours, with random weights.

    Its embedding is a convolution, or a linear layer on patches that `forward` cuts out.
    """

    def __init__(
        self, side: int, patch: int, width: int, *, linear: bool = False, classes: int = 5
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = (
            nn.Linear(3 * patch**2, width) if linear else nn.Conv2d(3, width, patch, stride=patch)
        )
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for values in self.parameters():
                values.copy_(torch.randn(values.shape, generator=generator) / width**0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.embed, nn.Linear):
            cut = F.unfold(x, self.patch, stride=self.patch)
            tokens = self.embed(cut.transpose(1, 2))
        else:
            tokens = self.embed(x).flatten(2).transpose(1, 2)
        first = self.token.expand(len(x), -1, -1)
        tokens = torch.cat([first, tokens], 1) + self.position
        return self.head(self.norm(self.block(tokens))[:, 0])


def smooth_images(n: int, side: int, seed: int = 1) -> Tensor:
    """Images of three colours in [0, 1] that vary slowly, as photographs do."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(n, 3, 4, 4, generator=generator)
    return F.interpolate(small, (side, side), mode="bilinear")


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
