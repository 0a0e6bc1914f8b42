"""Small networks without BatchNorm, for (n, 3, 6, 6) images and four classes."""

from __future__ import annotations

import torch
from torch import nn


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
