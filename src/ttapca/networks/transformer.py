"""A transformer for small images: convolutions make the tokens, and only LayerNorm normalises.

After the compact convolutional transformer of Hassani and others (2021), CCT-2/3x2: two
convolutions with pooling in place of patches, two blocks, and a weighted mean over all tokens in
place of a class token. It trains from scratch on CIFAR-10, which plain vision transformers do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.networks.network import CIFAR_SHAPE, ImageNetwork, Normalisation, conv3x3

STEM, WIDTH, HEADS, BLOCKS = 32, 128, 2, 2


class Attention(nn.Module):
    """Every token looks at all tokens, in several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, count, width = tokens.shape
        parts = self.qkv(tokens).reshape(batch, count, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, ...)
        seen = F.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = self.proj(seen.transpose(1, 2).reshape(batch, count, width))
        return mixed


class Block(nn.Module):
    """Attention and two linear layers, each after LayerNorm and with a shortcut around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.linear2 = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        more: Tensor = self.linear2(self.gelu(self.linear1(self.norm2(tokens))))
        return tokens + more


class CompactTransformer(ImageNetwork):
    """Two convolutions, two blocks of attention, and a weighted mean of the tokens before `fc`."""

    def __init__(
        self,
        classes: int = 10,
        normalisation: str | Normalisation = "none",
        input_shape: Sequence[int] = CIFAR_SHAPE,
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        channels, height, width = self.input_shape
        self.conv1 = conv3x3(channels, STEM)
        self.conv2 = conv3x3(STEM, WIDTH)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)  # halves a side, and rounds up
        tokens = -(-height // 4) * -(-width // 4)
        self.position = nn.Parameter(torch.zeros(1, tokens, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.importance = nn.Linear(WIDTH, 1)
        self.fc = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images in [0, 1]."""
        x = self.pool(self.relu(self.conv1(self.normalise(images))))
        x = self.pool(self.relu(self.conv2(x)))
        tokens = self.norm(self.blocks(x.flatten(2).transpose(1, 2) + self.position))
        weights = self.importance(tokens).softmax(1)  # (batch, tokens, 1)
        logits: Tensor = self.fc((weights * tokens).sum(1))
        return logits
