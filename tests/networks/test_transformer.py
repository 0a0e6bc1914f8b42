"""The compact transformer, against its formulas written out token by token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.networks import build
from ttapca.networks.architectures import CompactTransformer


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(weights: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    """For the tokens of one image, head by head and token by token."""
    query, key, value = linear(weights, f"{name}.qkv", tokens).split(128, 1)
    heads = []
    for start in (0, 64):
        rows = []
        for token in range(len(tokens)):
            likeness = key[:, start : start + 64] @ query[token, start : start + 64]
            rows.append((likeness / math.sqrt(64)).softmax(0) @ value[:, start : start + 64])
        heads.append(torch.stack(rows))
    return linear(weights, f"{name}.proj", torch.cat(heads, 1))


def by_hand(weights: dict[str, Tensor], image: Tensor) -> Tensor:
    x = image[None]
    for conv in ("conv1", "conv2"):
        x = F.conv2d(x, weights[f"{conv}.weight"], padding=1).clamp(min=0)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
    tokens = x[0].flatten(1).T + weights["position"][0]
    for block in ("blocks.0", "blocks.1"):
        normal = layer_norm(weights, f"{block}.norm1", tokens)
        tokens = tokens + attention(weights, f"{block}.attention", normal)
        normal = layer_norm(weights, f"{block}.norm2", tokens)
        wide = F.gelu(linear(weights, f"{block}.linear1", normal))
        tokens = tokens + linear(weights, f"{block}.linear2", wide)
    tokens = layer_norm(weights, "norm", tokens)
    shares = linear(weights, "importance", tokens).softmax(0)
    return linear(weights, "fc", (shares * tokens).sum(0))


def test_forward_pass_by_hand() -> None:
    network = build("cct-2", input_shape=(3, 10, 12)).double().eval()  # 3 x 3 tokens
    generator = torch.Generator().manual_seed(1)
    for value in network.state_dict().values():
        value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    images = torch.rand(2, 3, 10, 12, dtype=torch.float64, generator=generator)
    weights = network.state_dict()
    expected = torch.stack([by_hand(weights, image) for image in images])
    torch.testing.assert_close(network(images), expected)


def test_it_is_as_small_as_it_claims() -> None:
    with torch.device("meta"):
        network = CompactTransformer()
    assert sum(parameter.numel() for parameter in network.parameters()) == 246_763
