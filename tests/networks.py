"""Small networks without BatchNorm, for (n, 3, 6, 6) images and four classes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def group_norm_net() -> nn.Module:
    """A convolution and GroupNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).double()


def layer_norm_net() -> nn.Module:
    """No convolution, and LayerNorm."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 9), nn.LayerNorm(9), nn.Linear(9, 4)).double()


def sharp(model: nn.Module) -> nn.Module:
    """The same with surer predictions: the weights of its classifier five times as large."""
    with torch.no_grad():
        model[-1].weight *= 5
    return model


def with_batch_statistics(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy that normalises as in training, and its scale and shift, for plain loops."""
    network = copy.deepcopy(model).train()
    kinds = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    norms = [module for module in network.modules() if isinstance(module, kinds)]
    for module in norms:
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
    return network, [parameter for m in norms for parameter in (m.weight, m.bias)]
