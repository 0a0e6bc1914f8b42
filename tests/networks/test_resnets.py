"""ResNets against published facts, and against forward passes written out by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from networks.by_hand import ByHand, randomised
from ttapca.networks import ARCHITECTURES, build
from ttapca.networks.architectures import LayeredNetwork, shapes_of
from ttapca.networks.network import Recipe
from ttapca.networks.resnets import (
    SMALL_WIDTHS,
    BasicBlock,
    Bottleneck,
    group_norm_resnet,
    resnet,
    stages,
    wide_resnet,
)

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "weights"
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


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")
def test_the_frozen_facts_are_those_of_the_list() -> None:
    listed = json.loads((SHARED / "robustbench_standard_wrn28_10_keys.json").read_text())
    assert shapes_of("wrn-28-10", 10, 3) == {name: tuple(shape) for name, shape in listed.items()}


def test_names_of_torchvision() -> None:
    basic, bottlenecks = (set(shapes_of(name, 10, 3)) for name in ("resnet18", "resnet50"))
    assert {"layer2.0.downsample.0.weight", "layer4.1.bn2.running_var"} <= basic
    assert not any(name.startswith("layer1.0.downsample") for name in basic)
    assert {"layer1.0.downsample.1.bias", "layer3.5.conv3.weight", "fc.bias"} <= bottlenecks


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


def bottlenecks(channels: int, classes: int, *, early: bool) -> dict[str, nn.Module]:
    """Make two stages of bottlenecks without a stem: two blocks, and one that halves."""
    block = partial(Bottleneck, early_stride=early)
    return {**stages("layer", block, (2, 1), (channels, 8, 16)), "fc": nn.Linear(16, classes)}


def bottlenecks_by_hand(hand: ByHand, x: Tensor, *, early: bool) -> Tensor:
    halving = (2, 1) if early else (1, 2)
    for block, strides in (("layer1.0", (1, 1)), ("layer1.1", (1, 1)), ("layer2.0", halving)):
        out = hand.norm(f"{block}.bn1", hand.conv(f"{block}.conv1", x, strides[0])).clamp(min=0)
        out = hand.norm(f"{block}.bn2", hand.conv(f"{block}.conv2", out, strides[1])).clamp(min=0)
        out = hand.norm(f"{block}.bn3", hand.conv(f"{block}.conv3", out))
        if f"{block}.downsample.0.weight" in hand.weights:
            shortcut = hand.conv(f"{block}.downsample.0", x, strides[0] * strides[1])
            x = hand.norm(f"{block}.downsample.1", shortcut)
        x = (x + out).clamp(min=0)
    return hand.classify(x)


SMALL = (3, 16, 16)
THREE_STAGES = partial(resnet, blocks=(1, 1, 1), widths=SMALL_WIDTHS)
FORWARD: dict[str, tuple[Recipe, Callable[[ByHand, Tensor], Tensor]]] = {
    "wide": (partial(wide_resnet, depth=10, width=1), wide_by_hand),
    "its first shortcut convolves": (partial(wide_resnet, depth=10, width=2), wide_by_hand),
    "convolution": (THREE_STAGES, partial(residual_by_hand, zeros=False)),
    "zeros": (
        partial(THREE_STAGES, block=partial(BasicBlock, zero_shortcut=True)),
        partial(residual_by_hand, zeros=True),
    ),
    "four stages": (
        partial(resnet, blocks=(2, 2, 2, 2), widths=(8, 8, 16, 32, 64)),
        partial(residual_by_hand, zeros=False),
    ),
    "group norm": (partial(group_norm_resnet, depth=26), group_norm_by_hand),
    "bottlenecks": (partial(bottlenecks, early=False), partial(bottlenecks_by_hand, early=False)),
    "early stride": (partial(bottlenecks, early=True), partial(bottlenecks_by_hand, early=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward_passes_by_hand(name: str) -> None:
    recipe, by_hand = FORWARD[name]
    images = torch.rand(2, *SMALL, dtype=torch.float64)
    network = randomised(LayeredNetwork(recipe, 10, "none", SMALL))
    torch.testing.assert_close(network(images), by_hand(ByHand(network), images))


def test_the_stem_for_photographs_by_hand() -> None:
    network = randomised(build("resnet18", input_shape=(3, 64, 64), eps=1e-3))
    hand, images = ByHand(network, 1e-3), torch.rand(2, 3, 64, 64, dtype=torch.float64)
    x = hand.norm("bn1", hand.conv("conv1", images, 2)).clamp(min=0)
    pooled = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)  # zeros do no harm after a ReLU
    found = network.maxpool(network.relu(network.bn1(network.conv1(images))))
    torch.testing.assert_close(found, pooled)
