"""`wiener` on networks that ship, with images that come in an order or in none."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ttapca
from ttapca import networks
from ttapca.datasets import read_digits, to_tensor


@functools.cache
def digits() -> tuple[nn.Module, ttapca.FittedFilter, Tensor, Tensor]:
    """The network, a filter of it, and the images and labels of the test set."""
    network = networks.load("digits-small-cnn")
    train, test = read_digits("train"), read_digits("test")
    layer = next(name for name, each in network.named_modules() if isinstance(each, nn.Conv2d))
    fitted = ttapca.fit(network, layer, to_tensor(train.images))
    return network, fitted, to_tensor(test.images), torch.as_tensor(np.asarray(test.labels))


def wrong(places: Tensor, method: Any = "wiener", size: int = 50, **given: Any) -> int:
    """How many images are not recognised, if they come one after the other."""
    network, fitted, pixels, labels = digits()
    given |= {"filter": fitted} if method == "wiener" else {}
    with ttapca.adapt(network, method, forgetting="online", **given) as adapted:
        logits = torch.cat([adapted(batch) for batch in pixels[places].split(size)])
    return int((logits.argmax(1) != labels[places]).sum())


def by_class() -> Tensor:
    return digits()[3].argsort(stable=True)


def in_no_order() -> Tensor:
    return torch.randperm(len(digits()[3]), generator=torch.Generator().manual_seed(1))


def test_clean_digits_in_order_are_not_harmed() -> None:
    source = wrong(by_class(), "source")
    assert wrong(by_class()) <= source
    assert wrong(by_class(), order="video") <= source
    assert wrong(by_class(), order="shuffled") > source + 10


def test_clean_digits_in_no_order_are_predicted_as_without() -> None:
    assert wrong(in_no_order()) <= wrong(in_no_order(), "source") + 2
