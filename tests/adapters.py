"""Adapters of every method on small networks, for tests of what holds for all methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, rotation_head, small_convnet
from small_networks import TokenNet, group_norm_convnet
from ttapca.spectral.stream_state import StreamState, leaves

DATA = images(150)
BATCHES = list(images(60, seed=8).split(12))
X = BATCHES[0]

# The one table of options with which a method changes something on small networks, and is quick.
OPTIONS: dict[str, dict[str, Any]] = {
    "cotta": {"views": 3},
    "memo": {"views": 3},
    "sar": {"entropy_margin": 1.1},  # by default it finds no reliable sample here
    "eata": {"entropy_margin": 6.0, "redundancy_margin": 2.0},
    "rdumb": {"entropy_margin": 6.0, "redundancy_margin": 2.0},
    "deyo": {"entropy_margin": 6.0, "shape_margin": 0.0},
    "rotta": {"update_every": 12},  # learns from the first batch on
    "pea": {"drift_factor": 10.0},  # by default the second batch replaces what the first one said
}
OVER_WIENER = {"gain": "wiener", "statistics": "mixed"}
# Ways to use a method that keep something else between batches than the method by its name.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wiener by order": ("wiener", {"order": "auto"}),
    "tent over wiener": ("tent", OVER_WIENER),
    "eata over wiener": ("eata", OVER_WIENER),
    "eata with source data": ("eata", {"source": DATA[:64], "fisher_weight": 1.0}),
    "roid without views": ("roid", {"consistency": False}),
    "lame by knn": ("lame", {"affinity": "knn"}),
    "lame by linear": ("lame", {"affinity": "linear"}),
    "rotta over wiener": ("rotta", {"gain": "wiener"}),
    "pea without views": ("pea", {"augment": "none"}),
    "neo with a running mean": ("neo", {"momentum": 0.1}),
    "t3a with few supports": ("t3a", {"supports": 2}),
    "ttt by random rotations": ("ttt", {"rotations": "random"}),
}
LEARNING = [name for name, found in ttapca.METHODS.items() if found.method.learns]


def learns(case: str) -> bool:
    """Whether a method or variant takes gradient steps."""
    return VARIANTS.get(case, (case, {}))[0] in LEARNING


def batch_norm_vector_net() -> nn.Module:
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("conv1", nn.Linear(108, 120))
    net.add_module("scaling", nn.BatchNorm1d(120))
    net.add_module("fc", nn.Linear(120, 5))
    return net


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A network whose weights depend on a seed, made without the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double().eval()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": functools.partial(seeded, small_convnet),
    "GroupNorm": functools.partial(seeded, group_norm_convnet),
    "BatchNorm1d": functools.partial(seeded, batch_norm_vector_net),
    "LayerNorm": functools.partial(seeded, TokenNet),
}

NEEDS_SOURCE = ("pea", "foa-shift")
NEEDS_BATCH_NORM = ("bn", "iabn", "unmix-tns")

# Every method on two kinds of networks; `bn` refuses one without BatchNorm.
CASES = [
    (method, norm)
    for norm in ("BatchNorm", "GroupNorm")
    for method in (*ttapca.METHODS, *VARIANTS)
    if norm == "BatchNorm" or method not in NEEDS_BATCH_NORM
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
    """A method or variant, with options that make it move, on a new network or on this one."""
    method, options = options_of(method, norm, layer, **given)
    return ttapca.adapt(NETWORKS[norm]() if model is None else model, method, **options)


def options_of(
    method: str, norm: str = "BatchNorm", layer: str = "conv1", **given: Any
) -> tuple[str, dict[str, Any]]:
    """The name of a method, and options that make it move."""
    method, variant = VARIANTS.get(method, (method, {}))
    given = {"forgetting": "online"} | variant | given
    if "gain" in variant or ttapca.METHODS[method].method.needs_filter:
        given = {"filter": fitted(norm, layer)} | given
    return method, options_for(method, NETWORKS[norm](), **given)


def options_for(
    method: str, model: nn.Module, known: ttapca.FittedFilter | None = None, **given: Any
) -> dict[str, Any]:
    """Options with which a method moves on a model, with this filter if it needs one."""
    options = required_options(method, model) | OPTIONS.get(method, {})
    if known is not None and ttapca.METHODS[method].method.needs_filter:
        options["filter"] = known
    if method in LEARNING:
        options["lr"] = 0.05
    return options | given


def required_options(
    method: str, model: nn.Module, shape: tuple[int, ...] = (3, 6, 6)
) -> dict[str, Any]:
    """The options without which a method does not serve a model with first layer `conv1`."""
    parameter = next(model.parameters())
    if method == "slr+it" and not any(isinstance(each, nn.Conv2d) for each in model.modules()):
        return {"channels": shape[0]}
    if method == "ttt":
        seen: list[Tensor] = []
        handle = model.conv1.register_forward_hook(lambda *call: seen.append(call[2]))
        model(torch.zeros(2, *shape, dtype=parameter.dtype))
        handle.remove()
        head = rotation_head(seen[0][0].numel()).to(parameter.dtype)
        return {"head": head, "split": "conv1"}
    return {"source": images(64, shape=shape).to(parameter)} if method in NEEDS_SOURCE else {}


def same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors, states and plain values are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, StreamState):
        return isinstance(other, StreamState) and same(leaves(one), leaves(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def passes_of(model: nn.Module, batches: list[Tensor], **given: Any) -> list[int]:
    """Return how many forward passes `wiener` took for each batch."""
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    found = []
    with ttapca.adapt(model, "wiener", **given) as adapted:
        for batch in batches:
            before = len(calls)
            adapted(batch)
            found.append(len(calls) - before)
    handle.remove()
    return found
