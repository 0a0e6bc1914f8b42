"""Networks of photographs against published facts, forward passes by hand, and photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ttapca.benchmark.network_source import fingerprint
from ttapca.datasets import Images
from ttapca.errors import OptionError
from ttapca.networks import ARCHITECTURES, build, evaluate, load
from ttapca.networks.architectures import LayeredNetwork
from ttapca.networks.checkpoints import guess_architecture
from ttapca.networks.mobile import SamePadding
from ttapca.networks.resnets import Bottleneck, stages

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not (SHARED / "imagenet").is_dir(), reason=f"{SHARED}/imagenet is not on this machine"
)


@pytest.mark.parametrize(
    ("name", "parameters", "entries"),
    [
        # torchvision's documentation, and the entries of its files.
        ("resnet18", 11_689_512, 122),
        ("resnet34", 21_797_672, 218),
        ("resnet50", 25_557_032, 320),
        ("resnet101", 44_549_160, 626),
        ("resnet152", 60_192_808, 932),
        ("mobilenet-v2", 3_504_872, 314),
        ("efficientnet-lite0", 4_652_008, 296),  # 4.652M: d-li14/efficientnet-lite.pytorch
    ],
)
def test_published_parameter_counts(name: str, parameters: int, entries: int) -> None:
    with torch.device("meta"):
        network = ARCHITECTURES[name](1000, "imagenet", (3, 224, 224))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert len(network.state_dict()) == entries


def test_names_of_torchvision() -> None:
    with torch.device("meta"):
        names = {
            name: set(ARCHITECTURES[name](10, "half", (3, 64, 64)).state_dict())
            for name in ("resnet18", "resnet50", "mobilenet-v2")
        }
    assert {"layer2.0.downsample.0.weight", "layer4.1.bn2.running_var"} <= names["resnet18"]
    assert not any(name.startswith("layer1.0.downsample") for name in names["resnet18"])
    assert {"layer1.0.downsample.1.bias", "layer3.5.conv3.weight", "fc.bias"} <= names["resnet50"]
    mobile = {"features.1.conv.2.running_mean", "features.17.conv.3.bias", "classifier.1.weight"}
    assert mobile <= names["mobilenet-v2"]


class ByHand:
    """A forward pass with nothing but a state dict; `eps` as stated."""

    def __init__(self, network: nn.Module, eps: float) -> None:
        self.weights, self.eps = network.state_dict(), eps

    def conv(self, name: str, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)

    def norm(self, name: str, x: Tensor) -> Tensor:
        parts = ("running_mean", "running_var", "weight", "bias")
        mean, var, scale, shift = (self.weights[f"{name}.{part}"][:, None, None] for part in parts)
        return (x - mean) / torch.sqrt(var + self.eps) * scale + shift


def bottleneck_by_hand(hand: ByHand, block: str, x: Tensor, strides: tuple[int, int]) -> Tensor:
    out = hand.norm(f"{block}.bn1", hand.conv(f"{block}.conv1", x, strides[0])).clamp(min=0)
    out = hand.norm(f"{block}.bn2", hand.conv(f"{block}.conv2", out, strides[1])).clamp(min=0)
    out = hand.norm(f"{block}.bn3", hand.conv(f"{block}.conv3", out))
    if f"{block}.downsample.0.weight" in hand.weights:
        stride = strides[0] * strides[1]
        x = hand.norm(f"{block}.downsample.1", hand.conv(f"{block}.downsample.0", x, stride))
    return (x + out).clamp(min=0)


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


def randomised(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for value in network.state_dict().values():
        if value.dim() == 1:
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return network.double().eval()


IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("early", [False, True])
def test_a_resnet_by_hand(early: bool) -> None:
    def recipe(channels: int, classes: int) -> dict[str, nn.Module]:
        return {
            **stages("layer", lambda *a: Bottleneck(*a, early_stride=early), (2, 1), (3, 8, 16)),
            "fc": nn.Linear(16, classes),
        }

    network = randomised(LayeredNetwork(recipe, input_shape=(3, 64, 64)))
    hand = ByHand(network, 1e-5)
    x = bottleneck_by_hand(hand, "layer1.0", IMAGES, (1, 1))
    x = bottleneck_by_hand(hand, "layer1.1", x, (1, 1))
    x = bottleneck_by_hand(hand, "layer2.0", x, (2, 1) if early else (1, 2))
    expected = x.mean((2, 3)) @ hand.weights["fc.weight"].T + hand.weights["fc.bias"]
    torch.testing.assert_close(network(IMAGES), expected)


def test_the_stem_of_a_resnet_by_hand() -> None:
    network = randomised(build("resnet18", input_shape=(3, 64, 64), eps=1e-3))
    hand = ByHand(network, 1e-3)
    x = hand.norm("bn1", hand.conv("conv1", IMAGES, 2)).clamp(min=0)
    pooled = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)  # zeros do no harm after a ReLU
    found = network.maxpool(network.relu(network.bn1(network.conv1(IMAGES))))
    torch.testing.assert_close(found, pooled)


def test_mobilenet_by_hand() -> None:
    network = randomised(build("mobilenet-v2", classes=5, input_shape=(3, 64, 64)))
    hand = ByHand(network, 1e-5)
    x = hand.norm("features.0.1", hand.conv("features.0.0", IMAGES, 2)).clamp(0, 6)
    halving = (2, 4, 7, 14)
    for number in range(1, 18):
        x = inverted_by_hand(hand, f"features.{number}", x, 2 if number in halving else 1)
    x = hand.norm("features.18.1", hand.conv("features.18.0", x)).clamp(0, 6)
    weight, bias = (hand.weights[f"classifier.1.{part}"] for part in ("weight", "bias"))
    torch.testing.assert_close(network(IMAGES), x.mean((2, 3)) @ weight.T + bias)


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
    weight, bias = hand.weights["_fc.weight"], hand.weights["_fc.bias"]
    torch.testing.assert_close(network(IMAGES), x.mean((2, 3)) @ weight.T + bias)


def test_files_are_recognised_and_early_strides_must_be_stated(tmp_path: Path) -> None:
    path = tmp_path / "resnet50.pth"
    torch.save({"state_dict": build("resnet50", classes=3).state_dict()}, path)
    usual = load(path, normalisation="imagenet")
    assert usual.input_shape == (3, 224, 224)
    assert usual.layer2[0].conv2.stride == (2, 2)
    early = load(path, "resnet50-early-stride", normalisation="imagenet", input_shape=(3, 64, 64))
    assert early.layer2[0].conv1.stride == (2, 2)
    assert early.layer2[0].conv2.stride == (1, 1)
    assert early.input_shape == (3, 64, 64)
    other_eps = load(path, normalisation="imagenet", eps=1e-3)
    assert {norm.eps for norm in other_eps.modules() if isinstance(norm, nn.BatchNorm2d)} == {1e-3}
    # They have the same weights, and results of one are not those of another.
    assert len({fingerprint(network) for network in (usual, early, other_eps)}) == 3
    with torch.device("meta"):
        mobile = ARCHITECTURES["mobilenet-v2"](7, "half", (1, 64, 64)).state_dict()
    assert guess_architecture(mobile) == "mobilenet-v2"


def test_what_a_new_network_of_photographs_is_like() -> None:
    network = build("mobilenet-v2")
    assert (network.classes, network.input_shape) == (1000, (3, 224, 224))
    assert build("resnet20").classes == 10


@pytest.mark.parametrize("eps", [0.0, -1.0, 1.0, float("nan")])
def test_impossible_eps(eps: float) -> None:
    with pytest.raises(OptionError, match="`eps` must be a finite number above 0 below 1"):
        build("resnet20", eps=eps)


def photographs(count: int) -> Images:
    """Return the centres, 224 by 224, of the first photographs; the number of each is its class."""
    from PIL import Image

    paths = sorted((SHARED / "imagenet" / "photos").glob("*.jpg"))
    pixels = [np.asarray(Image.open(path))[16:240, 16:240] for path in paths[:count]]
    names = tuple(path.stem for path in paths)
    return Images(np.stack(pixels), np.arange(count), names)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "architecture", "eps", "normalisation"),
    [
        ("imagenet_resnet50.safetensors", "resnet50-early-stride", 1e-3, "imagenet-255"),
        ("imagenet_mobilenet_v2.pth", None, None, "imagenet"),
    ],
)
def test_published_weights_know_photographs(
    file: str, architecture: str | None, eps: float | None, normalisation: str
) -> None:
    """Chance would be right once in a thousand; docs/networks.md has the errors on many more."""
    path = SHARED / "weights" / file
    network = load(path, architecture, normalisation=normalisation, eps=eps)
    assert network.classes == 1000
    assert evaluate(network, photographs(32), batch_size=16).error < 50
