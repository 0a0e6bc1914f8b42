"""MobileNetV2 and EfficientNet-Lite0 against forward passes written out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from networks.by_hand import ByHand, randomised
from ttapca.networks import build
from ttapca.networks.architectures import shapes_of
from ttapca.networks.mobile import SamePadding

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()


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
    hand = ByHand(network)
    x = hand.norm("features.0.1", hand.conv("features.0.0", IMAGES, 2)).clamp(0, 6)
    halving = (2, 4, 7, 14)
    for number in range(1, 18):
        x = inverted_by_hand(hand, f"features.{number}", x, 2 if number in halving else 1)
    x = hand.norm("features.18.1", hand.conv("features.18.0", x)).clamp(0, 6)
    torch.testing.assert_close(network(IMAGES), hand.classify(x, "classifier.1"))


@pytest.mark.parametrize(
    ("kernel", "stride", "size", "before", "after"),
    [(3, 1, 8, 1, 1), (3, 2, 8, 0, 1), (5, 2, 8, 1, 2), (3, 2, 7, 1, 1), (5, 1, 7, 2, 2)],
)
def test_padding_of_tensorflow(
    kernel: int, stride: int, size: int, before: int, after: int
) -> None:
    """As the notes on padding in TensorFlow's documentation of `tf.nn` have it."""
    x = torch.rand(1, 2, size, size + 2 * stride)
    padded = SamePadding(kernel, stride)(x)
    assert padded.shape[2:] == (before + size + after, before + size + 2 * stride + after)
    assert torch.equal(padded[:, :, before : before + size, before : before + size], x[..., :size])
    assert padded.sum() == pytest.approx(float(x.sum()), rel=1e-5)


def test_efficientnet_lite_by_hand() -> None:
    network = randomised(build("efficientnet-lite0", classes=5, input_shape=(3, 64, 64)))
    hand = ByHand(network, 1e-3)

    def padded(name: str, x: Tensor, stride: int, groups: int = 1) -> Tensor:
        weight = hand.weights[f"{name}.weight"]
        around = {(3, 1): (1, 1), (3, 2): (0, 1), (5, 1): (2, 2), (5, 2): (1, 2)}
        sides = around[weight.shape[-1], stride] * 2  # right for an even number of pixels
        return F.conv2d(F.pad(x, sides), weight, stride=stride, groups=groups)

    x = hand.norm("_bn0", padded("_conv_stem", IMAGES, 2)).clamp(0, 6)
    halving = (1, 3, 5, 11)
    for number in range(16):
        block, out = f"_blocks.{number}", x
        if number > 0:
            out = hand.norm(f"{block}._bn0", hand.conv(f"{block}._expand_conv", x)).clamp(0, 6)
        stride = 2 if number in halving else 1
        out = padded(f"{block}._depthwise_conv", out, stride, groups=out.shape[1])
        out = hand.norm(f"{block}._bn1", out).clamp(0, 6)
        out = hand.norm(f"{block}._bn2", hand.conv(f"{block}._project_conv", out))
        x = x + out if out.shape == x.shape else out
    x = hand.norm("_bn1", hand.conv("_conv_head", x)).clamp(0, 6)
    torch.testing.assert_close(network(IMAGES), hand.classify(x, "_fc"))
