"""Mean and variance of channels by quick ways, against those of float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ttapca.support.norm_layers import channel_moments, quick_moments


@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0], ids=["centred", "near", "far"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "flat"])
@pytest.mark.parametrize("of", [quick_moments, torch.no_grad()(channel_moments)])
def test_moments_are_those_of_float64(
    of: Callable[[Tensor], tuple[Tensor, Tensor]], layout: str, offset: float
) -> None:
    shape = (300, 5) if layout == "flat" else (40, 5, 8, 9)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2 + offset
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.mT
    values = x.double().transpose(0, 1).reshape(5, -1).numpy()
    mean, var = of(x)
    assert mean.dtype == var.dtype == torch.float32
    np.testing.assert_allclose(mean.double(), values.mean(1), rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(var.double(), values.var(1), rtol=2e-5)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0], ids=["centred", "near", "far"])
def test_moments_of_one_sample_are_those_of_float64(offset: float) -> None:
    x = torch.randn((1, 5, 16, 9), generator=torch.Generator().manual_seed(0)) * 2 + offset
    x[:, 4] = 0.0  # a channel that does not vary
    with torch.no_grad():
        mean, var = channel_moments(x)
    values = x[0].double().flatten(1).numpy()
    assert mean.dtype == var.dtype == torch.float32
    np.testing.assert_allclose(mean.double(), values.mean(1), rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(var.double(), values.var(1), rtol=1e-4, atol=1e-12)
