"""A small vision transformer for scikit-learn's digits, trained in seconds where it is wanted."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.datasets import read_digits, to_tensor
from ttapca.networks.network import ImageNetwork

PATCH, WIDTH, HEADS, BLOCKS = 2, 48, 4, 2
SHAPE, CLASSES = (1, 8, 8), 10
EPOCHS, BATCH, PEAK = 40, 64, 3e-3


class DigitsTransformer(ImageNetwork):
    """Patches of 2x2 pixels, two blocks with LayerNorm before attention, the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__(CLASSES, "none", SHAPE)
        self.patches = nn.Conv2d(SHAPE[0], WIDTH, PATCH, stride=PATCH)
        tokens = (SHAPE[1] // PATCH) * (SHAPE[2] // PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, WIDTH))
        blocks = [
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images in [0, 1]."""
        tokens = self.patches(self.normalise(images)).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.fc(self.norm(self.blocks(tokens)).mean(1))
        return logits


def digits_transformer(seed: int) -> DigitsTransformer:
    """Train one, in evaluation mode; the seed is of weights and order."""
    torch.manual_seed(seed)
    network = DigitsTransformer()
    digits = read_digits("train")
    images, labels = to_tensor(digits.images), torch.from_numpy(digits.labels)
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK, weight_decay=0.05)
    epoch = -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=EPOCHS * epoch)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()
