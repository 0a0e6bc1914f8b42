"""One filter of cosines for recordings of any length: spectrograms of 40 bands and T frames."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca

NOISE = 0.5  # deviation of the noise; that of spectrograms is 1


def spectrograms(count: int, frames: int, seed: int) -> Tensor:
    """A stationary random field, smooth along bands and time, cut out: (count, 1, 40, frames)."""
    random = torch.Generator().manual_seed(seed)
    grain = torch.randn(count, 1, 40 + 6, frames + 6, generator=random)
    kernel = torch.hann_window(9)[1:-1]
    kernel = kernel[:, None] * kernel
    return nn.functional.conv2d(grain, (kernel / kernel.norm())[None, None])


class Heard(nn.Module):
    """Keeps what comes through the filter, and pools over time."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Identity(), nn.Linear(40, 5)

    def forward(self, images: Tensor) -> Tensor:
        self.heard = self.front(images)
        return self.head(self.heard.mean((1, 3)))


@pytest.fixture(scope="module")
def fitted() -> ttapca.FittedFilter:
    torch.manual_seed(0)
    return ttapca.fit(Heard().eval(), "front", spectrograms(400, 64, seed=1))


def adapted_to(fitted: ttapca.FittedFilter) -> tuple[Heard, ttapca.Adapter]:
    torch.manual_seed(0)
    model = Heard().eval()
    return model, ttapca.adapt(model, "wiener", filter=fitted, forgetting="online")


@pytest.mark.parametrize("frames", [40, 100])
def test_clean_recordings_of_other_lengths_hardly_change(fitted, frames):
    model, adapted = adapted_to(fitted)
    clean = spectrograms(50, frames, seed=2)
    adapted(clean)
    # The law of natural images, which these do not follow, is off by some: but not by much.
    assert float((model.heard - clean).square().mean()) < 0.01 * float(clean.var())


@pytest.mark.parametrize(("frames", "times"), [(40, 1.6), (64, 1.1), (100, 1.3)])
def test_noise_is_removed_nearly_as_well_as_by_wieners_filter(fitted, frames, times):
    model, adapted = adapted_to(fitted)
    clean = spectrograms(50, frames, seed=3)
    noise = NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(4))
    adapted(clean + noise)
    left = float((model.heard - clean).square().mean())
    # The oracle knows the covariance of signals of this length exactly, from many others.
    others = spectrograms(1000, frames, seed=5)[:, 0].double()
    basis = [dct(size) for size in others.shape[1:]]
    variance = (basis[0] @ others @ basis[1].T).square().mean(0)
    gain = variance / (variance + NOISE**2)
    best = float((gain * NOISE**2).mean())
    assert best < 0.2 * NOISE**2
    assert left < times * best


def test_one_stream_takes_all_lengths_and_learns_from_each(fitted):
    model, adapted = adapted_to(fitted)
    for number, frames in enumerate((40, 100, 64, 40)):
        clean = spectrograms(16, frames, seed=number)
        noise = NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(number))
        adapted(clean + noise)
    assert adapted.health.images == 64
    assert float((model.heard - clean).square().mean()) < 0.5 * NOISE**2


def dct(size: int) -> Tensor:
    """The orthonormal cosine transform, by its definition."""
    place = torch.arange(size, dtype=torch.float64)
    found = (torch.pi / size * place[:, None] * (place + 0.5)).cos() * (2 / size) ** 0.5
    found[0] /= 2**0.5
    return found
