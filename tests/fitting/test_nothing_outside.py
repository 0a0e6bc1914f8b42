"""Directions in which no source sample varies: a shift along them is seen, and moved back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca

LENGTH = 24


def series(count: int, seed: int, channels: int = 1) -> Tensor:
    """Smooth series, each with mean 0, as data sets are that were normalised one by one."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(count, channels, LENGTH, generator=generator)
    smooth = nn.functional.avg_pool1d(steps, 3, 1, 1) + 0.1 * steps
    return smooth - smooth.mean(2, keepdim=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    # Circular: with zeros around it, an offset would not be orthogonal to what samples show.
    first = nn.Conv1d(1, 8, 5, padding=2, padding_mode="circular")
    return nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 3))


MODEL = network().eval()
FITTED = ttapca.fit(MODEL, "0", series(600, seed=0))
CLEAN = series(50, seed=1)
OPTIONS = {"filter": FITTED, "order": "shuffled"}


def test_the_rest_is_watched_although_it_is_nothing() -> None:
    assert FITTED.n_components_ == LENGTH - 1  # all but the mean
    assert FITTED.rest_ is not None


def test_clean_series_are_no_shift() -> None:
    with torch.no_grad(), ttapca.adapt(MODEL, "wiener", **OPTIONS) as adapted:
        for seed in range(1, 6):
            adapted(series(50, seed))
            assert adapted.health.shift == 0.0


@pytest.mark.parametrize("offset", [0.3, -1.0, 5.0])
def test_an_offset_that_no_sample_has_is_taken_away(offset: float) -> None:
    with torch.no_grad():
        expected, spoiled = MODEL(CLEAN), MODEL(CLEAN + offset)
        with ttapca.adapt(MODEL, "wiener", **OPTIONS) as adapted:
            found = adapted(CLEAN + offset)
            assert adapted.health.shift > 0.9
    assert (found - expected).norm() < 0.2 * (spoiled - expected).norm()


def test_a_sample_with_an_offset_among_many_is_no_shift_of_the_others() -> None:
    some = CLEAN.clone()
    some[7] += 3.0
    with torch.no_grad(), ttapca.adapt(MODEL, "wiener", **OPTIONS) as adapted:
        adapted(some)
        assert adapted.health.shift < 0.1  # of one in six hundred it is not known that it is none


def test_a_saved_filter_knows_it(tmp_path: object) -> None:
    FITTED.save(f"{tmp_path}/filter")
    loaded = ttapca.load(f"{tmp_path}/filter")
    shifted = CLEAN + 0.5
    outputs = []
    for fitted in (FITTED, loaded):
        with torch.no_grad(), ttapca.adapt(MODEL, "wiener", filter=fitted) as adapted:
            outputs.append(adapted(shifted))
    torch.testing.assert_close(*outputs)
