"""Where a filter can go: counts against torch's own counter and against real filters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ttapca
from small_networks import PatchTransformer
from ttapca.errors import ShapeError
from ttapca.networks import LayerFacts, build, describe_layers


@pytest.mark.parametrize("name", ["resnet20", "wrn-16-2", "resnet26-gn"])
def test_multiply_adds_as_torch_counts_them(name: str) -> None:
    network = build(name).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(1, 3, 32, 32))
    table = describe_layers(network, (3, 32, 32))
    assert 2 * table.multiply_adds == counter.get_total_flops()
    assert table.recommended == "conv1"
    assert table.parameters == sum(p.numel() for p in network.parameters())


def facts(network: nn.Module, shape: tuple[int, ...], components: int) -> dict[str, LayerFacts]:
    return {layer.name: layer for layer in describe_layers(network, shape, components).layers}


def test_the_papers_layer() -> None:
    stem = facts(build("wrn-10-1"), (3, 32, 32), 2000)["conv1"]
    assert (stem.outputs, stem.output_shape, stem.folds) == (16_384, (16, 32, 32), True)
    assert stem.multiply_adds == 2 * 3072 * 2000
    assert stem.filter_bytes == pytest.approx(49e6, rel=0.01)


@pytest.mark.parametrize("layer", ["conv1", "bn1", "layer1", "normalise"])
def test_bytes_as_a_real_filter_has_them(layer: str) -> None:
    network = build("resnet20", input_shape=(3, 8, 8))
    images = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    fitted = ttapca.fit(network, layer, images, n_components=10)
    attachment = ttapca.attach(network, fitted)
    expected = sum(buffer.nbytes for buffer in attachment.filter.buffers())
    attachment.detach()
    told = facts(network, (3, 8, 8), 10)[layer]
    assert told.filter_bytes == expected
    assert told.folds == fitted.basis.at_input


def test_the_network_is_left_as_it_was() -> None:
    network = build("resnet20")
    network.layer1.eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    describe_layers(network, (3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training
    assert not network.layer1.training
    assert not any(module._forward_hooks for module in network.modules())


class Odd(nn.Module):
    """One layer that is called twice, one that gives no tensor, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.pair = Pair()
        self.never = nn.Linear(4, 4)
        self.narrow = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.narrow(self.pair(self.twice(self.twice(x)))[0])
        return logits


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_layers_that_cannot_carry_a_filter() -> None:
    table = describe_layers(Odd(), (4,), 3)
    by_name = {layer.name: layer for layer in table.layers}
    assert set(by_name) == {"twice", "narrow"}
    assert by_name["twice"].calls == 2
    assert table.recommended == "narrow"  # nothing folds: the first that is called once
    assert by_name["narrow"].components == 2  # it cannot have three

    nothing = describe_layers(nn.Identity(), (4,))
    assert (nothing.recommended, nothing.layers) == (None, ())
    assert facts(nn.Sequential(nn.ReLU()), (4,), 2)["0"].relative_cost is None


@pytest.mark.parametrize(
    ("network", "layer"),
    [
        (PatchTransformer(32, 4, 48), "embed"),  # as many outputs as inputs
        (PatchTransformer(32, 4, 12), "embed"),  # fewer
        (nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 3)), "1"),
        (nn.Sequential(nn.Identity(), PatchTransformer(32, 4, 48, linear=True)), "0"),
        (nn.Sequential(nn.Unfold(4, stride=4), nn.Linear(64, 4)), "0"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)), "0"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3072, 4000)), "1"),
    ],
)
def test_the_layer_that_takes_the_images_is_recommended(network: nn.Module, layer: str) -> None:
    table = describe_layers(network, (3, 32, 32))
    assert (table.recommended, table.advice) == (layer, "")


def test_advice_where_no_layer_takes_the_images() -> None:
    table = describe_layers(PatchTransformer(32, 4, 48, linear=True), (3, 32, 32))
    assert table.recommended == "block.linear1"
    assert "through an `nn.Identity` first" in table.advice
    # Patches of large images that are made longer: all of the numbers are there, but too many.
    table = describe_layers(PatchTransformer(128, 16, 1024, linear=True), (3, 128, 128))
    assert table.recommended == "embed"
    assert "through an `nn.Identity` first" in table.advice
    assert describe_layers(nn.Sequential(nn.ReLU(), nn.Linear(4, 9)), (4,)).advice == ""


def test_cosines_may_be_more_than_outputs() -> None:
    layers = facts(PatchTransformer(64, 16, 12), (3, 64, 64), 5000)
    assert (layers["embed"].components, layers["embed"].outputs) == (5000, 192)
    layers = facts(PatchTransformer(16, 8, 12), (3, 16, 16), 5000)
    assert (layers["embed"].components, layers["embed"].folds) == (48, True)


def test_an_image_of_another_shape() -> None:
    with pytest.raises(ShapeError, match=r"cannot take samples of shape \(5,\).*such as 3x224x224"):
        describe_layers(Odd(), (5,))
    with pytest.raises(ShapeError, match=r"takes batches of images of shape 3x32x32"):
        describe_layers(build("wrn-10-1"), (3, 8, 8))
