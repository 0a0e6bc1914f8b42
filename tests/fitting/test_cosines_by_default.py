"""When `fit` takes cosines by itself, and how to get principal components all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, left_untouched
from ttapca.errors import BasisWarning
from ttapca.fitting.plan import Problem, RouteName, plan_of
from ttapca.spectral.basis_choice import SMALL

SHAPE = (3, 20, 20)  # more numbers than `SMALL`
DATA = images(120, shape=SHAPE).float()


def network(channels: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).eval()


def unknown(data: Tensor = DATA) -> Iterator[Tensor]:
    """Data whose number nobody knows, so that they cannot be too few."""
    return iter(data.split(40))


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (network, DATA),
        (lambda: network(1), images(80, shape=(1, 40, 30)).float()),
        (lambda: nn.Sequential(nn.Identity(), network()), DATA),
    ],
    ids=["images", "spectrograms", "images in front of the network"],
)
def test_images_get_cosines(make: Callable[[], nn.Module], data: Tensor) -> None:
    fitted = ttapca.fit(make(), "0", unknown(data))
    assert (fitted.route, fitted.shape) == ("dct", data.shape[1:])
    assert fitted.n_components_ == data[0].numel()
    assert not fitted.basis.principal
    assert fitted.outliers_ is not None
    assert f"cosines of the input {tuple(data.shape[1:])})" in repr(fitted)
    assert "folded" not in repr(fitted)


@pytest.mark.parametrize("n_components", [30, 0.5])
def test_a_rank_asks_for_principal_components(n_components: int | float) -> None:
    fitted = ttapca.fit(network(), "0", unknown(), n_components)
    assert fitted.route == "folded"
    assert fitted.basis.principal
    assert "folded (3, 20, 20) -> (8, 20, 20)" in repr(fitted)


def test_pca_asks_for_principal_components() -> None:
    found = ttapca.fit(network(), "0", unknown(), route="pca")
    alike = ttapca.fit(network(), "0", unknown(), route="folded")
    assert (found.route, found.basis.principal) == ("folded", True)
    torch.testing.assert_close(found.singular_values_, alike.singular_values_)


@pytest.mark.parametrize(
    ("shape", "output", "folds", "data_shape"),
    [
        ((1, 8, 8), (16, 8, 8), True, (1, 8, 8)),  # small: an exact basis costs nothing
        ((16, 16, 16), (32, 16, 16), True, (3, 32, 32)),  # maps
        ((3, 30, 30), (9, 30, 30), True, (5, 30, 30)),  # not what the model is given
        ((5, 30, 30), (9, 30, 30), True, (5, 30, 30)),  # too many channels for images
        ((2048,), (4096,), True, (2048,)),
    ],
)
def test_anything_else_gets_principal_components(
    shape: tuple[int, ...], output: tuple[int, ...], folds: bool, data_shape: tuple[int, ...]
) -> None:
    problem = Problem(shape, output, folds, samples=None, data_shape=data_shape)
    plan = plan_of(problem, memory=10**13)
    assert plan.route == "folded"
    assert not plan.cosines_serve


def test_size_decides() -> None:
    for side, route in ((32, "folded"), (33, "dct")):
        shape = (1, side, side)
        problem = Problem(shape, (4, side, side), True, samples=50_000, data_shape=shape)
        assert plan_of(problem, memory=10**13).route == route
    assert SMALL == 32 * 32


@pytest.mark.parametrize(
    ("side", "samples", "route"),
    [
        (32, 50_000, "folded"),
        (32, 500, "folded"),  # too few of them, but asked for
        (48, 500, "gram"),
        (224, 700, "gram"),
        (64, 50_000, "randomised"),
    ],
)
def test_pca_is_any_route_but_cosines(side: int, samples: int, route: RouteName) -> None:
    shape = (3, side, side)
    problem = Problem(shape, (16, side, side), True, samples=samples, data_shape=shape)
    assert plan_of(problem, memory=10**14).route == "dct"
    assert plan_of(problem, "pca", memory=10**14).route == route


def test_the_plan_says_why() -> None:
    problem = Problem((3, 32, 32), (16, 32, 32), True, samples=50_000, data_shape=(3, 32, 32))
    assert "for images as good as principal components" in str(plan_of(problem))


@pytest.mark.filterwarnings("error::ttapca.errors.BasisWarning")
def test_the_filters_of_the_paper_say_that_they_are_for_pca() -> None:
    model = network()
    cosines = ttapca.fit(model, "0", unknown())
    principal = ttapca.fit(model, "0", unknown(), route="pca")
    said = r'for principal components; found a filter of cosines at `0`.*`route="pca"`.*`wiener`'
    for method in ("ttapca", "ttapca-relu", "ttapca-exp", "ttapca-multiplicative"):
        with left_untouched(model, DATA[:4]), pytest.warns(BasisWarning, match=said) as found:
            ttapca.adapt(model, method, filter=cosines).detach()  # type: ignore[arg-type]
        assert found[0].filename == __file__  # it points at the call of `adapt`
        ttapca.adapt(model, method, filter=principal).detach()  # type: ignore[arg-type]
    for method in ("wiener", "match", "two-sided", "ttapca-closed"):
        ttapca.adapt(model, method, filter=cosines).detach()  # type: ignore[arg-type]
