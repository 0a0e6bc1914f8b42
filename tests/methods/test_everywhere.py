"""Every method on every kind of network: what all of them keep to, and real digits."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, X, both_ways
from oracles import filter_for, images, left_untouched, required_options, small_convnet
from small_networks import TokenNet, group_norm_convnet
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import AttachError, ShapeError
from ttapca.networks import load

SHAPE = (3, 6, 6)
DATA = images(150)


def batch_norm_vector_net() -> nn.Module:
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("conv1", nn.Linear(108, 120))
    net.add_module("scaling", nn.BatchNorm1d(120))
    net.add_module("fc", nn.Linear(120, 5))
    return net


NETWORKS = {
    "BatchNorm2d": small_convnet,
    "BatchNorm1d": batch_norm_vector_net,
    "GroupNorm": group_norm_convnet,
    "LayerNorm": TokenNet,
}
# Every method by its name, and those ways to use one that keep something else between batches.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ttapca.METHODS},
    "eata with source data": ("eata", {"source": DATA[:64], "fisher_weight": 1.0}),
    "shot with pseudo-labels": ("shot", {"pseudo_labels": 0.3}),
    "roid without views": ("roid", {"consistency": False}),
    "lame by rbf": ("lame", {"affinity": "rbf"}),
    "lame by linear": ("lame", {"affinity": "linear"}),
    "ttt by random rotations": ("ttt", {"rotations": "random"}),
    "tent over wiener": ("tent", {"gain": "wiener", "statistics": "mixed"}),
}
# Margins that let samples of these networks take part.
MARGINS: dict[str, dict[str, Any]] = {
    "eata": {"entropy_margin": 1.1, "redundancy_margin": 2.0},
    "sar": {"entropy_margin": 1.1},
}
every_case = pytest.mark.parametrize("case", CASES)


def network(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[kind]().double().eval()


@functools.cache
def filter_of(kind: str) -> ttapca.FittedFilter:
    return ttapca.fit(network(kind), "conv1", DATA, 10)


def adapted(case: str, kind: str = "BatchNorm2d", model: nn.Module | None = None) -> ttapca.Adapter:
    """Online, on a network of this kind."""
    method, given = CASES[case]
    model = model or network(kind)
    options = {**required_options(method, model, SHAPE), **MARGINS.get(method, {}), **given}
    if ttapca.METHODS[method].method.needs_filter or "gain" in given:
        options["filter"] = filter_of(kind)
    return ttapca.adapt(model, method, forgetting="online", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NETWORKS)
@every_case
def test_serves_or_says_why_not(case: str, kind: str) -> None:
    """Finite logits of the right shape at batches of 200, 2 and 1, or a clear error."""
    model = network(kind)
    with left_untouched(model, DATA[:4]):
        if case == "bn" and kind in ("GroupNorm", "LayerNorm"):
            with pytest.raises(AttachError, match="the model has none"):
                adapted(case, kind, model)
            return
        adapter = adapted(case, kind, model)
        for size in (200, 2, 1, 2, 1):
            batch = images(size, seed=size, shape=SHAPE)
            if size == 1 and kind == "BatchNorm1d" and uses_batch_statistics(adapter):
                with pytest.raises(ShapeError, match="Use a larger batch"):
                    adapter(batch)
                continue
            logits = adapter(batch[:12] if case == "memo" else batch)  # image by image: slow
            assert logits.shape[1] == 5
            assert torch.isfinite(logits).all()
        assert adapter.skipped == 0
        assert (adapter.updates > 0) == ttapca.METHODS[CASES[case][0]].method.learns
        adapter.detach()


def uses_batch_statistics(adapter: ttapca.Adapter) -> bool:
    """Whether normalisation rests on the batch alone: one vector has no variance."""
    statistics = [s for s in adapter.surfaces if isinstance(s, ttapca.BatchNormStatistics)]
    return any(surface.ends == (1.0, 1.0) and surface.prior is None for surface in statistics)


@pytest.mark.parametrize("kind", ["BatchNorm2d", "GroupNorm"])
@every_case
def test_broken_batches_are_counted_and_leave_no_mark(case: str, kind: str) -> None:
    if (case, kind) == ("bn", "GroupNorm"):
        pytest.skip("`bn` refuses a network without BatchNorm")
    one_nan, one_inf = X.clone(), X.clone()
    one_nan[3, 0, 0, 0], one_inf[5, 1, 2, 3] = float("nan"), float("inf")
    clean, adapter = adapted(case, kind), adapted(case, kind)
    for x, broken in zip(BATCHES, (one_nan, X * float("nan"), one_inf), strict=False):
        assert torch.equal(adapter(x), clean(x))
        adapter(broken)
    assert torch.equal(adapter(X), clean(X))
    # `memo` counts images.
    assert (adapter.skipped, clean.skipped) == (1 + 12 + 1 if case == "memo" else 3, 0)


@every_case
def test_copies_pickles_and_saved_states_go_their_own_way(case: str) -> None:
    adapter = adapted(case)
    first = [adapter(x) for x in BATCHES[:2]]
    state = copy.deepcopy(adapter.state_dict())
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    expected = [twins[0](x) for x in BATCHES[2:5]]
    restored = adapted(case)
    restored(3 * X)
    restored.load_state_dict(state)
    for each in (adapter, twins[1], restored):
        assert all(torch.equal(each(x), y) for x, y in zip(BATCHES[2:5], expected, strict=True))
    for each in (adapter, *twins, restored):
        each.reset()
        assert all(torch.equal(each(x), y) for x, y in zip(BATCHES, first, strict=False))


@every_case
def test_casting_takes_everything_along(case: str) -> None:
    adapter, reference = adapted(case), adapted(case)
    adapter(X)
    reference(X)
    adapter.float()
    assert all(tensor.dtype == torch.float32 for tensor in adapter.kept_tensors())
    for x in BATCHES[:3]:
        found = adapter(x.float())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), reference(x), rtol=0, atol=1e-2)
    adapter.reset()
    torch.testing.assert_close(adapter(X.float()).double(), adapted(case)(X), rtol=0, atol=1e-2)


@pytest.fixture(scope="module")
def world() -> tuple[nn.Module, ttapca.FittedFilter, Tensor, Tensor]:
    """The demo's network and noisy digits."""
    model = load("digits-small-cnn")
    train, test = read_digits("train"), read_digits("test")
    fitted = ttapca.fit(model, "conv1", to_tensor(train.images), 40)
    generator = torch.Generator().manual_seed(0)
    clean = to_tensor(test.images)
    noisy = (clean + 0.3 * torch.randn(clean.shape, generator=generator)).clamp(0, 1)
    return model, fitted, noisy, torch.from_numpy(test.labels)


def error_of(predict, batches: Tensor, labels: Tensor) -> float:
    wrong = sum(
        int((predict(x).argmax(1) != y).sum())
        for x, y in zip(batches.split(100), labels.split(100), strict=True)
    )
    return 100 * wrong / len(labels)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_no_method_makes_noisy_digits_much_worse(method: str, forgetting: str, world) -> None:
    model, fitted, noisy, labels = world
    if method == "memo":  # one image at a time, many views of each
        noisy, labels = noisy[:100], labels[:100]
    if method == "lame":  # made for streams in which neighbours share a class
        order = labels.argsort(stable=True)
        noisy, labels = noisy[order], labels[order]
    given = {**required_options(method, model, (1, 8, 8)), **filter_for(method, fitted)}
    if method in ("memo", "cotta"):  # a mirrored digit is another digit, or none
        given |= {"flip": False, "views": 32 if method == "cotta" else 8}
    adapter = ttapca.adapt(model, method, forgetting=forgetting, **given)
    try:
        with torch.no_grad():
            start = error_of(adapter.model, noisy, labels)
        found = error_of(adapter, noisy, labels)
    finally:
        adapter.detach()
    with torch.no_grad():
        source = error_of(model, noisy, labels)
    assert found <= start + 2.0
    if method in ("bn", "tent", "eata"):
        assert found < source
