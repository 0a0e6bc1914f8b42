"""Adapters of every method on small networks, for tests of what holds for all methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, required_options, small_convnet
from small_networks import TokenNet, group_norm_convnet
from ttapca.spectral.stream_state import StreamState, leaves

DATA = images(150)
BATCHES = list(images(60, seed=8).split(12))
X = BATCHES[0]

# Options with which a method changes something on these networks, and is quick.
OPTIONS: dict[str, dict[str, Any]] = {
    "cotta": {"views": 3},
    "memo": {"views": 3},
    "sar": {"entropy_margin": 1.1},
    "eata": {"entropy_margin": 6.0, "redundancy_margin": 2.0},
    "rotta": {"update_every": 12},
    "pea": {"drift_factor": 10.0},  # by default the second batch replaces what the first one said
}
OVER_WIENER = {"gain": "wiener", "statistics": "mixed"}
# Ways to use a method that keep something else between batches than the method by its name.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wiener by order": ("wiener", {"order": "auto"}),
    "tent over wiener": ("tent", OVER_WIENER),
    "eata over wiener": ("eata", OVER_WIENER),
    "eata with source data": ("eata", {"source": DATA[:64], "fisher_weight": 1.0}),
    "shot with pseudo-labels": ("shot", {"pseudo_labels": 0.3}),
    "roid without views": ("roid", {"consistency": False}),
    "lame by rbf": ("lame", {"affinity": "rbf"}),
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

# Every method on two kinds of networks; `bn` refuses one without BatchNorm.
CASES = [
    (method, norm)
    for norm in ("BatchNorm", "GroupNorm")
    for method in (*ttapca.METHODS, *VARIANTS)
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
    if method in LEARNING:
        given = {"lr": 0.05} | given
    needed = required_options(method, NETWORKS[norm](), (3, 6, 6))
    return method, needed | OPTIONS.get(method, {}) | given


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
