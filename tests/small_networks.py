"""Small networks beside those of `oracles`, and what plain loops of some methods do to them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def sharp(model: nn.Module) -> nn.Module:
    """The same with surer predictions: the weights of its classifier five times as large."""
    with torch.no_grad():
        model[-1].weight *= 5
    return model


def affine_with_batch_statistics(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy that normalises as in training, and its scale and shift, for plain loops."""
    network = copy.deepcopy(model).train()
    kinds = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    norms = [module for module in network.modules() if isinstance(module, kinds)]
    for module in norms:
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
    return network, [parameter for m in norms for parameter in (m.weight, m.bias)]


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
