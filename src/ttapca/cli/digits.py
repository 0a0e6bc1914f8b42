"""The demo's world: scikit-learn's handwritten digits, a small network, three corruptions.

Everything is real and small: 1,797 scanned digits of 8 x 8 pixels that ship with scikit-learn, and
a BatchNorm network that trains on half of them in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

TEST_IMAGES = 900
TRAIN_BATCH = 64
PEAK_LEARNING_RATE = 5e-3


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1], shape (n, 1, 8, 8), and their labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(generator: torch.Generator) -> Digits:
    """Read the digits and split them at random."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / bunch.images.max()
    labels = torch.from_numpy(bunch.target)
    order = torch.randperm(len(images), generator=generator)
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


class DigitsNet(nn.Module):
    """Three 3 x 3 convolutions with BatchNorm, an average, a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, 10) from images of shape (batch, 1, 8, 8)."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def train(
    digits: Digits, epochs: int, seed: int, progress: Callable[[range], Iterable[int]]
) -> DigitsNet:
    """Train a network: Adam, one cycle of learning rates, images shifted by up to a pixel."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsNet()
        batches = -(-len(digits.train_images) // TRAIN_BATCH)
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, PEAK_LEARNING_RATE, total_steps=epochs * batches
        )
        for _ in progress(range(epochs)):
            order = torch.randperm(len(digits.train_images))
            for index in torch.split(order, TRAIN_BATCH):
                images = _shifted(digits.train_images[index])
                loss = F.cross_entropy(model(images), digits.train_labels[index])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return model.eval()


def _shifted(images: Tensor) -> Tensor:
    """Move the whole batch by -1, 0 or 1 pixels in each direction."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    return F.pad(images, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]


def clean(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images as they are."""
    del generator
    return images


def noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise."""
    return (images + 0.3 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def blur(images: Tensor, generator: torch.Generator) -> Tensor:
    """Convolve with a 3 x 3 binomial kernel."""
    del generator
    line = torch.tensor([0.25, 0.5, 0.25])
    kernel = (line[:, None] * line)[None, None]
    return F.conv2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), kernel)


def contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Draw every image towards its own mean."""
    del generator
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + 0.3 * (images - mean)


CONDITIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "clean": clean,
    "noise": noise,
    "blur": blur,
    "contrast": contrast,
}
