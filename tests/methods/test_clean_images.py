"""Clean images are left alone: the network and filter that ship, in any order and batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from ttapca import datasets, networks
from ttapca.datasets import to_tensor

NAME = "cifar10-resnet20"
IMAGES = 200
USUAL = 0.2  # p-value: a fifth of clean batches are less usual, and may be filtered a little


@functools.cache
def photographs() -> tuple[Tensor, Tensor]:
    """All of the 500 images that ship, and their labels."""
    found = datasets.load("cifar10-500")
    return to_tensor(found.images), torch.as_tensor(np.asarray(found.labels))


@functools.cache
def world() -> tuple[nn.Module, ttapca.FittedFilter]:
    """The network and its filter."""
    return networks.load(NAME), ttapca.load(networks.packaged_filters()[NAME])


def drawn(images: int, seed: int) -> Tensor:
    """Some of the images, in no order."""
    return torch.randperm(500, generator=torch.Generator().manual_seed(seed))[:images]


def sorted_by_class(places: Tensor) -> Tensor:
    return places[photographs()[1][places].argsort(stable=True)]


def in_runs_of_five(places: Tensor) -> Tensor:
    """Runs of five images of one class, in no order."""
    labels = photographs()[1][places]
    runs = [run for label in labels.unique() for run in places[labels == label].split(5)]
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(1))
    return torch.cat([runs[number] for number in order.tolist()])


def untouched(places: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = world()[0](photographs()[0][places])
    return found


def error(logits: Tensor, places: Tensor) -> float:
    """Share of wrong predictions in percent."""
    return float(100 * (logits.argmax(1) != photographs()[1][places]).double().mean())


@pytest.mark.parametrize("order", [torch.Tensor.clone, sorted_by_class, in_runs_of_five])
@pytest.mark.parametrize("size", [1, 16, 100])
def test_errors_are_not_more_than_without(size: int, order: Callable[[Tensor], Tensor]) -> None:
    places = order(drawn(IMAGES, 0))
    if size == 1:
        places = places[:100]
    network, fitted = world()
    with ttapca.adapt(network, "wiener", filter=fitted, forgetting="online") as adapted:
        found = torch.cat([adapted(batch) for batch in photographs()[0][places].split(size)])
        shift = adapted.health.shift
    assert error(found, places) <= error(untouched(places), places) + 0.5
    assert shift is not None
    assert shift < (0.5 if size == 1 else 0.1)  # single images tell less


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_in_no_order_has_the_networks_own_logits(seed: int) -> None:
    """Bit for bit; a batch that is unusual by chance is filtered, and predicted as without."""
    places = drawn(100, seed)
    network, fitted = world()
    with ttapca.adapt(network, "wiener", filter=fitted, forgetting="online") as adapted:
        found, health = adapted(photographs()[0][places]), adapted.health
    expected = untouched(places)
    assert health.p_value is not None
    if health.p_value >= USUAL:
        assert torch.equal(found, expected)
    else:
        assert seed == 2  # the others are usual
        assert torch.equal(found.argmax(1), expected.argmax(1))
        torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
