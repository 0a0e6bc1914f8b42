from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttapca.errors import OptionError
from ttapca.spectral.gains import Gain, SourceComponents, bounded_multiplier, make_gain

SPECTRUM = torch.tensor([8.0, 4.0, 1.0, 0.25], dtype=torch.float64)


def made(name: Any, spectrum: Tensor = SPECTRUM, **options: Any) -> Gain:
    """A gain over a source whose singular values are these."""
    return make_gain(name, SourceComponents(spectrum, spectrum, None, lambda: spectrum), **options)


numbers = st.floats(-5, 5, allow_nan=False)


@given(gamma=numbers, value=st.floats(1e-3, 1.0))
@settings(deadline=None)
def test_gains_equal_the_papers_formulas(gamma: float, value: float) -> None:
    spectrum = torch.tensor([value], dtype=torch.float64)
    relu, exponential = (
        made(name, spectrum, normalise=False, initial=gamma)().item()
        for name in ("relu", "exponential")
    )
    assert relu == pytest.approx(value / (value + max(gamma, 0.0)))
    assert exponential == pytest.approx(1 / (1 + math.exp(gamma**2 - value)))


@given(value=st.floats(-1e6, 1e6), limit=st.floats(1.01, 100))
@settings(deadline=None)
def test_the_multiplier_is_bounded_and_positive(value: float, limit: float) -> None:
    a = bounded_multiplier(torch.tensor([value], dtype=torch.float64), limit).item()
    assert 1 / limit * (1 - 1e-9) <= a <= limit * (1 + 1e-9)
    if abs(value) < 1e-3:
        assert a == pytest.approx(math.exp(value), rel=1e-4)


def gradient_at(gain) -> Tensor:
    gain().sum().backward()
    return torch.cat([parameter.grad for parameter in gain.parameters()])


@pytest.mark.parametrize("kind", ["relu", "exponential"])
def test_dead_at_zero_alive_nearby_by_default(kind: str) -> None:
    zero, default = made(kind, initial=0.0), made(kind)
    assert bool((gradient_at(zero) == 0).all())
    assert bool((gradient_at(default) != 0).all())
    torch.testing.assert_close(default(), zero(), rtol=0.02, atol=0)
    assert default.spectrum.tolist() == [1.0, 0.5, 0.125, 0.03125]
    assert made(kind, normalise=False).spectrum.tolist() == SPECTRUM.tolist()


@pytest.mark.parametrize("penalty", ["relu", "exponential"])
def test_multiplicative_is_the_penalty_times_the_multiplier(penalty: str) -> None:
    gain = made("multiplicative", penalty=penalty, limit=3.0, initial=0.4)
    plain = made(penalty, initial=0.4)
    torch.testing.assert_close(gain(), plain())
    with torch.no_grad():
        gain.log_multiplier.copy_(torch.tensor([0.0, 1.0, -1.0, 50.0]))
    bound = math.log(3.0)
    factor = [math.exp(bound * math.tanh(h / bound)) for h in (0.0, 1.0, -1.0, 50.0)]
    np.testing.assert_allclose(gain().detach(), plain().detach().numpy() * factor, rtol=1e-12)
    assert sum(p.numel() for p in gain.parameters()) == 8
    assert bool((gradient_at(made("multiplicative", penalty=penalty)) != 0).all())


def test_relu_gain_with_one_gamma_is_ridge_regression() -> None:
    """The paper's appendix: shrinking by s^2 / (s^2 + gamma) is the ridge solution."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    gamma = 3.7
    ridge = torch.linalg.solve(x.T @ x + gamma * torch.eye(5, dtype=torch.float64), x.T @ y)
    eigenvalues, vectors = torch.linalg.eigh(x.T @ x)
    gains = made("relu", eigenvalues, normalise=False, initial=gamma)().detach()
    least_squares = torch.linalg.solve(x.T @ x, x.T @ y)
    filtered = vectors @ torch.diag(gains) @ vectors.T @ least_squares
    torch.testing.assert_close(filtered, ridge, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("relo", {}, r"`gain` must be one of .*; found 'relo'\. Did you mean `relu`\?"),
        ("relu", {"initial": math.nan}, "`initial` must be a finite number; found nan"),
        ("relu", {"limit": 2.0}, "gain `relu` has no option `limit`; it has normalise, initial"),
        ("multiplicative", {"limit": 1.0}, "`limit` must be a finite number above 1; found 1"),
        ("multiplicative", {"penalty": "x"}, "`penalty` must be one of relu, exponential; found"),
        ("relu", {"spectrum": torch.tensor([1.0, 0.0])}, "positive singular values"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        made(name, **options)
