"""What the library computed at a known point in time: logits of methods, filters of all routes.

    python tests/golden/record.py        writes golden.safetensors beside this file

`tests/test_golden.py` compares. Record again only where a change is meant to change numbers, and
say so in the commit. Everything is float64 on small networks, so that another processor agrees.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import ttapca
from adapters import NEEDS_BATCH_NORM, required_options
from oracles import images, small_convnet
from small_networks import TokenNet, group_norm_convnet

FILE = Path(__file__).with_name("golden.safetensors")
SHAPE = (3, 6, 6)
CLASSES = 5
SOURCE = images(150)
# A clean batch, a noisy one, a dim one, and a single image: a stream in small.
NOISE = torch.randn(12, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
STREAM = [
    images(12, seed=21),
    images(12, seed=22) + 2 * NOISE,
    0.3 * images(12, seed=23),
    images(1, seed=24) + NOISE[:1],
]


def with_weights(model: nn.Module) -> nn.Module:
    """Weights that depend on nothing but a seed."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.3)
    return model.double().eval()


NETWORKS = {
    "BatchNorm": small_convnet,
    "GroupNorm": lambda: with_weights(group_norm_convnet().double()),
    "LayerNorm": lambda: with_weights(TokenNet().double()),
}
# Options that make a method move on these networks.
OPTIONS: dict[str, dict[str, Any]] = {
    "eata": {"entropy_margin": 5 / math.log(CLASSES), "redundancy_margin": 2.0},
    "rdumb": {"entropy_margin": 5 / math.log(CLASSES), "redundancy_margin": 2.0},
    "deyo": {"entropy_margin": 0.99, "shape_margin": 0.0},
    "sar": {"entropy_margin": 0.99},
    "rotta": {"update_every": 12},
    **{key: {"views": 4} for key in ("memo", "cotta")},
    # These were recorded before classes were looked at.
    **{key: {"order": "shuffled"} for key in ("wiener", "match", "two-sided")},
}
# With a filter that does not know what lies outside its basis: the numbers of an earlier time.
BEFORE_MEANS = "wiener without means"
# Closed-form gains under methods that learn something else.
COMBINED = {
    "tent over wiener": ("tent", {"gain": "wiener", "statistics": "mixed"}),
    "eata over wiener": ("eata", {"gain": "wiener", "statistics": "mixed"}),
    "wiener by classes": ("wiener", {"order": "auto"}),
    BEFORE_MEANS: ("wiener", {"center": 0.0}),
}


def logits() -> Iterator[tuple[str, Tensor]]:
    """Of every method, on every network that it takes, forgetting and not."""
    for kind, make in NETWORKS.items():
        fitted = ttapca.fit(make(), "conv1", SOURCE, 15)
        # `ttapca` is `ttapca-relu` by another name.
        methods = {name: (name, {}) for name in ttapca.METHODS if name != "ttapca"} | COMBINED
        for name, (method, extra) in methods.items():
            if method in NEEDS_BATCH_NORM and kind != "BatchNorm":
                continue
            if extra.get("order") == "auto" and fitted.classes_ is None:
                continue
            for forgetting in ("episodic", "online"):
                model = make()
                given = {
                    **required_options(method, model, SHAPE),
                    **OPTIONS.get(method, {}),
                    **extra,
                }
                if ttapca.METHODS[method].method.needs_filter or name in COMBINED:
                    older = dataclasses.replace(fitted, rest_=None)
                    given["filter"] = older if name == BEFORE_MEANS else fitted
                adapter = ttapca.adapt(model, method, forgetting=forgetting, **given)
                found = torch.cat([adapter(batch) for batch in STREAM])
                yield f"{kind}/{name}/{forgetting}", found


def filters() -> Iterator[tuple[str, Tensor]]:
    """What `fit` finds on every route, and what the filter does to a batch."""
    model = small_convnet()
    routes = {"folded": "conv1", "exact": "bn1", "gram": "bn1", "randomised": "bn1", "dct": "bn1"}
    for route, layer in routes.items():
        fitted = ttapca.fit(model, layer, SOURCE, 15, route=route)
        yield f"fit/{route}/singular values", fitted.singular_values_
        yield f"fit/{route}/mean", fitted.mean_
        yield f"fit/{route}/energies", fitted.energies_
        attachment = ttapca.attach(model, fitted, "relu", initial=0.2)
        yield f"fit/{route}/filtered", model(STREAM[1]).detach()
        attachment.detach()


def everything() -> dict[str, Tensor]:
    """All of it by name."""
    torch.set_num_threads(1)
    return {name: tensor.detach().double().contiguous() for name, tensor in (*logits(), *filters())}


if __name__ == "__main__":
    save_file(everything(), FILE)
    sys.stdout.write(f"{FILE}: {FILE.stat().st_size:,} bytes\n")
