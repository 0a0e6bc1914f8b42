"""Which route `fit` takes, and that each one finds what it promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import DensePCA, images, left_untouched, small_convnet
from ttapca import networks
from ttapca.errors import OptionError
from ttapca.fitting import plan
from ttapca.spectral import pca
from ttapca.spectral.randomised import TOLERANCE

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
DATA = images(150)
X = images(12, seed=8)


class Counted(list[Tensor]):
    """Batches that tell how often they were read."""

    reads = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("layer", "route"),
    [("conv1", "folded"), ("bn1", "exact"), ("act", "exact"), ("conv2", "exact"), ("fc", "exact")],
)
def test_any_layer(layer: str, route: str) -> None:
    model = small_convnet()
    fitted = ttapca.fit(model, layer, DATA, 4)
    with torch.no_grad():
        dense = DensePCA(model[: list(dict(model.named_children())).index(layer) + 1](DATA))
    assert (fitted.route, fitted.error_bound_) == (route, None)
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:4], rtol=1e-9)
    np.testing.assert_allclose(fitted.mean_, dense.mean, atol=1e-10)


def test_few_samples_of_a_long_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MATRIX_LIMIT", 20)
    model = small_convnet()
    fitted = ttapca.fit(model, "act", iter(DATA.split(40)), 10)  # which can be read once only
    assert (fitted.route, fitted.error_bound_) == ("gram", None)
    exact = ttapca.fit(model, "act", DATA, 10, route="exact")
    torch.testing.assert_close(fitted.singular_values_, exact.singular_values_)
    torch.testing.assert_close(fitted.basis.to_components, exact.basis.to_components)
    torch.testing.assert_close(fitted.mean_, exact.mean_)
    shares = (ttapca.fit(model, "act", DATA, 0.9, route=route) for route in ("gram", "exact"))
    assert len({share.n_components_ for share in shares}) == 1
    one, two = (ttapca.fit(model, "act", images(400), 20, route=r) for r in ("gram", "exact"))
    assert len(one.energies_) == 400  # each by a basis that was made without it
    torch.testing.assert_close(one.variances_, two.variances_, rtol=1e-6, atol=0)
    torch.testing.assert_close(one.energies_, two.energies_, rtol=1e-4, atol=1e-6)


def test_many_samples_of_a_long_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MATRIX_LIMIT", 20)
    monkeypatch.setattr(pca, "MOST_SAMPLES", 60)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    data = images(200, shape=(40,))
    batches = Counted(data.split(50))
    fitted = ttapca.fit(model, "1", batches, 10)
    # One to see the shapes, and two passes: the one that was begun for the Gram matrix counts.
    assert (fitted.route, batches.reads, fitted.n_samples_) == ("randomised", 3, 200)
    assert fitted.error_bound_.shape == (10,)
    with torch.no_grad():
        dense = DensePCA(model[:2](data))
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:10], rtol=1e-6)
    asked = ttapca.fit(model, "1", batches, 10, route="randomised")
    torch.testing.assert_close(asked.singular_values_, fitted.singular_values_)
    torch.testing.assert_close(asked.energies_, fitted.energies_)
    with pytest.raises(OptionError, match="reads the data several times; found an iterator"):
        ttapca.fit(model, "1", iter(batches), 10)
    with pytest.raises(OptionError, match="needs a whole number of components"):
        ttapca.fit(model, "1", data.split(50))


def test_the_accuracy_is_told(tmp_path: Path) -> None:
    fitted = ttapca.fit(small_convnet(), "act", DATA, 20, route="randomised")
    assert fitted.singular_value_error_ <= TOLERANCE
    assert fitted.accuracy_.startswith("singular values of the first half are within")
    fitted.save(tmp_path / "filter")
    loaded = ttapca.load(tmp_path / "filter")
    assert loaded.accuracy_ == fitted.accuracy_
    assert torch.equal(loaded.error_bound_, fitted.error_bound_)
    assert fitted.accuracy_ in (tmp_path / "filter" / "README.md").read_text()
    exact = ttapca.fit(small_convnet(), "act", DATA, 20)
    assert (exact.accuracy_, exact.singular_value_error_) == ("exact up to rounding", None)
    cosines = ttapca.fit(small_convnet(), "act", DATA, 20, route="dct")
    assert "not principal components" in cosines.accuracy_


def test_routes_that_cannot_be_taken() -> None:
    model = small_convnet()
    with left_untouched(model, X):
        with pytest.raises(OptionError, match="`route` must be one of auto, pca, folded"):
            ttapca.fit(model, "conv1", DATA, route="fast")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"affine layer .*`act` is a ReLU"):
            ttapca.fit(model, "act", DATA, route="folded")
        with pytest.raises(OptionError, match=r"found \(5,\)"):
            ttapca.fit(model, "fc", DATA, route="dct")


# Cosines, on demand.


def test_cosines_on_the_smaller_side_of_an_affine_layer() -> None:
    model = small_convnet()
    fitted = ttapca.fit(model, "conv1", DATA, route="dct")
    with torch.no_grad():
        plain = model(X)
        torch.testing.assert_close(fitted.mean_, model.conv1(DATA).flatten(1).mean(0))
        ttapca.attach(model, fitted)  # all of them, at gains of 1
        torch.testing.assert_close(model(X), plain, rtol=0, atol=1e-10)
    # Few samples: all are kept, each in units of the others' variances. These are smaller where it
    # is large, by 2 / 89 or more on average.
    energies = ttapca.fit(small_convnet(), "conv1", DATA[:90], route="dct").energies_
    np.testing.assert_allclose(energies.double().mean(0), 1 + 3 / 89, rtol=0.01)


@pytest.mark.parametrize("layer", ["conv1", "act"])
@pytest.mark.parametrize("method", ["ttapca-relu", "wiener", "tent"])
def test_every_method_takes_cosines(layer: str, method: str) -> None:
    model = small_convnet()
    fitted = ttapca.fit(model, layer, DATA, route="dct")
    with left_untouched(model, X), ttapca.adapt(model, method, filter=fitted) as adapted:
        first = adapted(3 * X)
        assert torch.isfinite(first).all()
        assert torch.equal(adapted(3 * X), first)


@torch.no_grad()
def test_a_compiled_model_with_cosines() -> None:
    torch.compiler.reset()
    model = small_convnet()
    ttapca.attach(model, ttapca.fit(model, "conv1", DATA, 50, route="dct"), "relu", initial=0.3)
    torch.testing.assert_close(torch.compile(model, backend="eager")(X), model(X))


@pytest.mark.slow
def test_a_trained_network_at_a_layer_past_the_limit() -> None:
    weights = SHARED / "weights" / "cifar10_resnet20.pth"
    photographs = SHARED / "cifar10c_reference" / "first200.npz"
    for needed in (weights, photographs):
        if not needed.exists():
            pytest.skip(f"{needed} is not on this machine")
    network = networks.load(weights, normalisation="cifar10")
    pixels = np.load(photographs)["clean"]
    batches = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).split(50)
    exact = ttapca.fit(network, "bn1", batches, 60)
    found = ttapca.fit(network, "bn1", batches, 60, route="randomised")
    assert (exact.route, found.route) == ("gram", "randomised")
    assert found.basis.to_components.shape == (16_384, 60)
    error = (found.singular_values_ / exact.singular_values_ - 1).abs()
    assert float(error[:30].max()) <= TOLERANCE
