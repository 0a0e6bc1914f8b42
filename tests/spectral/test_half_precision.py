"""A filter that was stored in float16 reads half as much for a single sample."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import images
from ttapca.spectral.basis import HalfPrecision

SHAPE = (3, 6, 6)
X = images(400, shape=SHAPE).float()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(288, 4)).eval()


@pytest.fixture(scope="module", params=["folded", "exact"])
def pair(request, tmp_path_factory) -> tuple[ttapca.FittedFilter, ttapca.FittedFilter]:
    """One filter, stored as float16: what `load` gives, and the same numbers in float32."""
    folder: Path = tmp_path_factory.mktemp("half") / "filter"
    ttapca.fit(model(), "0", X, 80, route=request.param).save(folder, dtype="float16")
    half = ttapca.load(folder)
    ttapca.load(folder).save(folder, dtype="float32", overwrite=True)
    return half, ttapca.load(folder)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 3e-3 * expected.abs().max())


def test_single_samples_differ_by_rounding_and_batches_not_at_all(pair) -> None:
    half, full = (fitted.spectral_filter("wiener") for fitted in pair)
    assert half.basis.in_half_precision is not None
    assert full.basis.in_half_precision is None
    with torch.no_grad():
        x = 3 * (X[:5] if half.shape == SHAPE else model()[0](X[:5]))
        assert torch.equal(half(x), full(x))
        half.gain.listens_to("nothing")
        full.gain.listens_to("nothing")
        for sample in x.split(1):
            found, expected = half(sample), full(sample)
            assert close(found, expected)
            assert not torch.equal(found, expected)


def test_gains_of_one_leave_every_bit(pair) -> None:
    half = pair[0].spectral_filter("wiener")
    x = torch.zeros(1, *half.shape)
    with torch.no_grad():
        half.gain.listens_to("nothing")
        assert torch.equal(half(x), x)


def test_an_adapter_predicts_as_with_float32(pair) -> None:
    logits = []
    for fitted in pair:
        adapter = ttapca.adapt(model(), "wiener", filter=fitted)
        logits.append(torch.cat([adapter(3 * sample) for sample in X[:20].split(1)]))
    assert close(*logits)


def test_learned_gains_use_float32(pair) -> None:
    half, full = (
        torch.cat([ttapca.adapt(model(), "ttapca-relu", filter=fitted)(X[:2])]) for fitted in pair
    )
    assert torch.equal(half, full)


def test_what_float16_cannot_hold_is_computed_in_float32() -> None:
    basis = torch.eye(4).half()
    half = HalfPrecision(basis, basis)
    with torch.no_grad():
        assert half.project(torch.full((1, 4), 1e5)) is None
        assert half.project(torch.full((1, 4), math.nan)) is None
        assert half.project(torch.full((1, 4), 100.0)) is not None


def test_no_keys_and_no_share_in_moves(pair) -> None:
    half, full = (fitted.spectral_filter("wiener") for fitted in pair)
    assert half.state_dict().keys() == full.state_dict().keys()
    wide = copy.deepcopy(half).double()
    with torch.no_grad():
        assert wide.basis.in_half_precision.project(torch.zeros(1, math.prod(half.shape))) is None
        assert wide(torch.zeros(1, *half.shape).double()).dtype == torch.float64


def test_gradients_and_batches_are_refused() -> None:
    basis = torch.eye(3).half()
    half = HalfPrecision(basis, basis)
    assert half.project(torch.ones(1, 3)) is None  # gradients are enabled here
    with torch.no_grad():
        assert half.project(torch.ones(2, 3)) is None
        assert half.rebuild(torch.ones(1, 2)).tolist() == [[1.0, 1.0, 0.0]]
