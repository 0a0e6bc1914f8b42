"""The demo's world: scikit-learn's handwritten digits, a small network, three corruptions.

Everything is real and small: 1,797 scanned digits of 8 x 8 pixels that ship with scikit-learn, and
a BatchNorm network that trains on two thirds of them in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.data import read_digits, to_tensor
from ttapca.fitted import FittedFilter
from ttapca.fitting import fit
from ttapca.recipes import MethodName, adapt

BATCH = 100
COMPONENTS = 40
METHODS: tuple[MethodName, ...] = ("source", "bn", "ttapca-relu", "ttapca-exp")
SETTINGS = ("episodic", "online")

TRAIN_BATCH = 64
PEAK_LEARNING_RATE = 5e-3


@dataclass(frozen=True)
class Outcome:
    """What the demo found.

    Attributes:
        conditions: Names of the columns: clean first, then the corruptions.
        errors: In percent, by setting and method, one for each condition.
        fitted: The filter.
        test_images: How many there were.
    """

    conditions: list[str]
    errors: dict[str, dict[MethodName, list[float]]]
    fitted: FittedFilter
    test_images: int


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core.

    For tensors this small it is faster, and sums are rounded alike however many cores there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def run(seed: int, epochs: int, progress: Callable[[range], Iterable[int]]) -> Outcome:
    """Train, fit, corrupt, and measure every method in both settings."""
    train_set, test_set = read_digits("train"), read_digits("test")
    train_images = to_tensor(train_set.images)
    model = train(train_images, torch.from_numpy(train_set.labels), epochs, seed, progress)
    fitted = fit(model, "conv1", train_images, n_components=COMPONENTS)
    generator = torch.Generator().manual_seed(seed)
    test_images, labels = to_tensor(test_set.images), torch.from_numpy(test_set.labels)
    corrupted = [corrupt(test_images, generator) for corrupt in CONDITIONS.values()]
    errors = {
        setting: {
            method: [_error(model, method, fitted, x, labels, setting) for x in corrupted]
            for method in METHODS
        }
        for setting in SETTINGS
    }
    return Outcome(list(CONDITIONS), errors, fitted, len(labels))


def _error(
    model: nn.Module,
    method: MethodName,
    fitted: FittedFilter,
    images: Tensor,
    labels: Tensor,
    setting: str,
) -> float:
    adapted = adapt(model, method, filter=fitted, episodic=setting == "episodic")
    wrong = sum(
        int((adapted(batch).argmax(1) != truth).sum())
        for batch, truth in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True)
    )
    adapted.detach()
    return 100 * wrong / len(labels)


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
    images: Tensor,
    labels: Tensor,
    epochs: int,
    seed: int,
    progress: Callable[[range], Iterable[int]],
) -> DigitsNet:
    """Train a network: Adam, one cycle of learning rates, batches shifted by up to a pixel."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsNet()
        steps = epochs * -(-len(images) // TRAIN_BATCH)
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, PEAK_LEARNING_RATE, total_steps=steps
        )
        for _ in progress(range(epochs)):
            for index in torch.split(torch.randperm(len(images)), TRAIN_BATCH):
                loss = F.cross_entropy(model(_shifted(images[index])), labels[index])
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
