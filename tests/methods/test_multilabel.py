"""Labels that do not exclude each other: each is yes or no; the loss is the mean over labels."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import ttapca
from methods.per_place import (
    labels,
    mean_entropy,
    plain_cotta,
    plain_memo,
    plain_sar,
    plain_steps,
    scale_and_shift,
)
from methods.plain_loops import assert_follows
from oracles import filter_for, images, left_untouched, required_options
from small_networks import pixelwise, with_outputs
from ttapca.errors import OptionError
from ttapca.methods.views import STRONG, STRONG_COLOURS, mixed_views

DATA = images(150)
BATCHES = [2 * images(12, seed=8), 0.3 * images(12, seed=9), images(12, seed=10)]
X = BATCHES[0]
LABELS: dict[str, Any] = {"outputs": "multilabel", "forgetting": "online"}
NETWORKS = {"of images": lambda: with_outputs(4), "of pixels": lambda: pixelwise(3)}

every_network = pytest.mark.parametrize("network", NETWORKS)


@every_network
def test_tent_equals_a_plain_loop(network: str) -> None:
    model = NETWORKS[network]()
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    expected = plain_steps(scale_and_shift(model), BATCHES, adam, mean_entropy, labels, after=False)
    assert_follows(ttapca.adapt(model, "tent", lr=0.05, **LABELS), expected, BATCHES)


@every_network
def test_sar_equals_a_plain_loop(network: str) -> None:
    model = NETWORKS[network]()
    expected = plain_sar(model, BATCHES, labels, 0.6)
    options = {"lr": 0.05, "entropy_margin": 0.6, "recover_below": 0.0}
    assert_follows(ttapca.adapt(model, "sar", **options, **LABELS), expected, BATCHES)


@pytest.mark.parametrize(
    ("network", "view"), [("of images", STRONG), ("of pixels", STRONG_COLOURS)]
)
def test_cotta_equals_a_plain_loop(network: str, view: Any) -> None:
    model = NETWORKS[network]()
    expected = plain_cotta(model, BATCHES, labels, view)
    options = {"views": 2, "confidence_below": 1.0, "lr": 0.01}
    options |= {"teacher_momentum": 0.9, "restored_share": 0.0}
    adapted = ttapca.adapt(model, "cotta", **options, **LABELS)
    assert_follows(adapted, expected, BATCHES, atol=1e-7)


def test_memo_equals_a_plain_loop() -> None:
    def view(image: Tensor, generator: torch.Generator) -> Tensor:
        return mixed_views(image, 3, generator)

    model = with_outputs(4)
    expected = plain_memo(model, X, labels, view)
    adapted = ttapca.adapt(model, "memo", views=3, lr=0.02, **LABELS)
    torch.testing.assert_close(adapted(X), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_served_or_refused_with_the_way_out(method: str) -> None:
    model = with_outputs(4)
    fitted = ttapca.fit(model, "conv1", DATA, 40, outputs="multilabel")
    assert fitted.classes_ is None
    assert fitted.mirror_agreement_ is None
    given = filter_for(method, fitted) | required_options(method, model, (3, 6, 6)) | LABELS
    with left_untouched(model, X):
        if "multilabel" in ttapca.METHODS[method].method.outputs:
            adapted = ttapca.adapt(model, method, **given)
            assert adapted(X).shape == (12, 4)
            assert torch.isfinite(adapted(X)).all()
            adapted.detach()
            return
        said = 'kind multiclass.*; found `outputs="multilabel"`. Choose .*`tent`.*`wiener`'
        with pytest.raises(OptionError, match=said):
            ttapca.adapt(model, method, **given)


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_the_closed_form_leaves_classes_aside(kind: Any) -> None:
    model = with_outputs(4)
    fitted = ttapca.fit(model, "conv1", DATA, 40)  # by default they are taken for classes
    assert fitted.classes_ is not None
    served = ttapca.adapt(model, "wiener", filter=fitted, outputs=kind, forgetting="online")
    found = [served(x) for x in BATCHES]
    served.detach()
    plain = ttapca.adapt(model, "wiener", filter=fitted, order="shuffled", forgetting="online")
    assert all(torch.equal(one, plain(x)) for one, x in zip(found, BATCHES, strict=True))
    plain.detach()
    with left_untouched(model, X), pytest.raises(OptionError, match=rf'outputs="{kind}"`, which'):
        ttapca.adapt(model, "wiener", filter=fitted, outputs=kind, order="auto")


def test_a_guard_cannot_see_labels_collapse() -> None:
    model = with_outputs(4)
    with left_untouched(model, X), pytest.raises(OptionError, match='"multilabel" do not'):
        ttapca.adapt(model, "tent", guard="reset", **LABELS)
