"""Images of something else, in no order: a network that is confused does not see an order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ttapca
from ttapca import datasets, networks
from ttapca.datasets import to_tensor

NAME = "cifar10-resnet20"


def four_levels(images: Tensor) -> Tensor:
    return (3 * images).round() / 3


def inverted(images: Tensor) -> Tensor:
    return 1 - images


def near(images: Tensor) -> Tensor:
    return functional.interpolate(images[:, :, 8:24, 8:24], scale_factor=2, mode="bilinear")


@pytest.mark.parametrize("change", [four_levels, inverted, near])
def test_errors_are_hardly_more_than_without(change: Callable[[Tensor], Tensor]) -> None:
    found = datasets.load("cifar10-500")
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    images = change(to_tensor(found.images)[order]).contiguous()
    labels = torch.as_tensor(found.labels)[order]
    network = networks.load(NAME)
    with torch.no_grad():
        untouched = network(images)
    fitted = ttapca.load(networks.packaged_filters()[NAME])
    with ttapca.adapt(network, "wiener", filter=fitted, forgetting="online") as adapted:
        predicted = torch.cat([adapted(batch) for batch in images.split(250)])
    wrong = [
        float(100 * (each.argmax(1) != labels).double().mean()) for each in (predicted, untouched)
    ]
    assert wrong[0] <= wrong[1] + 3
