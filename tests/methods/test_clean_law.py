"""The clean law over a small zoo: clean samples are predicted as without, and look like the source.

For networks of all kinds, any number of samples of the fit, batch size and order. Networks that
ship have labels; those with random weights are given their own predictions as labels, so that an
error is a prediction that has changed. `scripts/clean_law.py` measures the same on trained networks
and real data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import convnet
from small_networks import group_norm_convnet, smooth_images
from ttapca import datasets, networks
from ttapca.adaptation.health import Health
from ttapca.datasets import to_tensor

LAW = 0.5  # points that a network may lose which ships
FLIPS = 1.0  # the same for one with random weights
SURE = 10.0  # factor of the logits of random weights, which are near zero without
HELD_OUT = 300
BATCHES = {1: 40, 16: 8, 100: 2}  # how many of each size make a stream
FITS = 6


@dataclass(frozen=True)
class World:
    """A network with samples of the source, and clean ones that the fit has not seen."""

    network: nn.Module
    layer: str
    source: Tensor
    held_out: Tensor
    labels: Tensor
    law: float


def drawn(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def shipped(name: str, layer: str, images: datasets.Images) -> World:
    rows = drawn(len(images), 0)
    samples = to_tensor(np.asarray(images.images))[rows]
    labels = torch.as_tensor(np.asarray(images.labels), dtype=torch.long)[rows]
    return World(
        networks.load(name).eval(),
        layer,
        samples[:-HELD_OUT],
        samples[-HELD_OUT:],
        labels[-HELD_OUT:],
        LAW,
    )


def random_weights(network: nn.Module, layer: str, samples: Tensor) -> World:
    """A world of a network whose statistics are those of its source."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for values in network.parameters():
            if values.dim() > 1:
                fan = values[0].numel()
                values.copy_(torch.randn(values.shape, generator=generator) * (2 / fan) ** 0.5)
        for values in list(network.parameters())[-2:]:  # of the last layer
            values.mul_(SURE)
        network.train()
        network(samples[:-HELD_OUT])
        network.eval()
        labels = network(samples[-HELD_OUT:]).argmax(1)
    return World(network, layer, samples[:-HELD_OUT], samples[-HELD_OUT:], labels, FLIPS)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def walks(*shape: int) -> Tensor:
    """Random walks along the last dimension, of unequal size."""
    sizes = noise(shape[0], *[1] * (len(shape) - 1)).mul(0.3).exp()
    return noise(*shape).cumsum(-1) * sizes / shape[-1] ** 0.5


def momentum_one(norm: nn.Module) -> nn.Module:
    """Let BatchNorm keep the statistics of the one batch that it sees in training mode."""
    for each in norm.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.momentum = 1.0
    return norm


def digits() -> World:
    both = [datasets.load("digits", split) for split in ("train", "test")]
    world = shipped("digits-small-cnn", "conv1", both[1])
    source = to_tensor(np.asarray(both[0].images))
    return World(
        world.network, world.layer, source[drawn(len(source), 1)], world.held_out, world.labels, LAW
    )


def photographs() -> World:
    return shipped("cifar10-resnet20", "conv1", datasets.load("cifar10-500"))


def photographs_layer_norm() -> World:
    return shipped("cifar10-cct2", "conv1", datasets.load("cifar10-500"))


def series() -> World:
    network = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    return random_weights(momentum_one(network), "0", walks(3300, 3, 20))


def table() -> World:
    network = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
    mixing = noise(12, 12) * 0.7 ** torch.arange(12)[:, None]
    return random_weights(momentum_one(network), "0", noise(3300, 12) @ mixing)


def table_without_normalisation() -> World:
    network = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))
    return random_weights(network, "0", noise(3300, 12) @ noise(12, 12))


def clips() -> World:
    network = nn.Sequential(
        nn.Conv3d(1, 6, 3, padding=1),
        nn.BatchNorm3d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(2),
        nn.Flatten(),
        nn.Linear(48, 4),
    )
    return random_weights(momentum_one(network), "0", walks(3300, 1, 3, 6, 6))


def embeddings() -> World:
    network = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)
    )
    return random_weights(network, "1", noise(3300, 16) @ noise(16, 16))


def images_group_norm() -> World:
    return random_weights(group_norm_convnet(), "conv1", smooth_images(3300, 6))


def images() -> World:
    network = momentum_one(convnet(nn.BatchNorm2d(8), nn.BatchNorm2d(6)))
    return random_weights(network, "conv1", smooth_images(3300, 6))


WORLDS: dict[str, Callable[[], World]] = {
    each.__name__: each
    for each in (
        digits,
        photographs,
        photographs_layer_norm,
        series,
        table,
        table_without_normalisation,
        clips,
        embeddings,
        images_group_norm,
        images,
    )
}


@functools.cache
def world(name: str) -> World:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # biases are as torch draws them
        return WORLDS[name]()


@functools.cache
def fitted(name: str, samples: int, seed: int = 0) -> ttapca.FittedFilter:
    one = world(name)
    source = one.source[drawn(len(one.source), seed)[:samples]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few samples
        return ttapca.fit(one.network, one.layer, source)


def batches(name: str, size: int, order: str = "shuffled", seed: int = 0) -> tuple[Tensor, ...]:
    """Places in the held-out samples, batch by batch."""
    places = drawn(HELD_OUT, seed)[: size * BATCHES[size]]
    if order == "sorted":
        places = places[world(name).labels[places].argsort(stable=True)]
    return places.split(size)


def errors_more(name: str, found: Tensor, places: Tensor) -> int:
    """How many errors there are beyond those of the untouched network."""
    one = world(name)
    with torch.no_grad():
        before = one.network(one.held_out[places]).argmax(1)
    wrong = [int((each != one.labels[places]).sum()) for each in (before, found)]
    return wrong[1] - wrong[0]


def cells(samples: dict[str, tuple[int, ...]]) -> list[tuple[str, int, int]]:
    return [(name, each, size) for name in WORLDS for each in samples[name] for size in BATCHES]


FEW = {"photographs": (), "photographs_layer_norm": (128,)}
# What does not hold yet is in docs/clean-law.md: fits on 32 samples, and these cells.
LIKE_SOURCE = [
    cell
    for cell in cells(dict.fromkeys(WORLDS, (128, 1000)) | dict.fromkeys(FEW, ()))
    if cell not in (("digits", 128, 100), ("clips", 128, 100))
]
KEPT = [
    cell
    for cell in cells(dict.fromkeys(WORLDS, (128, 1000)) | FEW)
    if cell
    not in (
        ("table_without_normalisation", 128, 16),
        ("images", 128, 16),
        ("images_group_norm", 128, 1),
        ("images_group_norm", 1000, 1),
    )
]


@pytest.mark.parametrize(("name", "samples", "size"), LIKE_SOURCE)
def test_batches_look_like_the_source(name: str, samples: int, size: int) -> None:
    """P-values are those of several fits: by one fit, all batches have a similar one."""
    p_values = []
    for seed in range(FITS):
        with ttapca.adapt(
            world(name).network, "wiener", filter=fitted(name, samples, seed)
        ) as adapted:
            for places in batches(name, size, seed=seed)[:2]:
                adapted(world(name).held_out[places])
                p_values.append(adapted.health.p_value)
    assert np.mean(np.array(p_values) < 0.01) <= 0.2
    assert np.median(p_values) >= 0.2


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
@pytest.mark.parametrize(
    ("name", "samples", "size", "method"),
    [(*cell, "wiener") for cell in KEPT]
    + [(*cell, method) for cell in KEPT if cell[2] == 16 for method in ("match", "two-sided")],
)
def test_a_stream_keeps_its_predictions(
    name: str, samples: int, size: int, method: str, order: str
) -> None:
    told: list[Health] = []
    one, found = world(name), []
    parts = batches(name, size, order)
    with ttapca.adapt(
        one.network, method, filter=fitted(name, samples), forgetting="online", on_shift=told.append
    ) as adapted:
        for places in parts:
            found.append(adapted(one.held_out[places]).argmax(1))
    assert told == []
    places = torch.cat(parts)
    allowed = max(1, one.law * len(places) / 100)
    assert errors_more(name, torch.cat(found), places) <= allowed
