"""Architectures by name: published sizes, building, MobileNetV2, and the compact transformer."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from networks.by_hand import ByHand, randomised
from ttapca.errors import OptionError
from ttapca.networks import ARCHITECTURES, build
from ttapca.networks.architectures import shapes_of


@pytest.mark.parametrize(
    ("name", "parameters", "entries"),
    [
        # Published counts: chenyaofo's, and for zeros those of common reimplementations.
        ("resnet20", 272_474, None),
        ("resnet56", 855_770, None),
        ("resnet20-zeros", 269_722, None),
        ("resnet110-zeros", 1_727_962, None),
        ("wrn-40-2", 2_243_546, None),
        ("resnet18-cifar", 11_173_962, None),  # kuangliu's, with a 3x3 stem
        ("resnet34-cifar", 21_282_122, None),
        ("cct-2", 246_763, None),
        # torchvision's documentation, and the entries of its files.
        ("resnet18", 11_689_512, 122),
        ("resnet34", 21_797_672, 218),
        ("resnet50", 25_557_032, 320),
        ("resnet101", 44_549_160, 626),
        ("resnet152", 60_192_808, 932),
        ("mobilenet-v2", 3_504_872, 314),
    ],
)
def test_published_parameter_counts(name: str, parameters: int, entries: int | None) -> None:
    classes, shape = (10, (3, 32, 32)) if entries is None else (1000, (3, 224, 224))
    with torch.device("meta"):
        network = ARCHITECTURES[name](classes, "half", shape)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert entries in (None, len(network.state_dict()))


def test_build_is_repeatable_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two = (build("resnet20").state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = build("resnet20", generator=torch.Generator().manual_seed(1)).state_dict()
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_defaults_of_small_images_and_of_photographs() -> None:
    network = build("mobilenet-v2")
    assert (network.classes, network.input_shape) == (1000, (3, 224, 224))
    assert (build("resnet20").classes, build("resnet20").input_shape) == (10, (3, 32, 32))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wrn28-10", {}, "one of wrn.*; found 'wrn28-10'. Did you mean `wrn-28-10`"),
        ("resnet20", {"classes": 0}, "at least 1 class; found 0"),
        *(
            ("resnet20", {"eps": eps}, "`eps` must be a finite number above 0 below 1")
            for eps in (0.0, -1.0, 1.0, math.nan)
        ),
    ],
)
def test_what_cannot_be_built(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(name, **options)  # type: ignore[arg-type]


def attention(hand: ByHand, name: str, tokens: Tensor) -> Tensor:
    """For the tokens of one image, head by head and token by token."""
    query, key, value = hand.linear(f"{name}.qkv", tokens).split(128, 1)
    heads = []
    for start in (0, 64):
        rows = []
        for token in range(len(tokens)):
            likeness = key[:, start : start + 64] @ query[token, start : start + 64]
            rows.append((likeness / math.sqrt(64)).softmax(0) @ value[:, start : start + 64])
        heads.append(torch.stack(rows))
    return hand.linear(f"{name}.proj", torch.cat(heads, 1))


def transformer_by_hand(hand: ByHand, image: Tensor) -> Tensor:
    x = image[None]
    for conv in ("conv1", "conv2"):
        x = F.max_pool2d(hand.conv(conv, x).clamp(min=0), 3, stride=2, padding=1)
    tokens = x[0].flatten(1).T + hand.weights["position"][0]
    for block in ("blocks.0", "blocks.1"):
        normal = hand.layer_norm(f"{block}.norm1", tokens)
        tokens = tokens + attention(hand, f"{block}.attention", normal)
        normal = hand.layer_norm(f"{block}.norm2", tokens)
        wide = F.gelu(hand.linear(f"{block}.linear1", normal))
        tokens = tokens + hand.linear(f"{block}.linear2", wide)
    tokens = hand.layer_norm("norm", tokens)
    shares = hand.linear("importance", tokens).softmax(0)
    return hand.linear("fc", (shares * tokens).sum(0))


def test_the_compact_transformer_by_hand() -> None:
    network = build("cct-2", input_shape=(3, 10, 12)).double().eval()  # 3 x 3 tokens
    generator = torch.Generator().manual_seed(1)
    for value in network.state_dict().values():
        value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    images = torch.rand(2, 3, 10, 12, dtype=torch.float64, generator=generator)
    expected = torch.stack([transformer_by_hand(ByHand(network), image) for image in images])
    torch.testing.assert_close(network(images), expected)


def test_names_of_torchvision() -> None:
    names = {"features.1.conv.2.running_mean", "features.17.conv.3.bias", "classifier.1.weight"}
    assert names <= shapes_of("mobilenet-v2", 10, 3).keys()


def inverted_by_hand(hand: ByHand, block: str, x: Tensor, stride: int) -> Tensor:
    out, last = x, 1
    if f"{block}.conv.3.weight" in hand.weights:
        out, last = hand.norm(f"{block}.conv.0.1", hand.conv(f"{block}.conv.0.0", x)), 2
        out = out.clamp(0, 6)
    depthwise = f"{block}.conv.{last - 1}"
    out = hand.conv(f"{depthwise}.0", out, stride, groups=out.shape[1])
    out = hand.norm(f"{depthwise}.1", out).clamp(0, 6)
    out = hand.norm(f"{block}.conv.{last + 1}", hand.conv(f"{block}.conv.{last}", out))
    return x + out if out.shape == x.shape else out


def test_mobilenet_by_hand() -> None:
    network = randomised(build("mobilenet-v2", classes=5, input_shape=(3, 64, 64)))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()
    hand = ByHand(network)
    x = hand.norm("features.0.1", hand.conv("features.0.0", images, 2)).clamp(0, 6)
    halving = (2, 4, 7, 14)
    for number in range(1, 18):
        x = inverted_by_hand(hand, f"features.{number}", x, 2 if number in halving else 1)
    x = hand.norm("features.18.1", hand.conv("features.18.0", x)).clamp(0, 6)
    torch.testing.assert_close(network(images), hand.classify(x, "classifier.1"))
