"""What the tests of single methods share: batches, networks, and how they follow a plain loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ttapca
from oracles import group_norm_net, images, layer_norm_net, small_convnet, with_batch_statistics

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]

every_norm = pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
both_ways = pytest.mark.parametrize("forgetting", ["episodic", "online"])


def sharp(model: nn.Module) -> nn.Module:
    """The same with surer predictions: the weights of its classifier five times as large."""
    with torch.no_grad():
        model[-1].weight *= 5
    return model


def affine_with_batch_statistics(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy that normalises as in training, and its scale and shift."""
    network = with_batch_statistics(model)
    kinds = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    norms = [module for module in network.modules() if isinstance(module, kinds)]
    return network, [parameter for m in norms for parameter in (m.weight, m.bias)]


def set_to(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters other values, in place."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def copied(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Values of their own."""
    return [parameter.detach().clone() for parameter in parameters]


def assert_follows(
    adapter: ttapca.Adapter,
    expected: Sequence[Tensor],
    batches: Sequence[Tensor] = BATCHES,
    *,
    atol: float = 1e-8,
) -> None:
    """Batch by batch, the adapter says what the plain loop said."""
    for x, reference in zip(batches, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=atol)


def distance_moved(method: str, model: nn.Module, **options: object) -> float:
    """How far, squared, a stream takes the parameters from where they started."""
    adapter = ttapca.adapt(model, method, forgetting="online", **options)  # type: ignore[arg-type]
    start = copied(list(adapter.surfaces.parameters()))
    for x in BATCHES:
        adapter(x)
    moved = zip(adapter.surfaces.parameters(), start, strict=True)
    return sum(float((p.detach() - s).square().sum()) for p, s in moved)
