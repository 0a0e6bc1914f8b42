"""The demo's world: scikit-learn's handwritten digits, a small network, three corruptions.

Everything is real and small: 1,797 scanned digits of 8 x 8 pixels that ship with scikit-learn, and
a BatchNorm network that trains on two thirds of them in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.data import read_digits, to_tensor
from ttapca.fitted import FittedFilter
from ttapca.fitting import fit
from ttapca.models import digits_network
from ttapca.models.evaluation import Progress
from ttapca.recipes import RECIPES, MethodName, adapt

BATCH = 100
COMPONENTS = 40
METHODS: tuple[MethodName, ...] = ("source", "bn", "tent", "ttapca-relu", "ttapca-exp")
SETTINGS = ("episodic", "online")


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
def run(seed: int, epochs: int, progress: Progress) -> Outcome:
    """Train, fit, corrupt, and measure every method in both settings."""
    train_set, test_set = read_digits("train"), read_digits("test")
    train_images = to_tensor(train_set.images)
    model = digits_network(epochs=epochs, seed=seed, progress=progress)
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
    given = fitted if RECIPES[method].needs_filter else None
    adapted = adapt(model, method, filter=given, episodic=setting == "episodic")
    wrong = sum(
        int((adapted(batch).argmax(1) != truth).sum())
        for batch, truth in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True)
    )
    adapted.detach()
    return 100 * wrong / len(labels)


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
