"""Adapters of every method on small networks, for tests of what holds for all methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ttapca
from oracles import images, required_options, small_convnet
from small_networks import group_norm_convnet

DATA = images(150)
BATCHES = list(images(60, seed=8).split(12))
X = BATCHES[0]

# Options with which a method changes something on these networks, and is quick.
OPTIONS: dict[str, dict[str, Any]] = {
    "cotta": {"views": 3},
    "memo": {"views": 3},
    "sar": {"entropy_margin": 0.99},
    "eata": {"entropy_margin": 6.0, "redundancy_margin": 2.0},
}
OVER_WIENER = {"gain": "wiener", "statistics": "mixed"}
COMBINED = {"tent over wiener": "tent", "eata over wiener": "eata"}
LEARNING = [name for name, found in ttapca.METHODS.items() if found.method.learns]


def group_norm() -> nn.Module:
    """`group_norm_convnet` with weights that depend on nothing but a seed."""
    net = group_norm_convnet()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3)
    return net.double().eval()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": small_convnet,
    "GroupNorm": group_norm,
}

# Every method on every network that it fits; `bn` refuses one without BatchNorm.
CASES = [
    (method, norm)
    for norm in NETWORKS
    for method in (*ttapca.METHODS, *COMBINED)
    if (method, norm) != ("bn", "GroupNorm")
]


@functools.cache
def fitted(norm: str = "BatchNorm", layer: str = "conv1") -> ttapca.FittedFilter:
    """A filter of 20 components, fitted once."""
    return ttapca.fit(NETWORKS[norm](), layer, DATA, 20)


def adapted(
    method: str,
    norm: str = "BatchNorm",
    *,
    model: nn.Module | None = None,
    layer: str = "conv1",
    **given: Any,
) -> ttapca.Adapter:
    """A method by its name, with options that make it move, on a new network or on this one."""
    given = {"forgetting": "online"} | given
    if method in COMBINED:
        method, given = COMBINED[method], {"filter": fitted(norm, layer)} | OVER_WIENER | given
    if ttapca.METHODS[method].method.needs_filter:
        given = {"filter": fitted(norm, layer)} | given
    if method in LEARNING:
        given = {"lr": 0.05} | given
    needed = required_options(method, NETWORKS[norm](), (3, 6, 6))
    model = NETWORKS[norm]() if model is None else model
    return ttapca.adapt(model, method, **(needed | OPTIONS.get(method, {}) | given))


def same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and plain values are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
