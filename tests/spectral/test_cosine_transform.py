from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fixed_gains import FixedGain
from ttapca.spectral import cosine_transform, other_sizes
from ttapca.spectral.cosine import Cosine
from ttapca.spectral.cosine_transform import FastCosines
from ttapca.spectral.filter import SpectralFilter

LARGE = (3, 128, 130)


def images(n: int, seed: int = 1, shape: tuple[int, ...] = LARGE) -> Tensor:
    """Noise: the correlated samples of `oracles` would take too much memory at this size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def rotation(channels: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linalg.qr(images(channels, shape=(channels,)))[0].to(dtype)


def by_scipy(samples: Tensor, turned: Tensor, shape: tuple[int, ...]) -> Tensor:
    """All cosines of channels that were rotated, shape (batch, C H W)."""
    planes = scipy.fft.dctn(samples.reshape(-1, *shape).numpy(), axes=(2, 3), norm="ortho")
    return torch.from_numpy(np.einsum("nchw,ck->nkhw", planes, turned.numpy())).flatten(1)


@given(
    channels=st.integers(1, 4),
    height=st.integers(1, 19),
    width=st.integers(1, 19),
    batch=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_it_is_scipys_transform_there_and_back(
    channels: int, height: int, width: int, batch: int, seed: int
) -> None:
    shape = (channels, height, width)
    size, turned = channels * height * width, rotation(channels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator)[: max(1, size - seed % 3)]
    cosines = FastCosines(shape, order)
    samples = torch.randn(batch, size, generator=generator, dtype=torch.float64)
    found = cosines.project(samples, turned)
    torch.testing.assert_close(found, by_scipy(samples, turned, shape)[:, order])
    first = max(1, len(order) // 2)  # the others are zero
    rebuilt = cosines.rebuilt(found[:, :first], turned)
    again = by_scipy(rebuilt, turned, shape)
    kept = torch.zeros_like(again)
    kept[:, order[:first]] = found[:, :first]
    torch.testing.assert_close(again, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_images_have_the_same_components_as_by_matrices(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = rotation(3, dtype)
    order = torch.randperm(49_920, generator=torch.Generator().manual_seed(0))[:40_000]
    samples = images(2, shape=(49_920,)).to(dtype)
    basis = Cosine(turned, order, LARGE)
    found = basis.project(samples)
    rebuilt = basis.add_rebuilt(samples, found[:, :30_000])
    larger = basis.for_shape((3, 140, 131), samples[0])
    images_there = images(2, shape=(3 * 140 * 131,)).to(dtype)
    found_there = larger.project(images_there)
    rebuilt_there = larger.add_rebuilt(images_there, found_there)
    torch.testing.assert_close(rebuilt_there, 2 * images_there)

    for module in (cosine_transform, other_sizes):
        monkeypatch.setattr(module, "is_fast", lambda *_: False)
    torch.testing.assert_close(found, basis.project(samples))
    torch.testing.assert_close(rebuilt, basis.add_rebuilt(samples, found[:, :30_000]))
    torch.testing.assert_close(found_there, larger.project(images_there))
    torch.testing.assert_close(rebuilt_there, larger.add_rebuilt(images_there, found_there))


def test_when_matrices_take_over() -> None:
    large = torch.zeros(1, dtype=torch.float32)
    assert cosine_transform.is_fast(large, LARGE)
    assert not cosine_transform.is_fast(large, (3, 64, 64))
    assert not cosine_transform.is_fast(large.bfloat16(), LARGE)
    assert (cosine_transform.at_once(LARGE), cosine_transform.at_once((3, 64, 64))) == (1, None)
    narrow = Cosine(torch.eye(3).bfloat16(), torch.arange(10), LARGE)
    assert narrow.project(torch.zeros(2, 49_920).bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = Cosine(torch.eye(3), torch.arange(10), LARGE)
        assert wide.project(torch.zeros(2, 49_920)).dtype == torch.float32


def test_gradients_are_those_of_the_inverse() -> None:
    cosines, turned = FastCosines((2, 6, 8), torch.arange(96)), rotation(2)
    samples, towards = images(2, shape=(96,)).requires_grad_(), images(2, seed=1, shape=(96,))
    (cosines.project(samples, turned) * towards).sum().backward()
    torch.testing.assert_close(samples.grad, cosines.rebuilt(towards, turned))
    components = images(2, shape=(96,)).requires_grad_()
    (cosines.rebuilt(components, turned) * towards).sum().backward()
    torch.testing.assert_close(components.grad, cosines.project(towards, turned))


def test_what_was_made_in_inference_mode_serves_gradients() -> None:
    cosine_transform._plan.cache_clear()
    basis = Cosine(torch.eye(3), torch.arange(49_920), LARGE)
    samples = images(1, shape=(49_920,)).float()
    with torch.inference_mode():
        expected = basis.project(samples)
    found = basis.project(samples.requires_grad_())
    found.sum().backward()
    assert torch.equal(found.detach(), expected)
    assert samples.grad is not None


def test_copies_follow_another_order_and_leave_what_is_kept_behind() -> None:
    basis = Cosine(torch.eye(3), torch.arange(49_920), LARGE)
    samples = images(1, shape=(49_920,)).float()
    before = len(pickle.dumps(basis))
    found = basis.project(samples)
    assert len(pickle.dumps(basis)) == before
    other = copy.deepcopy(basis)
    other.load_state_dict({"rotation": torch.eye(3), "order": torch.arange(49_920).flip(0)})
    assert torch.equal(other.project(samples), found.flip(1))
    assert torch.equal(basis.project(samples), found)


@pytest.mark.parametrize("each", [True, False], ids=["each its own", "one for all"])
@pytest.mark.parametrize("moved", [True, False])
def test_one_large_image_at_a_time_is_filtered_as_all_at_once(each: bool, moved: bool) -> None:
    samples = images(3, shape=LARGE)
    gains = images(3 if each else 1, seed=1, shape=(900,)).exp()
    away = images(len(gains), seed=2, shape=(900,)) if moved else None
    if not each:
        gains, away = gains[0], None if away is None else away[0]
    basis = Cosine(rotation(3), torch.arange(900), LARGE)
    mean = images(1, seed=3, shape=LARGE)[0].flatten()
    fixed = FixedGain(gains, away=None if away is None else (away, None), keeps_rest=True)
    layer = SpectralFilter(mean, basis, shape=LARGE, gain=fixed)
    with torch.no_grad():
        found = layer(samples)
        basis.at_once = None
        torch.testing.assert_close(found, layer(samples))
    components = by_scipy(samples.flatten(1) - mean, basis.rotation, LARGE)
    scaled = components * gains[..., -1:]
    scaled[:, :900] = (components[:, :900] - (0 if away is None else away)) * gains
    torch.testing.assert_close(by_scipy(found.flatten(1) - mean, basis.rotation, LARGE), scaled)
