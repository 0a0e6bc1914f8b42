"""The networks against published facts, and against forward passes written out by hand."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ttapca.datasets import Images
from ttapca.errors import InputTypeError, OptionError, ShapeError
from ttapca.networks import ARCHITECTURES, Normalisation, build, normalisation_of
from ttapca.networks.architectures import LayeredNetwork, shapes_of
from ttapca.networks.network import Recipe
from ttapca.networks.resnets import group_norm_resnet, resnet, small_image_resnet, wide_resnet

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "weights"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")

# Of RobustBench's Standard WRN-28-10: SHA-256 of the sorted lines "name shape".
ROBUSTBENCH_NAMES = "733853da8aaa8952f93cc846d83f8ae7c5665e5a202157657c90cf5cddea0dec"
ROBUSTBENCH_ENTRIES = 155
ROBUSTBENCH_PARAMETERS = 36_479_194
ROBUSTBENCH_BATCH_NORM = 17_952


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_wrn_28_10_is_robustbenchs() -> None:
    shapes = shapes_of("wrn-28-10", 10, 3)
    lines = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
    assert len(shapes) == ROBUSTBENCH_ENTRIES
    assert hashlib.sha256(lines.encode()).hexdigest() == ROBUSTBENCH_NAMES
    with torch.device("meta"):
        network = ARCHITECTURES["wrn-28-10"](10, "none", (3, 32, 32))
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert count(network) == ROBUSTBENCH_PARAMETERS
    assert sum(count(norm) for norm in norms) == ROBUSTBENCH_BATCH_NORM


@needs_shared
def test_the_frozen_facts_are_those_of_the_list() -> None:
    listed = json.loads((SHARED / "robustbench_standard_wrn28_10_keys.json").read_text())
    assert shapes_of("wrn-28-10", 10, 3) == {name: tuple(shape) for name, shape in listed.items()}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Published counts: chenyaofo's, and for zeros those of common reimplementations.
        ("resnet20", 272_474),
        ("resnet56", 855_770),
        ("resnet20-zeros", 269_722),
        ("resnet110-zeros", 1_727_962),
        ("wrn-40-2", 2_243_546),
        ("resnet18-cifar", 11_173_962),  # kuangliu's, with a 3x3 stem
        ("resnet34-cifar", 21_282_122),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    with torch.device("meta"):
        network = ARCHITECTURES[name](10, "half", (3, 32, 32))
    assert count(network) == parameters


class ByHand:
    """Forward passes with nothing but a state dict: what the layouts mean, written out."""

    def __init__(self, network: nn.Module) -> None:
        self.weights = {name: value.double() for name, value in network.state_dict().items()}

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean, var = (self.weights[f"{name}.running_{what}"] for what in ("mean", "var"))
        scale, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        columns = [part[None, :, None, None] for part in (mean, var, scale, shift)]
        return (x - columns[0]) / torch.sqrt(columns[1] + 1e-5) * columns[2] + columns[3]

    def group_norm(self, name: str, x: Tensor) -> Tensor:
        groups = x.reshape(len(x), 8, -1)
        centred = groups - groups.mean(2, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(2, keepdim=True) + 1e-5)
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return scaled.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]

    def classify(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) @ self.weights["fc.weight"].T + self.weights["fc.bias"]


def wide_by_hand(hand: ByHand, x: Tensor) -> Tensor:
    x = hand.conv("conv1", x)
    for stage in (1, 2, 3):
        block = f"block{stage}.layer.0"
        stride = 1 if stage == 1 else 2
        active = hand.norm(f"{block}.bn1", x).clamp(min=0)
        out = hand.norm(f"{block}.bn2", hand.conv(f"{block}.conv1", active, stride)).clamp(min=0)
        if f"{block}.convShortcut.weight" in hand.weights:
            x = hand.conv(f"{block}.convShortcut", active, stride)
        x = x + hand.conv(f"{block}.conv2", out)
    return hand.classify(hand.norm("bn1", x).clamp(min=0))


def residual_by_hand(hand: ByHand, x: Tensor, *, zeros: bool) -> Tensor:
    x = hand.norm("bn1", hand.conv("conv1", x)).clamp(min=0)
    for block in (name.removesuffix(".bn1.bias") for name in hand.weights if ".bn1.bias" in name):
        halved = block.endswith(".0") and block != "layer1.0"
        stride = 2 if halved else 1
        out = hand.norm(f"{block}.bn1", hand.conv(f"{block}.conv1", x, stride)).clamp(min=0)
        out = hand.norm(f"{block}.bn2", hand.conv(f"{block}.conv2", out))
        if halved and zeros:
            nothing = torch.zeros_like(x[:, : x.shape[1] // 2, ::2, ::2])
            x = torch.cat([nothing, x[:, :, ::2, ::2], nothing], 1)
        elif halved:
            x = hand.norm(f"{block}.downsample.1", hand.conv(f"{block}.downsample.0", x, stride))
        x = (x + out).clamp(min=0)
    return hand.classify(x)


def group_norm_by_hand(hand: ByHand, x: Tensor) -> Tensor:
    x = hand.conv("conv1", x)
    for stage in (1, 2, 3):
        for number in range(4):
            block = f"layer{stage}.{number}"
            halved = stage > 1 and number == 0
            out = hand.group_norm(f"{block}.bn1", x).clamp(min=0)
            out = hand.conv(f"{block}.conv1", out, 2 if halved else 1)
            out = hand.conv(f"{block}.conv2", hand.group_norm(f"{block}.bn2", out).clamp(min=0))
            if halved:
                corners = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
                pooled = torch.stack(corners).mean(0)
                x = torch.cat([pooled, torch.zeros_like(pooled)], 1)
            x = x + out
    return hand.classify(hand.group_norm("bn", x).clamp(min=0))


def randomise_norms(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for value in network.state_dict().values():
        if value.dim() == 1 and value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.5)
    return network.double().eval()


SMALL = (3, 16, 16)
ZEROS = partial(resnet, depth=8, zero_shortcut=True)
FOUR_STAGES = partial(small_image_resnet, depth=18, width=8)


@pytest.mark.parametrize(
    ("recipe", "by_hand"),
    [
        (partial(wide_resnet, depth=10, width=1), wide_by_hand),
        (partial(wide_resnet, depth=10, width=2), wide_by_hand),  # its first shortcut convolves
        (partial(resnet, depth=8), partial(residual_by_hand, zeros=False)),
        (ZEROS, partial(residual_by_hand, zeros=True)),
        (FOUR_STAGES, partial(residual_by_hand, zeros=False)),
        (partial(group_norm_resnet, depth=26), group_norm_by_hand),
    ],
    ids=["wide", "wider", "convolution", "zeros", "four-stages", "group-norm"],
)
def test_forward_passes_by_hand(
    recipe: Recipe, by_hand: Callable[[ByHand, Tensor], Tensor]
) -> None:
    images = torch.rand(2, *SMALL, dtype=torch.float64)
    network = randomise_norms(LayeredNetwork(recipe, input_shape=SMALL))
    torch.testing.assert_close(network(images), by_hand(ByHand(network), images))


def test_normalisation_is_part_of_the_network_and_not_of_its_weights() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    plain = build("wrn-10-1").eval()
    normal = build("wrn-10-1", normalisation=Normalisation(mean, std)).eval()
    assert list(normal.state_dict()) == list(plain.state_dict())
    images = torch.rand(4, 3, 32, 32)
    scaled = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normal(images), plain(scaled))
    for other in (copy.deepcopy(normal), pickle.loads(pickle.dumps(normal))):
        assert torch.equal(other(images), normal(images))


def test_build_is_repeatable_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two = (build("resnet20").state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = build("resnet20", generator=torch.Generator().manual_seed(1)).state_dict()
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_normalisation_of_a_data_set() -> None:
    pixels = torch.randint(0, 256, (20, 4, 4, 3), generator=torch.Generator().manual_seed(0))
    pixels[..., 2] = 51
    images = Images(pixels.to(torch.uint8).numpy(), torch.zeros(20).long().numpy(), ("a",))
    found = normalisation_of(images)
    scaled = pixels.double() / 255
    assert found.mean == pytest.approx(scaled.mean((0, 1, 2)).tolist(), abs=1e-4)
    assert found.std[:2] == pytest.approx(
        scaled.std((0, 1, 2), correction=0).tolist()[:2], abs=1e-4
    )
    assert found.std[2] == 1.0  # a constant channel


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("wrn28-10"), "`architecture` must be one of .*; found .wrn28-10.. Did you mean `wrn-28-10`"),
        (lambda: wide_resnet(3, 10, depth=27, width=10), r"must be 6 n \+ 4, .* found 27"),
        (lambda: resnet(3, 10, depth=21), r"must be 6 n \+ 2, .* found 21"),
        (lambda: build("resnet20", classes=0), "at least 1 class; found 0"),
        (lambda: build("resnet20", normalisation="cifar"), "Did you mean `cifar10`"),
        *(
            (partial(build, "small-cnn", input_shape=shape), "`input_shape.* must be")
            for shape in ((32, 32), (3, 0, 32), (3, 10**6, 10**6), (3.0, 32, 32))
        ),
        (lambda: Normalisation((0.5,), (0.0,)), "above 0; found"),
        (lambda: Normalisation((), (1.0,)), "`mean` must be a list of 1 to 1,024 entries; found 0"),
        (lambda: Normalisation((float("nan"),), (1.0,)), r"`mean\[0\]` must be a finite number"),
        (
            lambda: build("resnet20", normalisation=Normalisation((0.1, 0.2), (1.0,))),
            "one for each of the 3 channels; found 2",
        ),
    ],
)
def test_what_makes_no_sense(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()  # type: ignore[operator]


def test_images_of_another_size_or_type() -> None:
    with pytest.raises(ShapeError, match=r"of shape 3x32x32; found 3x64x64. Resize .* `size=`"):
        build("wrn-10-1")(torch.rand(1, 3, 64, 64))
    with pytest.raises(InputTypeError, match=r"in \[0, 1\]; found uint8. Convert pixels"):
        build("wrn-10-1")(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
