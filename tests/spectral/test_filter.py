from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttapca
from fixed_gains import FixedGain
from oracles import DensePCA, images, small_convnet
from ttapca import PCA, Moments, SpectralFilter
from ttapca.errors import ShapeError
from ttapca.spectral.basis import Dense
from ttapca.spectral.folded import Folded
from ttapca.spectral.gains import SourceComponents, make_gain

SHAPE = (2, 3, 2)
DATA = images(80, shape=SHAPE)
PCA_OF_DATA = PCA.from_moments(Moments(12).update(DATA))
X = images(10, seed=3, shape=SHAPE)


def spectral_filter(kept: int = 12, gain: bool = False, dtype=torch.float64) -> SpectralFilter:
    values = PCA_OF_DATA.singular_values[:kept].to(dtype)
    source = SourceComponents(values, values, None, lambda: values)
    return SpectralFilter(
        PCA_OF_DATA.mean.to(dtype, copy=True),  # tests load other values into the filter
        Dense(PCA_OF_DATA.basis[:, :kept].to(dtype, copy=True)),
        shape=SHAPE,
        gain=make_gain("relu", source, initial=0.2) if gain else None,
    )


@pytest.mark.parametrize("kept", [1, 5, 12])
def test_equals_a_dense_filter(kept: int) -> None:
    dense = DensePCA(DATA)
    relative = dense.singular_values[:kept] / dense.singular_values[0]
    expected = dense.filter(X, relative / (relative + 0.2))
    before = X.clone()
    torch.testing.assert_close(spectral_filter(kept, gain=True)(X), expected, rtol=0, atol=1e-10)
    assert torch.equal(X, before)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        output = spectral_filter(kept, gain=True, dtype=torch.float32)(X.to(dtype))
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.05)


@given(seed=st.integers(0, 1000), kept=st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_unit_gains_are_the_identity_on_the_subspace(seed: int, kept: int) -> None:
    components = images(4, seed=seed, shape=(kept,))
    x = (components @ PCA_OF_DATA.basis[:, :kept].T + PCA_OF_DATA.mean).reshape(4, *SHAPE)
    layer = spectral_filter(kept)
    torch.testing.assert_close(layer(x), x, rtol=0, atol=1e-10)
    assert torch.equal(layer.gains(), torch.ones(kept, dtype=torch.float64))


def test_state_dict_round_trip() -> None:
    one, two = spectral_filter(5, gain=True), spectral_filter(5, gain=True)
    with torch.no_grad():
        one.gain.gamma.add_(0.3)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(X), two(X))
    assert set(one.state_dict()) == {"mean", "basis.to_components", "gain.gamma", "gain.spectrum"}
    with pytest.raises(ShapeError, match=r"shape \(2, 3, 2\); found \(3, 2, 2\)"):
        one(torch.zeros(5, 3, 2, 2))


@torch.no_grad()
def test_gains_of_one_give_back_what_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = spectral_filter(5)
    layer.gain = FixedGain(torch.ones(5, dtype=torch.float64), keeps_rest=True)
    monkeypatch.setattr(layer.basis, "add_rebuilt", None)  # nothing is rebuilt
    assert torch.equal(layer(X), X)
    monkeypatch.undo()
    layer.gain.gains[2] = 0.5
    assert not torch.equal(layer(X), X)


@pytest.mark.parametrize(
    "values",
    [[0.5] * 12, [2.0] * 4 + [0.5] * 8, [0.5, 1.0] * 6, [1.0] * 11 + [0.3]],
    ids=["all alike", "a tail alike", "none alike", "only the last"],
)
@pytest.mark.parametrize("kept", [12, 7])
def test_components_scaled_as_the_rest_need_no_rebuilding(values: list[float], kept: int) -> None:
    gains = torch.tensor(values[:kept], dtype=torch.float64)
    layer = spectral_filter(kept)
    layer.gain = FixedGain(gains, keeps_rest=True)
    basis = PCA_OF_DATA.basis[:, :kept]
    away = X.flatten(1) - PCA_OF_DATA.mean
    inside = away @ basis
    rest = away - inside @ basis.T
    expected = PCA_OF_DATA.mean + (inside * gains) @ basis.T + gains[-1] * rest
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(layer(X).flatten(1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("outside", [False, True])
def test_means_are_moved_before_scaling(outside: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    gains, offset = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    layer = spectral_filter(7)
    basis = PCA_OF_DATA.basis[:, :7]
    away = X.flatten(1) - PCA_OF_DATA.mean
    inside = away @ basis
    rest = away - inside @ basis.T
    shift = rest[3] if outside else torch.zeros_like(rest[3])
    moved = (offset, shift if outside else None)
    layer.gain = FixedGain(gains, 0.25, moved, watches_rest=True)
    expected = torch.stack([
        PCA_OF_DATA.mean + basis @ (gains * (one - offset)) + 0.25 * (other - shift)
        for one, other in zip(inside, rest, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(layer(X).flatten(1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.gain.seen_rest, rest, rtol=0, atol=1e-12)


# A batch is projected once for both passes of a gradient step, and never wrongly.


def plain(layer: SpectralFilter, x: Tensor) -> Tensor:
    vectors = layer.basis.to_components
    scaled = (x.flatten(1) - layer.mean) @ vectors * layer.gains()
    return (layer.mean + scaled @ vectors.T).reshape(x.shape)


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that are projected."""
    calls: list[int] = []
    for kind in (Dense, Folded):

        def counted(self: Dense, centred: Tensor, original=kind.project) -> Tensor:
            calls.append(len(centred))
            return original(self, centred)

        monkeypatch.setattr(kind, "project", counted)
    return calls


@pytest.mark.parametrize("layer", ["conv1", "bn1"], ids=["folded", "dense"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_projects_once(projections: list[int], layer: str, steps: int) -> None:
    # Frozen, as networks at test time are: else a graph below the filter is asked for.
    model = small_convnet().requires_grad_(False)
    fitted = ttapca.fit(model, layer, images(80), 10)
    projections.clear()  # fitting compares predictions with the filter and without
    adapted = ttapca.adapt(model, "ttapca-relu", filter=fitted, steps=steps, forgetting="online")
    for seed, size in ((3, 12), (4, 12), (5, 7)):
        adapted(images(size, seed=seed))
    assert projections == [12, 12, 7]


def test_what_was_kept_fits_only_its_samples(projections: list[int]) -> None:
    layer = spectral_filter(5, gain=True)
    for batch in (X, X.clone(), X[:3], X[:3] + 1e-7):
        with torch.no_grad():
            layer.gain.gamma.mul_(2)
        torch.testing.assert_close(layer(batch), plain(layer, batch))
    assert projections == [10, 3, 3]
    buffer = X.numpy().copy()
    x = torch.from_numpy(buffer)
    layer(x)
    buffer[:] += 1.0  # behind torch's back, as loaders with one buffer do
    torch.testing.assert_close(layer(x), plain(layer, x))


@pytest.mark.parametrize("change", ["basis.to_components", "mean", "dtype"])
def test_another_basis_projects_anew(change: str) -> None:
    layer, x = spectral_filter(5, gain=True), X
    layer(x)
    if change == "dtype":
        layer, x = layer.float(), x.float()
    else:
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        state[change] *= 0.5
        layer.load_state_dict(state)
    torch.testing.assert_close(layer(x), plain(layer, x))


def test_gradients_pass_to_samples_and_gains_all_the_same() -> None:
    layer, x = spectral_filter(5, gain=True), X.clone()
    with torch.inference_mode():
        layer(x)
    layer(x)
    x.requires_grad_()
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(layer, x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    layer(x).sum().backward()
    assert layer.gain.gamma.grad is not None


def test_copies_and_pickles_start_without_a_memory() -> None:
    layer = spectral_filter(5, gain=True)
    empty = len(pickle.dumps(layer))
    expected = layer(X)
    assert len(pickle.dumps(layer)) == empty
    assert torch.equal(copy.deepcopy(layer)(X), expected)
