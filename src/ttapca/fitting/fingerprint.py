"""A fingerprint of weights: some numbers that tell other weights from rounded ones.

Each layer has a row: the mean size of its parameters and buffers, and projections p of them on
random signs. A hash would differ after a cast to another precision. For weights w and w' of one
size, the mean of (p - p')^2 over projections is about |w - w'|^2 / |w|^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ttapca.support.modules import LayerPaths, core_of

PROJECTIONS = 8
COLUMNS = 1 + PROJECTIONS

# Of a large tensor, this many numbers are looked at, evenly spaced.
LOOKED_AT = 4096
SMALLEST = 1e-4  # root mean square: a tensor of smaller numbers counts as zero

# Weights that are farther away are others. Rounded ones were at most 0.03 away: 0.002 in bfloat16,
# 0.01 in 8 bits. Two trainings of one network were 0.4 apart and more, and 20 steps of
# fine-tuning 0.15.
SAME_WEIGHTS = 0.05


def fingerprint(model: nn.Module, paths: Iterable[str]) -> dict[str, Tensor]:
    """Return the rows of layers with weights, shape (`COLUMNS`,); "" is the network itself."""
    known = LayerPaths(model)
    found = {}
    for path in paths:
        layer = known.layers.get(known.find_any(path)) if path else core_of(model)[1]
        row = None if layer is None else _row(layer)
        if row is not None:
            found[path] = row
    return found


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return how far apart the weights of layers known to both are, relative to their size."""
    squares = []
    for path in one.keys() & two.keys():
        away = (one[path] - two[path]).double()
        squares.append(max(float(away[1:].square().mean()), float(away[0].square())))
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


@torch.no_grad()
def _row(layer: nn.Module) -> Tensor | None:
    """Return the logarithm of the mean size of a layer's tensors, and projections of all."""
    sizes, parts = [], []
    named = dict([*layer.named_parameters(), *layer.named_buffers()])
    for _, tensor in sorted(named.items()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        values = tensor.flatten()[:: -(-tensor.numel() // LOOKED_AT)].to("cpu", torch.float64)
        size = float(values.square().mean().sqrt()) + SMALLEST
        sizes.append(math.log(size))
        parts.append(values / (size * math.sqrt(len(values))))
    if not parts:
        return None
    together = torch.cat(parts)
    projections = _signs(len(together)) @ together / math.sqrt(len(parts))
    return torch.cat([torch.tensor([sum(sizes) / len(sizes)]), projections]).float()


def _signs(count: int) -> Tensor:
    """Return random signs, the same on any machine, shape (PROJECTIONS, count), float64."""
    mask = 2**32 - 1
    mixed = torch.arange(1, count + 1) * 2654435761 & mask
    mixed = (mixed ^ (mixed >> 15)) * 739982445 & mask
    mixed = mixed ^ (mixed >> 12)
    bits = mixed >> torch.arange(PROJECTIONS)[:, None] & 1
    return 2.0 * bits.double() - 1.0
