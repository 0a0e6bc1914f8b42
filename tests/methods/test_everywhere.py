"""Every method on every kind of network, at small batches, and on real digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, left_untouched, required_options, small_convnet
from small_networks import TokenNet, group_norm_convnet
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import AttachError, ShapeError
from ttapca.networks import load

SHAPE = (3, 6, 6)
DATA = images(150)


def batch_norm_vector_net() -> nn.Module:
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("conv1", nn.Linear(108, 120))
    net.add_module("scaling", nn.BatchNorm1d(120))
    net.add_module("fc", nn.Linear(120, 5))
    return net


NETWORKS = {
    "BatchNorm2d": small_convnet,
    "BatchNorm1d": batch_norm_vector_net,
    "GroupNorm": group_norm_convnet,
    "LayerNorm": TokenNet,
}


def network(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[kind]().double().eval()


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_serves_or_says_why_not(method: str, kind: str) -> None:
    """Finite logits of the right shape at batches of 1, 2 and 200, or a clear error."""
    model = network(kind)
    fitted = ttapca.fit(model, "conv1", DATA, 10)
    given: dict[str, Any] = required_options(method, model, SHAPE)
    if ttapca.METHODS[method].method.needs_filter:
        given["filter"] = fitted
    with left_untouched(model, DATA[:4]):
        if method == "bn" and kind in ("GroupNorm", "LayerNorm"):
            with pytest.raises(AttachError, match="the model has none"):
                ttapca.adapt(model, method, **given)
            return
        adapter = ttapca.adapt(model, method, forgetting="online", **given)
        for size in (200, 2, 1):
            batch = images(size, seed=size, shape=SHAPE)
            if size == 1 and kind == "BatchNorm1d" and uses_batch_statistics(adapter):
                with pytest.raises(ShapeError, match="Use a larger batch"):
                    adapter(batch)
                continue
            logits = adapter(batch[:12] if method == "memo" else batch)  # image by image: slow
            assert logits.shape[1] == 5
            assert torch.isfinite(logits).all()
        adapter.detach()


def uses_batch_statistics(adapter: ttapca.Adapter) -> bool:
    """Whether normalisation rests on the batch alone: one vector has no variance."""
    statistics = [s for s in adapter.surfaces if isinstance(s, ttapca.BatchNormStatistics)]
    return any(surface.weight_of(1) == 1.0 for surface in statistics)


@pytest.fixture(scope="module")
def world() -> tuple[nn.Module, ttapca.FittedFilter, Tensor, Tensor]:
    """The demo's network and noisy digits."""
    model = load("digits-small-cnn")
    train, test = read_digits("train"), read_digits("test")
    fitted = ttapca.fit(model, "conv1", to_tensor(train.images), 40)
    generator = torch.Generator().manual_seed(0)
    clean = to_tensor(test.images)
    noisy = (clean + 0.3 * torch.randn(clean.shape, generator=generator)).clamp(0, 1)
    return model, fitted, noisy, torch.from_numpy(test.labels)


def error_of(predict, batches: Tensor, labels: Tensor) -> float:
    wrong = sum(
        int((predict(x).argmax(1) != y).sum())
        for x, y in zip(batches.split(100), labels.split(100), strict=True)
    )
    return 100 * wrong / len(labels)


@pytest.mark.slow
@pytest.mark.parametrize("episodic", [True, False], ids=["episodic", "online"])
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_no_method_makes_noisy_digits_much_worse(method: str, episodic: bool, world) -> None:
    model, fitted, noisy, labels = world
    if method == "memo":  # one image at a time, many views of each
        noisy, labels = noisy[:100], labels[:100]
    if method == "lame":  # made for streams in which neighbours share a class
        order = labels.argsort(stable=True)
        noisy, labels = noisy[order], labels[order]
    given: dict[str, Any] = required_options(method, model, (1, 8, 8))
    if method in ("memo", "cotta"):  # a mirrored digit is another digit, or none
        given |= {"flip": False, "views": 32 if method == "cotta" else 8}
    if ttapca.METHODS[method].method.needs_filter:
        given["filter"] = fitted
    adapter = ttapca.adapt(model, method, forgetting="episodic" if episodic else "online", **given)
    try:
        with torch.no_grad():
            start = error_of(adapter.model, noisy, labels)
        found = error_of(adapter, noisy, labels)
    finally:
        adapter.detach()
    with torch.no_grad():
        source = error_of(model, noisy, labels)
    assert found <= start + 2.0
    if method in ("bn", "tent", "eata"):
        assert found < source
