"""A path names one layer, whatever wraps the network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ttapca.errors import LayerNotFoundError
from ttapca.networks.network import NormalisedNetwork
from ttapca.support.modules import LayerPaths, core_of, find_layer


class Body(nn.Module):
    """A network that really has a layer called `model`, and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))


class Twice(nn.Module):
    """A network with a layer of one name inside and outside of a part called `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.model = nn.ModuleDict({"first": nn.Linear(4, 3), "last": nn.Linear(3, 2)})


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


WRAPPERS = {
    "": lambda network: network,
    "module.": nn.DataParallel,
    "_orig_mod.": lambda network: torch.compile(network, backend="eager"),
    "model.": lambda network: NormalisedNetwork(network, "half"),
    "module.model.": lambda network: nn.DataParallel(NormalisedNetwork(network, "half")),
    "model._orig_mod.": lambda network: NormalisedNetwork(
        torch.compile(network, backend="eager"), "half"
    ),
}


@pytest.mark.parametrize("written", ["", "module.", "_orig_mod.", "model.", "module.model."])
@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrappers_are_looked_through_in_both_directions(prefix: str, written: str) -> None:
    network = plain()
    paths = LayerPaths(WRAPPERS[prefix](network))
    found = paths.find(f"{written}1")
    assert found == f"{prefix}1"
    assert paths.layers[found] is network[1]
    assert paths.canonical(found) == "1"


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_the_core_is_the_network(prefix: str) -> None:
    network = plain()
    assert core_of(WRAPPERS[prefix](network)) == (prefix, network)


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_a_layer_that_is_really_called_model(prefix: str) -> None:
    network = Body()
    wrapped = WRAPPERS[prefix](network)
    assert core_of(wrapped) == (prefix, network)
    for path in ("model.0", "head"):
        assert find_layer(wrapped, path) is network.get_submodule(path)
        assert LayerPaths(wrapped).canonical(f"{prefix}{path}") == path
    # Behind a wrapper that calls its network `model`, this alone is the whole network.
    paths = LayerPaths(wrapped)
    itself = paths.canonical(f"{prefix}model")
    assert paths.layers[paths.find(itself)] is network.model
    assert find_layer(network, itself) is network.model


def test_an_exact_path_wins() -> None:
    network = Twice()
    assert find_layer(network, "first") is network.first
    assert find_layer(network, "model.first") is network.model["first"]
    # A path that could be mistaken keeps all of its names.
    assert [LayerPaths(network).canonical(path) for path in ("first", "model.first")] == [
        "first",
        "model.first",
    ]
    wrapped = nn.DataParallel(network)
    assert find_layer(wrapped, "model.first") is network.model["first"]
    assert find_layer(wrapped, "first") is network.first


def test_a_part_that_is_wrapped() -> None:
    network = plain()
    whole = nn.Sequential(nn.Linear(4, 4), nn.DataParallel(network))
    assert find_layer(whole, "1.0") is network[0]
    assert LayerPaths(whole).canonical("1.module.0") == "1.0"


def test_several_that_a_path_may_stand_for() -> None:
    network = nn.ModuleDict({"module": plain(), "_orig_mod": plain()})
    with pytest.raises(LayerNotFoundError, match=r"for: `module.0` and `_orig_mod.0`\. Name one"):
        find_layer(network, "model.0")
    network["0"] = nn.Linear(1, 1)
    assert find_layer(network, "0") is network["0"]
    assert find_layer(network, "module.0") is network["module"][0]


def test_no_such_layer() -> None:
    with pytest.raises(LayerNotFoundError, match=r"no layer `model.2`. There are: `0`, `1`."):
        find_layer(plain(), "model.2")
