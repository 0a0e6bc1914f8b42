"""Forward passes with nothing but a state dict, for the oracles of architectures."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class ByHand:
    """The layers of a network, written out; `eps` as stated."""

    def __init__(self, network: nn.Module, eps: float = 1e-5) -> None:
        self.weights, self.eps = network.state_dict(), eps

    def affine(self, name: str, x: Tensor, channels_last: bool = False) -> Tensor:
        scale, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return x * scale + shift if channels_last else x * _columns(scale) + _columns(shift)

    def conv(self, name: str, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean, var = (self.weights[f"{name}.running_{part}"] for part in ("mean", "var"))
        return self.affine(name, (x - _columns(mean)) / torch.sqrt(_columns(var) + self.eps))

    def group_norm(self, name: str, x: Tensor) -> Tensor:
        return self.affine(name, self._alone(x.reshape(len(x), 8, -1)).reshape(x.shape))

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        return self.affine(name, self._alone(x), channels_last=True)

    def classify(self, x: Tensor, name: str = "fc") -> Tensor:
        return self.linear(name, x.mean((2, 3)))

    def _alone(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self.eps)


def _columns(values: Tensor) -> Tensor:
    return values[:, None, None]


def randomised(network: nn.Module) -> nn.Module:
    """Give norms and biases random values, and return the network in float64 for evaluation."""
    generator = torch.Generator().manual_seed(1)
    for value in network.state_dict().values():
        if value.dim() == 1 and value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.5)
    return network.double().eval()
