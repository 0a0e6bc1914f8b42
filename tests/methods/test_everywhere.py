"""Every method on every kind of network: what all of them keep to, and real digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import (
    BATCHES,
    DATA,
    NEEDS_BATCH_NORM,
    NEEDS_SOURCE,
    NETWORKS,
    VARIANTS,
    X,
    adapted,
    learns,
    required_options,
)
from methods.plain_loops import both_ways
from oracles import images, left_untouched
from ttapca.adaptation.adapter import Forgetting
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import AttachError, ShapeError
from ttapca.networks import load

every_case = pytest.mark.parametrize("case", [*ttapca.METHODS, *VARIANTS])


@pytest.mark.parametrize("kind", NETWORKS)
@every_case
def test_serves_or_says_why_not(case: str, kind: str) -> None:
    """Finite logits of the right shape at batches of 200, 2 and 1, or a clear error."""
    model = NETWORKS[kind]()
    with left_untouched(model, DATA[:4]):
        if case in NEEDS_BATCH_NORM and kind in ("GroupNorm", "LayerNorm"):
            with pytest.raises(AttachError, match="the model has none"):
                adapted(case, kind, model=model)
            return
        adapter = adapted(case, kind, model=model, **({"lr": 1e-3} if learns(case) else {}))
        for size in (200, 2, 1, 2, 1):
            batch = images(size, seed=size)
            if size == 1 and kind == "BatchNorm1d" and uses_batch_statistics(adapter):
                with pytest.raises(ShapeError, match="Use a larger batch"):
                    adapter(batch)
                continue
            logits = adapter(batch[:12] if case == "memo" else batch)  # image by image: slow
            assert logits.shape[1] == 5
            assert torch.isfinite(logits).all()
        assert adapter.skipped == 0
        moved = sum(parameter.numel() for parameter in adapter.surfaces.parameters())
        assert ((adapter.updates > 0), adapter.n_parameters) == (learns(case), learns(case) * moved)
        adapter.detach()


@every_case
def test_an_empty_batch_has_no_predictions_and_changes_nothing(case: str) -> None:
    adapter, other = adapted(case), adapted(case)
    for x in (X, BATCHES[1]):
        assert adapter(x[:0]).shape == (0, 5)
        assert torch.equal(adapter(x), other(x))
    assert adapter(X[:0]).shape == (0, 5)


def uses_batch_statistics(adapter: ttapca.Adapter) -> bool:
    """Whether normalisation rests on the batch alone: one vector has no variance."""
    statistics = [s for s in adapter.surfaces if isinstance(s, ttapca.BatchNormStatistics)]
    return any(surface.ends == (1.0, 1.0) and surface.prior is None for surface in statistics)


@every_case
def test_when_it_forgets(case: str) -> None:
    episodic, fresh = (adapted(case, forgetting="episodic") for _ in "ab")
    for x in (3 * X, 0.2 * BATCHES[1]):
        fresh.reset()
        expected = fresh(x)
        assert torch.equal(episodic(x), expected)
    online, continual = (adapted(case, forgetting=how) for how in ("online", "continual"))
    # Of the same condition, as some keep what they know by condition.
    fresh.reset()
    expected = fresh(3 * BATCHES[1])
    for each in (online, continual):
        each(3 * X)
        each.start_condition()
    assert torch.equal(online(3 * BATCHES[1]), expected)
    remembers = not case.startswith(("source", "bn", "lame", "iabn"))
    assert torch.equal(continual(3 * BATCHES[1]), expected) != remembers


World = tuple[nn.Module, ttapca.FittedFilter, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def world() -> World:
    """The demo's network, a filter, digits, noisy ones, and what they are."""
    model = load("digits-small-cnn")
    test = read_digits("test")
    fitted = ttapca.fit(model, "conv1", to_tensor(read_digits("train").images), 40)
    clean = to_tensor(test.images)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return model, fitted, clean, (clean + 0.3 * noise).clamp(0, 1), torch.from_numpy(test.labels)


@torch.no_grad()
def error_of(predict: Any, images: Tensor, labels: Tensor, size: int = 100) -> float:
    wrong = sum(
        int((predict(x).argmax(1) != y).sum())
        for x, y in zip(images.split(size), labels.split(size), strict=True)
    )
    return 100 * wrong / len(labels)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_no_method_makes_noisy_digits_much_worse(
    method: str, forgetting: Forgetting, world: World
) -> None:
    model, fitted, _, noisy, labels = world
    if method == "memo":  # one image at a time, many views of each
        noisy, labels = noisy[:100], labels[:100]
    if method == "lame":  # made for streams in which neighbours share a class
        order = labels.argsort(stable=True)
        noisy, labels = noisy[order], labels[order]
    given = required_options(method, model, (1, 8, 8))
    if method == "lame":  # by rbf all samples of a batch agree, on the wrong class if most do
        given |= {"affinity": "knn"}
    given |= {"filter": fitted} if ttapca.METHODS[method].method.needs_filter else {}
    if method in ("memo", "cotta", "rotta"):  # a mirrored digit is another digit, or none
        given |= {"flip": False}
    if method in ("memo", "cotta"):
        given |= {"views": 32 if method == "cotta" else 8}
    if method in NEEDS_SOURCE:
        given |= {"source": to_tensor(read_digits("train").images)}
    if method == "pea":
        given |= {"augment": "crop"}
    source = error_of(model, noisy, labels)
    with ttapca.adapt(model, method, forgetting=forgetting, **given) as adapter:
        start = error_of(adapter.model, noisy, labels)
        found = error_of(adapter, noisy, labels)
    assert found <= start + 2.0
    if method in ("bn", "tent", "eata"):
        assert found < source


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4, 16, 64, 200])
def test_wiener_is_safe_on_clean_digits_and_better_on_noisy_ones(size: int, world: World) -> None:
    model, fitted, clean, noisy, labels = world
    if size == 1:
        clean, noisy, labels = clean[:300], noisy[:300], labels[:300]
    source = [error_of(model, data, labels) for data in (clean, noisy)]
    with ttapca.adapt(model, "wiener", filter=fitted) as adapter:
        found = [error_of(adapter, data, labels, size) for data in (clean, noisy)]
    assert found[0] <= source[0] + 0.4
    assert found[1] < source[1]


def test_the_order_of_clean_digits_is_learned(world: World) -> None:
    model, _, clean, _, labels = world
    fitted = ttapca.fit(model, "conv1", to_tensor(read_digits("train").images))
    by_class = labels.argsort(stable=True)
    in_no_order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))

    def error(places: Tensor, **given: Any) -> float:
        with ttapca.adapt(model, "wiener", filter=fitted, forgetting="online", **given) as adapted:
            return error_of(adapted, clean[places], labels[places], 50)

    source, image = error_of(model, clean, labels), 100 / len(labels)
    assert error(by_class) <= source
    assert error(by_class, order="video") <= source
    assert error(by_class, order="shuffled") > source + 10 * image
    assert error(in_no_order) <= source + 2.1 * image
