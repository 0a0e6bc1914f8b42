"""Train networks that results.md reports beside the shipped ones; half an hour each, on one core.

    python scripts/robust_networks.py convnext --root ~/.cache/ttapca --to FOLDER [--epochs 12]
    python scripts/robust_networks.py augmix --root ~/.cache/ttapca --to FOLDER [--epochs 20]

`convnext` is a small ConvNeXt (Liu et al., 2022): large depthwise kernels, LayerNorm, GELU.
`augmix` is a ResNet-20 that was trained on mixtures of augmented views, after AugMix (Hendrycks et
al., 2020) without its consistency loss. A run that is cut off goes on. Then, with this folder on
PYTHONPATH:

    ttapca bench robust_networks:convnext --weights FOLDER/convnext.pt --normalise cifar10 ...
    ttapca bench robust_networks:augmix --weights FOLDER/augmix.pt ...
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Generator, Tensor, nn

from ttapca import datasets, networks
from ttapca.datasets import to_tensor
from ttapca.methods.views import CROP, Jitter
from ttapca.networks.network import NormalisedNetwork

BATCH, PEAK, WARM_UP = 128, 2e-3, 500  # images, learning rate, steps until it is reached
WIDTHS, DEPTH = (48, 96, 192), 2
CHAINS = 3  # augmented views in a mixture
MOVED = Jitter(degrees=20, shift=1 / 10, zoom=0.2, shear=0.2)


class Block(nn.Module):
    """A depthwise convolution, and a perceptron for the channels of every place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block finds to its input, (batch, height, width, channels)."""
        found = self.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.perceptron(self.norm(found))


class Downsample(nn.Module):
    """Halves the sides: a LayerNorm, and a convolution of 2 x 2 with stride 2."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv2d(width, wider, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, height / 2, width / 2, channels)."""
        return self.conv(self.norm(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ConvNeXt(nn.Module):
    """Three stages of blocks for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        first, *_ = WIDTHS
        self.stem, self.norm = nn.Conv2d(3, first, 2, 2), nn.LayerNorm(first)
        parts: list[nn.Module] = []
        for number, width in enumerate(WIDTHS):
            parts += [Downsample(WIDTHS[number - 1], width)] if number else []
            parts += [Block(width) for _ in range(DEPTH)]
        self.stages = nn.Sequential(*parts)
        self.last, self.head = nn.LayerNorm(WIDTHS[-1]), nn.Linear(WIDTHS[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (batch, classes)."""
        found = self.stages(self.norm(self.stem(x).permute(0, 2, 3, 1)))
        return self.head(self.last(found.mean((1, 2))))


def convnext() -> nn.Module:
    """The network without weights, for normalised images."""
    return ConvNeXt()


def augmix() -> nn.Module:
    """A ResNet-20 without weights, for pixels from 0 to 1."""
    return networks.build("resnet20")


def coarse(images: Tensor, draws: Tensor) -> Tensor:
    """Fewer grey levels: 4 to 32."""
    levels = (4 + 28 * draws).view(-1, 1, 1, 1)
    return (images * levels).floor() / levels


def inverted_above(images: Tensor, draws: Tensor) -> Tensor:
    """Pixels above a threshold inverted."""
    return torch.where(images > (0.4 + 0.6 * draws).view(-1, 1, 1, 1), 1 - images, images)


def stretched(images: Tensor, draws: Tensor) -> Tensor:
    """Every channel stretched to the whole range, more or less."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.lerp(images, (images - low) / (high - low + 1e-3), draws.view(-1, 1, 1, 1))


COLOURS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (coarse, inverted_above, stretched)


def mixture(images: Tensor, generator: Generator) -> Tensor:
    """AugMix: a random mixture of an image and of chains of random operations on it."""
    count = len(images)
    weights = torch.distributions.Exponential(1.0).sample((CHAINS, count))
    weights = (weights / weights.sum(0)).view(CHAINS, -1, 1, 1, 1)
    mixed = torch.zeros_like(images)
    for weight in weights:
        view = images
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            chosen = int(torch.randint(0, len(COLOURS) + 2, (), generator=generator))
            draws = torch.rand(count, generator=generator)
            moved = chosen >= len(COLOURS)
            view = MOVED(view, generator) if moved else COLOURS[chosen](view, draws)
        mixed += weight * view
    own = torch.rand(count, generator=generator).view(-1, 1, 1, 1)
    return (own * images + (1 - own) * mixed).clamp(0, 1)


def main() -> None:
    """Train one network, epoch by epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("convnext", "augmix"))
    parser.add_argument("--root", type=Path, required=True, help="folder that holds CIFAR-10")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=15)
    asked = parser.parse_args()
    torch.manual_seed(0)
    network = {"convnext": convnext, "augmix": augmix}[asked.network]()
    model = NormalisedNetwork(network, "cifar10") if asked.network == "convnext" else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    train = datasets.load("cifar10", "train", root=asked.root)
    test = datasets.load("cifar10", "test", root=asked.root)[:2000]
    asked.to.mkdir(parents=True, exist_ok=True)
    state = asked.to / f"{asked.network}.state.pt"
    first = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    steps = -(-len(train) // BATCH)
    for epoch in range(first, asked.epochs):
        start, losses = time.perf_counter(), []
        generator = torch.Generator().manual_seed(epoch)
        model.train()
        for number, rows in enumerate(torch.randperm(len(train), generator=generator).split(BATCH)):
            step = epoch * steps + number
            cosine = 0.5 + 0.5 * math.cos(math.pi * step / (asked.epochs * steps))
            for group in optimizer.param_groups:
                group["lr"] = PEAK * cosine * min(1.0, (step + 1) / WARM_UP)
            images = CROP(to_tensor(train.images[rows.numpy()]), generator)
            images = torch.where(
                torch.rand(len(rows), 1, 1, 1, generator=generator) < 0.5, images.flip(3), images
            )
            if asked.network == "augmix":
                images = mixture(images, generator)
            labels = torch.from_numpy(train.labels[rows.numpy()])
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            batches = zip(
                to_tensor(test.images).split(500),
                torch.from_numpy(test.labels).split(500),
                strict=True,
            )
            wrong = sum(int((model(x).argmax(1) != y).sum()) for x, y in batches)
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(saved, state)
        torch.save(network.state_dict(), asked.to / f"{asked.network}.pt")
        seconds = time.perf_counter() - start
        print(
            f"epoch {epoch + 1} of {asked.epochs}: loss {sum(losses) / len(losses):.3f}, error "
            f"{100 * wrong / len(test):.1f} %, {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
