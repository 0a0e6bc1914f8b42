"""A batch is projected once for both passes of a gradient step, and never wrongly."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

import ttapca
from oracles import images, small_convnet
from ttapca import SpectralFilter
from ttapca.spectral.basis import Dense, Folded
from ttapca.spectral.gains import ReLUGain

SHAPE = (2, 3)


def learned_filter() -> SpectralFilter:
    basis = torch.linalg.qr(images(6, shape=(4,)))[0]
    mean = torch.arange(6, dtype=torch.float64)
    gain = ReLUGain(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64), initial=0.5)
    return SpectralFilter(mean, Dense(basis), shape=SHAPE, gain=gain)


def plain(layer: SpectralFilter, x: Tensor) -> Tensor:
    flat = x.flatten(1)
    scaled = (flat - layer.mean) @ layer.basis.to_components * layer.gains()
    return (layer.mean + scaled @ layer.basis.to_components.T).reshape(x.shape)


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that are projected."""
    calls: list[int] = []
    for kind in (Dense, Folded):
        original = kind.project

        def counted(self: Dense, centred: Tensor, original=original) -> Tensor:
            calls.append(len(centred))
            return original(self, centred)

        monkeypatch.setattr(kind, "project", counted)
    return calls


@pytest.mark.parametrize("layer", ["conv1", "bn1"], ids=["folded", "unfolded"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_projects_once(projections: list[int], layer: str, steps: int) -> None:
    # Frozen, as networks at test time are: else a graph below an unfolded filter is asked for.
    model = small_convnet().requires_grad_(False)
    fitted = ttapca.fit(model, layer, images(80), 10)
    projections.clear()  # fitting compares predictions with the filter and without
    adapted = ttapca.adapt(model, "ttapca-relu", filter=fitted, steps=steps, forgetting="online")
    for seed, size in ((3, 12), (4, 12), (5, 7)):
        adapted(images(size, seed=seed))
    assert projections == [12, 12, 7]


def test_the_same_values_as_without(projections: list[int]) -> None:
    layer = learned_filter()
    x = images(5, shape=SHAPE)
    for scale in (0.5, 2.0):
        with torch.no_grad():
            layer.gain.gamma.fill_(scale)
            torch.testing.assert_close(layer(x), plain(layer, x))
    assert projections == [5]


def test_memory_that_is_filled_anew_is_another_batch() -> None:
    layer = learned_filter()
    buffer = np.random.default_rng(0).standard_normal((5, *SHAPE))
    x = torch.from_numpy(buffer)
    layer(x)
    buffer[:] += 1.0  # behind torch's back, as loaders with one buffer do
    torch.testing.assert_close(layer(x), plain(layer, x))


@pytest.mark.parametrize("change", ["state dict", "mean", "dtype"])
def test_another_basis_projects_anew(change: str) -> None:
    layer, x = learned_filter(), images(5, shape=SHAPE)
    layer(x)
    if change == "dtype":
        layer, x = layer.float(), x.float()
    else:
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        state["basis.to_components" if change == "state dict" else "mean"] *= 0.5
        layer.load_state_dict(state)
    torch.testing.assert_close(layer(x), plain(layer, x))


def test_gradients_pass_to_the_samples_all_the_same() -> None:
    layer, x = learned_filter(), images(5, shape=SHAPE)
    layer(x)
    x.requires_grad_()
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(layer, x).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_inference_mode_leaves_nothing_that_gradients_cannot_use() -> None:
    layer, x = learned_filter(), images(5, shape=SHAPE)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.gain.gamma.grad is not None


def test_copies_and_pickles_start_without_a_memory() -> None:
    layer, x = learned_filter(), images(500, shape=SHAPE)
    empty = len(pickle.dumps(layer))
    expected = layer(x)
    assert len(pickle.dumps(layer)) == empty
    assert torch.equal(copy.deepcopy(layer)(x), expected)


def test_what_was_kept_fits_only_its_samples(projections: list[int]) -> None:
    layer, x = learned_filter(), images(4, shape=SHAPE)
    for batch in (x, x.clone(), x[:3], x[:3] + 1e-7):
        torch.testing.assert_close(layer(batch), plain(layer, batch))
    assert projections == [4, 3, 3]
