"""`fit` warns of data whose variance comes from few samples, such as powers, and of no others."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ttapca
from ttapca import networks
from ttapca.datasets import load, to_tensor
from ttapca.errors import HeavyTailsWarning


def spectrograms(count: int, seed: int = 0) -> Tensor:
    """Log powers, (count, 1, 12, 16): a smooth contour, and a loudness of some 8 dB up or down."""
    random = torch.Generator().manual_seed(seed)
    loudness = 8 * math.log(10) / 10 * torch.randn(count, 1, 1, 1, generator=random)
    coarse = torch.randn(count, 1, 3, 4, generator=random)
    contour = nn.functional.interpolate(coarse, (12, 16), mode="bilinear")
    # A periodogram's values are exponential around their mean.
    grain = -torch.rand(count, 1, 12, 16, generator=random).clamp(min=1e-6).log()
    return loudness + contour + grain.log()


def fit(data: Tensor) -> ttapca.FittedFilter:
    torch.manual_seed(0)
    convolution = nn.Conv2d(data.shape[1], 4, 3, padding=1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return ttapca.fit(nn.Sequential(convolution, nn.ReLU(), head).eval(), "0", data)


@pytest.mark.parametrize("count", [32, 100, 600])
def test_powers_are_warned_of_and_their_logarithms_are_not(count: int) -> None:
    logs = spectrograms(count)
    with pytest.warns(HeavyTailsWarning, match=r"Filter after the logarithm, such as log-mels"):
        fit(logs.exp())
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeavyTailsWarning)
        fit(logs)


def test_a_few_broken_samples_are_warned_of() -> None:
    images = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images[7] *= 1000
    with pytest.warns(HeavyTailsWarning, match=r"found that about \d\.\d % make it"):
        fit(images)


@pytest.mark.parametrize("count", [32, 300])
def test_photographs_and_digits_are_not_warned_of(count: int) -> None:
    photographs = to_tensor(load("cifar10-500", "test").images[:count])
    small = nn.functional.avg_pool2d(photographs, 2)[:, :1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeavyTailsWarning)
        fit(photographs)
        fit(1 - small**2.2)  # linear light, in negative
        fit(small - small.roll(1, -1))  # edges
        digits = to_tensor(load("digits", "train").images[:count])
        ttapca.fit(networks.load("digits-small-cnn").eval(), "conv1", digits)


@pytest.mark.parametrize("count", [32, 1000])
def test_normal_data_are_not_warned_of_even_if_most_of_them_does_not_vary(count: int) -> None:
    random = torch.Generator().manual_seed(1)
    normal = torch.randn(count, 1, 8, 8, generator=random)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeavyTailsWarning)
        fit(normal)
        fit(normal * (torch.arange(64).view(8, 8) % 9 == 0))
