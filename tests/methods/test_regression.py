"""Outputs that are no classes: refused by objectives on classes, served by the closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ttapca
from oracles import filter_for, images, left_untouched, required_options
from small_networks import pixelwise, with_outputs
from ttapca.errors import OptionError

DATA = images(150)
BATCHES = [2 * images(12, seed=8), 0.3 * images(12, seed=9), images(12, seed=10)]
X = BATCHES[0]
NETWORKS = {
    "one number": lambda: with_outputs(1),
    "four numbers": lambda: with_outputs(4),
    "a map": lambda: pixelwise(1),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_served_or_refused_with_the_way_out(method: str, network: str) -> None:
    model = NETWORKS[network]()
    fitted = ttapca.fit(model, "conv1", DATA, 40, outputs="regression")
    given: dict[str, Any] = filter_for(method, fitted) | {"outputs": "regression"}
    given |= required_options(method, model, (3, 6, 6)) | {"forgetting": "online"}
    with left_untouched(model, X):
        if "regression" in ttapca.METHODS[method].method.outputs:
            expected = model(X).shape
            adapted = ttapca.adapt(model, method, **given)
            assert adapted(X).shape == expected
            with adapted.disabled():
                assert torch.equal(adapted(X), model(X))
            adapted.detach()
            return
        said = 'kind multiclass.*; found `outputs="regression"`. Choose .*`wiener`'
        with pytest.raises(OptionError, match=said):
            ttapca.adapt(model, method, **given)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_filter_of_a_regression_knows_no_classes(network: str) -> None:
    fitted = ttapca.fit(NETWORKS[network](), "conv1", DATA, 40, outputs="regression")
    assert fitted.classes_ is None
    assert fitted.agreement_ is None
    assert fitted.mirror_agreement_ is None


@pytest.mark.parametrize("network", NETWORKS)
def test_the_closed_form_brings_noisy_outputs_nearer(network: str) -> None:
    model = NETWORKS[network]()
    fitted = ttapca.fit(model, "conv1", DATA, 40, outputs="regression")
    clean = images(96, seed=11)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).double()
    shifted = clean + 2 * clean.std() * noise
    with torch.no_grad():
        wanted, plain = model(clean), model(shifted)
        adapted = ttapca.adapt(
            model, "wiener", filter=fitted, outputs="regression", forgetting="online"
        )
        found = torch.cat([adapted(x) for x in shifted.split(24)])
    assert (found - wanted).square().mean() < 0.8 * (plain - wanted).square().mean()


def test_an_alarm_watches_without_classes() -> None:
    model = with_outputs(4)
    fitted = ttapca.fit(model, "conv1", DATA, 40)  # as if they were classes
    told: list[ttapca.Health] = []
    given: dict[str, Any] = {"filter": fitted, "on_shift": told.append, "forgetting": "online"}
    adapted = ttapca.adapt(model, "wiener", outputs="regression", **given)
    for x in (8 * images(400, seed=3)).split(50):
        adapted(x)
    assert len(told) == 1
    assert adapted.health.shifted
    assert adapted.health.composition is None  # nobody has counted classes ...
    assert adapted.health.skew == 1.0  # ... which are taken to be few
