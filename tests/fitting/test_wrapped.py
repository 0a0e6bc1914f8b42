"""A filter fitted on a network in one wrapper fits the same network in any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ttapca
from fitting.parted import NETWORKS, assert_same
from oracles import images, small_convnet
from ttapca.adaptation.surfaces import SpectralGains, StreamStatistics
from ttapca.networks.layer_costs import describe_layers
from ttapca.networks.network import NormalisedNetwork

DATA = images(300)
SHIFTED = images(40, seed=5) + 0.7 * torch.randn(
    40, 3, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64
)


def normalised(network: nn.Module) -> nn.Module:
    """What the command line makes of a network that takes normalised images."""
    return NormalisedNetwork(network, "half").double()


def before(images: Tensor) -> Tensor:
    """What becomes of these images by that normalisation is what the plain network is given."""
    return images * 0.5 + 0.5


# By how they are made: what they make of a network, and what they take instead of its inputs.
WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[Tensor], Tensor]]] = {
    "plain": (lambda network: network, lambda x: x),
    "DataParallel": (nn.DataParallel, lambda x: x),
    "compiled": (lambda network: torch.compile(network, backend="eager"), lambda x: x),
    "normalised": (normalised, before),
    "both": (lambda network: nn.DataParallel(normalised(network)), before),
}


@cache
def fitted(norm: str, wrapper: str) -> ttapca.FittedFilter:
    torch.compiler.reset()
    wrap, given = WRAPPERS[wrapper]
    return ttapca.fit(wrap(NETWORKS[norm]()), "conv1", given(DATA), 20)


@pytest.mark.parametrize(
    ("norm", "wrapper"),
    [(norm, each) for norm in NETWORKS for each in ("DataParallel", "normalised", "both")]
    + [("LayerNorm", "compiled")],
)
def test_the_filter_is_that_of_the_plain_network(norm: str, wrapper: str) -> None:
    found = fitted(norm, wrapper)
    assert found.layer == "conv1"
    assert found.classes_ is not None
    assert not any("mod" in path for path in found.classes_.layers)
    plain = fitted(norm, "plain")
    assert_same(plain, found, 1e-6)


@pytest.mark.parametrize("wrapper", [each for each in WRAPPERS if each != "compiled"])
@pytest.mark.parametrize("norm", NETWORKS)
def test_it_adapts_every_wrapped_network_alike(tmp_path: Path, norm: str, wrapper: str) -> None:
    wrap, given = WRAPPERS[wrapper]
    plain = NETWORKS[norm]()
    fitted(norm, "both").save(tmp_path / "filter", dtype="float64")
    for each in (fitted(norm, "plain"), ttapca.load(tmp_path / "filter")):
        with ttapca.adapt(plain, "wiener", filter=each, forgetting="online") as adapted:
            expected = adapted(SHIFTED)
        with ttapca.adapt(
            wrap(NETWORKS[norm]()), "wiener", filter=each, forgetting="online"
        ) as adapted:
            found = adapted(given(SHIFTED))
        assert not torch.allclose(expected, plain(SHIFTED))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_filter_of_an_older_version_has_the_names_of_its_wrapper() -> None:
    new = fitted("GroupNorm", "plain")
    assert new.classes_ is not None
    old = dataclasses.replace(
        new,
        layer=f"model.{new.layer}",
        group_norm_={f"model.{path}": each for path, each in new.group_norm_.items()},
        classes_=new.classes_.renamed(lambda path: f"model.{path}"),
    )
    outputs = []
    for each in (old, new):
        with ttapca.adapt(NETWORKS["GroupNorm"](), "wiener", filter=each) as adapted:
            outputs.append(adapted(SHIFTED))
    assert torch.equal(*outputs)


def test_surfaces_that_are_put_together_by_hand() -> None:
    found, network = fitted("LayerNorm", "plain"), normalised(NETWORKS["LayerNorm"]())
    statistics = StreamStatistics(source=found.layer_norm_)
    adapted = ttapca.Adapter(network, [statistics, SpectralGains(found, "wiener")])
    assert [each.path for each in statistics.layers] == ["model.scaling"]
    assert adapted(before(SHIFTED)).shape == (40, 5)
    adapted.detach()


@pytest.mark.parametrize("wrapper", ["plain", "DataParallel", "normalised", "both"])
def test_layers_are_listed_by_the_names_that_a_filter_has(wrapper: str) -> None:
    network = WRAPPERS[wrapper][0](small_convnet())
    table = describe_layers(network, (3, 6, 6))
    assert table.recommended == "conv1"
    names = {layer.name for layer in table.layers}
    assert names >= {layer.name for layer in describe_layers(small_convnet(), (3, 6, 6)).layers}
