"""A filter knows the weights it was fitted on: rounded ones are the same, others are told of."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from fitting.parted import NETWORKS, rewrite
from oracles import images, left_untouched, small_convnet
from ttapca.errors import AttachError, OptionError, OtherWeightsWarning, SavedFilterError
from ttapca.fitting.fingerprint import LOOKED_AT, SAME_WEIGHTS, distance, fingerprint

DATA = images(200)
X = images(12, seed=8)
CASES = [
    ("BatchNorm", "conv1", "folded"),
    ("BatchNorm", "conv1", "dct"),
    ("BatchNorm", "act", "exact"),
    ("GroupNorm", "conv1", "dct"),
    ("LayerNorm", "conv1", "exact"),
]


@cache
def fitted(norm: str, layer: str, route: str) -> ttapca.FittedFilter:
    return ttapca.fit(NETWORKS[norm](), layer, DATA, 20, route=route)


def change(model: nn.Module, how: Callable[[Tensor], Tensor], kind: type = nn.Module) -> nn.Module:
    """Change all floating-point parameters and buffers of layers of a kind."""
    changed = {
        id(each): each
        for module in model.modules()
        if isinstance(module, kind)
        for each in (*module.parameters(), *module.buffers())
    }
    with torch.no_grad():
        for each in changed.values():
            if each.is_floating_point():
                each.copy_(how(each))
    return model


def in_8_bits(weights: Tensor) -> Tensor:
    step = weights.abs().max() / 127
    return (weights / step).round() * step


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_another_precision_is_no_other_weights(case, dtype: torch.dtype | None) -> None:
    model = NETWORKS[case[0]]().to(dtype)
    ttapca.attach(model, fitted(*case), strict=True).detach()
    assert fitted(*case).fingerprint_


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_quantised_weights_are_no_other_weights(case) -> None:
    ttapca.adapt(
        change(NETWORKS[case[0]](), in_8_bits), "wiener", filter=fitted(*case), strict=True
    )


def noisy(weights: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(weights.numel())
    factors = torch.rand(weights.shape, generator=generator, dtype=weights.dtype)
    return weights * (0.4 + 1.2 * factors)  # variances stay above 0


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_network_that_was_trained_again_is_told_of(case) -> None:
    norms = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
    model = change(NETWORKS[case[0]](), noisy, norms)  # a folded basis compares its layer itself
    said = rf"filter at `{case[1]}` was fitted on other weights: .* differ by \d\d+ %.*Fit a filter"
    with pytest.warns(OtherWeightsWarning, match=said) as found:
        adapted = ttapca.adapt(model, "wiener", filter=fitted(*case))
    assert found[0].filename == __file__  # it points at the call of `adapt`
    adapted.detach()
    with pytest.warns(OtherWeightsWarning) as found:
        ttapca.attach(model, fitted(*case)).detach()
    assert found[0].filename == __file__
    refused = pytest.raises(AttachError, match=r"other weights.*or leave `strict` out")
    with left_untouched(model, X), refused:
        ttapca.adapt(model, "wiener", filter=fitted(*case), strict=True)


def test_running_statistics_that_were_measured_again() -> None:
    model = small_convnet().train()
    with torch.no_grad():
        for seed in range(3):
            model(images(50, seed=seed))
    with pytest.warns(OtherWeightsWarning):
        ttapca.adapt(model.eval(), "wiener", filter=fitted("BatchNorm", "conv1", "dct")).detach()


def test_the_layer_alone() -> None:
    model = small_convnet()
    change(model, noisy, nn.Conv2d)
    with pytest.warns(OtherWeightsWarning):
        ttapca.attach(model, fitted("BatchNorm", "conv1", "dct")).detach()
    with pytest.raises(AttachError, match="folded filter belongs to the weights"):
        ttapca.attach(model, fitted("BatchNorm", "conv1", "folded"))


def test_what_comes_after_all_of_that_may_change() -> None:
    model = change(small_convnet(), noisy, nn.Linear)
    ttapca.attach(model, fitted("BatchNorm", "conv1", "dct"), strict=True).detach()


def test_a_layer_without_weights_in_a_network_without_normalisation() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    found = ttapca.fit(model, "1", data)
    assert list(found.fingerprint_) == [""]  # of the network
    ttapca.attach(nn.DataParallel(model), found, strict=True).detach()
    with pytest.warns(OtherWeightsWarning):
        ttapca.attach(change(model, noisy), found).detach()


def test_a_network_without_weights_is_not_compared() -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU())
    found = ttapca.fit(model, "0", DATA.float(), 5)
    assert not found.fingerprint_
    ttapca.attach(model, found).detach()
    with pytest.raises(AttachError, match="knows the weights"):
        ttapca.attach(model, found, strict=True)


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.full((9,), torch.nan)])
def test_a_fingerprint_that_cannot_be_one_is_refused(tmp_path: Path, wrong: Tensor) -> None:
    fitted("BatchNorm", "act", "exact").save(tmp_path / "filter")

    def change(_config: dict, tensors: dict) -> None:
        tensors[next(each for each in tensors if each.startswith("fingerprint:"))] = wrong

    rewrite(tmp_path / "filter", change)
    with pytest.raises(SavedFilterError, match="`fingerprint:"):
        ttapca.load(tmp_path / "filter")


def test_filters_of_older_versions_fit_any_weights() -> None:
    old = dataclasses.replace(fitted("BatchNorm", "act", "exact"), fingerprint_={})
    ttapca.attach(small_convnet(seed=3), old).detach()
    with pytest.raises(AttachError, match=r"saved by an older ttapca.*Fit it again"):
        ttapca.attach(small_convnet(), old, strict=True)
    folded = dataclasses.replace(fitted("BatchNorm", "conv1", "folded"), fingerprint_={})
    ttapca.attach(small_convnet(), folded, strict=True).detach()  # its basis knows


def test_strict_without_a_filter() -> None:
    with pytest.raises(OptionError, match="`strict` would have no effect"):
        ttapca.adapt(small_convnet(), "tent", strict=True)


@given(st.integers(50, LOOKED_AT), st.floats(0.001, 0.5), st.integers(0, 5))
def test_the_distance_is_that_of_the_weights(size: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(size, 1) for _ in range(40)]
    others = copy.deepcopy(layers)
    expected = 0.0
    with torch.no_grad():
        for one, two in zip(layers, others, strict=True):
            one.weight.copy_(torch.randn(1, size, generator=generator))
            one.bias.fill_(1.0)
            two.bias.fill_(1.0)
            more = torch.randn(1, size, generator=generator)
            more *= share * one.weight.norm() / more.norm()
            two.weight.copy_(one.weight + more)
            expected += share**2 / 2 / len(layers)  # two tensors count as their mean
    paths = [str(number) for number in range(len(layers))]
    rows = [fingerprint(nn.Sequential(*each), paths) for each in (layers, others)]
    assert distance(*rows) == pytest.approx(math.sqrt(expected), rel=0.3)


def test_other_sizes_of_the_same_weights_are_others() -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    before = fingerprint(model, ["0"])
    assert distance(before, fingerprint(change(model, lambda x: 2 * x), ["0"])) > SAME_WEIGHTS
