"""What all methods have in common: names, options, what is refused, where logits are found."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn

import ttapca
from oracles import filter_for, images, left_untouched, options_of, small_convnet
from ttapca.adaptation.adapter import Forgetting
from ttapca.errors import AttachError, LayerOutputError, OptionError
from ttapca.methods import TTAPCA, Tent, Wiener
from ttapca.methods.adapt import MethodName

DATA = images(150)
X = images(12, seed=8)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA, 20)


@pytest.mark.parametrize("method", ttapca.METHODS)
@pytest.mark.parametrize("forgetting", ["episodic", "online", "continual"])
def test_every_method_predicts(method: str, forgetting: Forgetting) -> None:
    adapter = ttapca.adapt(
        small_convnet(),
        method,
        forgetting=forgetting,
        **filter_for(method, FITTED),
        **options_of(method),
    )
    assert adapter(X).shape == (12, 5)
    moved = sum(parameter.numel() for parameter in adapter.surfaces.parameters())
    assert adapter.n_parameters == (moved if adapter.mover.needs_gradients else 0)
    # `memo` steps on each image; no prediction of this network is sure enough for `eata`.
    steps = {"memo": 12, "eata": 0}
    assert adapter.updates == steps.get(method, int(adapter.mover.needs_gradients))
    assert adapter.skipped == 0


@pytest.mark.parametrize(
    ("method", "number"),
    [("source", 0), ("bn", 0), ("tent", 48), ("ttapca-relu", 20), ("ttapca-multiplicative", 40)],
)
def test_how_many_parameters_a_method_moves(method: str, number: int) -> None:
    adapter = ttapca.adapt(small_convnet(), method, **filter_for(method, FITTED))
    assert adapter.n_parameters == number


def test_source_is_the_model() -> None:
    assert torch.equal(ttapca.adapt(small_convnet(), "source")(X), small_convnet()(X))


def test_bn_is_the_model_in_training_mode() -> None:
    expected = small_convnet().train()(X)
    assert torch.equal(ttapca.adapt(small_convnet(), "bn")(X), expected)
    assert torch.equal(ttapca.adapt(small_convnet(), "bn", alpha=0.0)(X), small_convnet()(X))
    mixed = ttapca.adapt(small_convnet(), "bn", alpha=0.5)(X)
    assert not torch.equal(mixed, expected)


def test_statistics_of_the_filters() -> None:
    def output(**options: object) -> torch.Tensor:
        return ttapca.adapt(small_convnet(), "ttapca-relu", filter=FITTED, **options)(X)

    assert torch.equal(output(), output(statistics="batch"))
    assert torch.equal(output(statistics=0), output(statistics="source"))
    assert not torch.equal(output(statistics=0.5), output())


def test_options_reach_the_gains() -> None:
    def gains(method: str, **options: object) -> torch.Tensor:
        adapter = ttapca.adapt(small_convnet(), method, filter=FITTED, **options)
        return adapter.surfaces[-1].filter.gains().detach()

    plain = FITTED.singular_values_
    relative = plain / plain[0]
    torch.testing.assert_close(gains("ttapca-relu", initial=0.5), relative / (relative + 0.5))
    torch.testing.assert_close(
        gains("ttapca-relu", initial=0.5, normalise=False), plain / (plain + 0.5)
    )
    torch.testing.assert_close(gains("ttapca-exp", initial=0.5), torch.sigmoid(relative - 0.25))
    torch.testing.assert_close(
        gains("ttapca-multiplicative", penalty="exponential", initial=0.5, limit=2.0),
        torch.sigmoid(relative - 0.25),
    )


def test_a_network_without_batchnorm_can_be_filtered() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 4))
    model = model.double()
    fitted = ttapca.fit(model, "0", DATA, 10)
    assert ttapca.adapt(model, "ttapca-exp", filter=fitted)(X).shape == (12, 4)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ttapca-rleu", {}, r"no method `ttapca-rleu`\. Did you mean `ttapca-relu`"),
        ("xyz", {}, "There are: source, bn"),
        ("ttapca-relu", {}, "needs a fitted filter; found none"),
        ("ttapca-relu", {"filter": "wrn-conv1/"}, "needs a fitted filter; found a str"),
        ("ttapca-relu", {"filter": FITTED, "intial": 1.0}, "Did you mean `initial`"),
        ("ttapca-relu", {"filter": FITTED, "statistics": "both"}, "found 'both'"),
        ("ttapca-relu", {"filter": FITTED, "statistics": 2.0}, "from 0 to 1.*; found 2.0"),
        ("source", {"alpha": 0.5}, "`source` has no option `alpha`; it has none"),
        ("bn", {"alpha": 1.5}, "from 0 to 1; found 1.5"),
        ("bn", {"prior": -1.0}, "`prior` must be a finite number from 0 on"),
        ("bn", {"alpha": 0.5, "prior": 8}, "found both"),
        ("tent", {"filter": "wrn-conv1/"}, "`filter` must be a FittedFilter; found 'wrn-conv1/'"),
        ("ttapca-exp", {"filter": FITTED, "lr": -1.0}, "`lr` must be a finite number above 0"),
        ("ttapca-exp", {"filter": FITTED, "steps": 0}, "`steps` must be a whole number from 1 on"),
        ("bn", {"episodic": True}, "`bn` has no option `episodic`"),
        ("bn", {"forgetting": "never"}, "`forgetting` must be one of episodic"),
        # What would have no effect is refused, and so is what has another type.
        ("bn", {"filter": FITTED}, "`bn` has no option `filter`; it has alpha, prior"),
        ("lame", {"lr": 0.1}, "`lame` has no option `lr`"),
        ("wiener", {"filter": FITTED, "lr": -1}, "`wiener` has no option `lr`"),
        ("wiener", {"filter": FITTED, "steps": 0}, "`wiener` has no option `steps`"),
        ("wiener", {"filter": FITTED, "logits": "after"}, "`wiener` has no option `logits`"),
        ("wiener", {"filter": FITTED, "guard": "rollback"}, "no effect on what nothing learns"),
        ("lame", {"guard": "reset", "forgetting": "online"}, "no effect on what nothing learns"),
        ("tent", {"guard": "rollback"}, "no effect on what forgets after each batch"),
        ("wiener", {"filter": FITTED, "threshold": "0.5"}, "`threshold` must be .*; found '0.5'"),
        ("wiener", {"filter": FITTED, "window": 3, "threshold": 0.5}, "`threshold` would have no"),
        ("wiener", {"filter": []}, "needs a fitted filter; found a list"),
        ("tent", {"gain": "wiener"}, "`gain` would have no effect: .* no `filter=`"),
        ("tent", {"logits": "during"}, "`logits` must be one of before, after"),
        ("eata", {"fisher_weight": 1.0}, "`fisher_weight` would have no effect"),
        ("lame", {"affinity": "linear", "neighbours": 3}, "`neighbours` would have no effect"),
        ("ttapca", {"filter": FITTED, "limit": 2.0}, "`limit` would have no effect"),
        ("ttapca-relu", {"filter": FITTED, "gain": "relu"}, "`ttapca-relu` has no option `gain`"),
        (Tent(), {"lr": 0.1}, r"go into the method itself, as in Tent\(lr=...\)"),
    ],
)
def test_bad_calls_leave_the_model_untouched(
    method: str, options: dict[str, object], message: str
) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, method, **options)  # type: ignore[arg-type]


def test_bn_needs_batchnorm() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.zeros(1, 3)
    with left_untouched(model, x), pytest.raises(AttachError, match="the model has none"):
        ttapca.adapt(model, "bn")


def test_a_name_is_short_for_a_method() -> None:
    by_name = ttapca.adapt(small_convnet(), "tent", lr=0.1, forgetting="online")
    by_class = ttapca.adapt(small_convnet(), Tent(lr=0.1), forgetting="online")
    for x in (X, images(12, seed=9)):
        assert torch.equal(by_name(x), by_class(x))
    gains = ttapca.adapt(small_convnet(), TTAPCA(FITTED, gain="exponential"))(X)
    assert torch.equal(gains, ttapca.adapt(small_convnet(), "ttapca-exp", filter=FITTED)(X))
    matched = ttapca.adapt(small_convnet(), Wiener(FITTED, shrink=0.5, restore=0.5))(3 * X)
    assert torch.equal(matched, ttapca.adapt(small_convnet(), "match", filter=FITTED)(3 * X))


def test_what_is_registered_is_what_editors_offer() -> None:
    assert tuple(ttapca.METHODS) == get_args(MethodName)
    for name, found in ttapca.METHODS.items():
        assert found.summary[0].isupper() and not found.summary.endswith("."), name
        assert dataclasses.is_dataclass(found.method)
        assert found.rules.keys() == found.options.keys()


def test_statistics_can_be_mixed_by_choice() -> None:
    def output(statistics: object) -> torch.Tensor:
        method = Wiener(FITTED, statistics=statistics)  # type: ignore[arg-type]
        return ttapca.adapt(small_convnet(), method)(3 * X)

    assert torch.equal(output("mixed"), output(ttapca.Mixture()))
    assert not torch.equal(output("mixed"), output(ttapca.Mixture(first=0.9)))
    with pytest.raises(OptionError, match="`first` must be a finite number from 0 to 1; found 2"):
        ttapca.Mixture(first=2)


class Wrapped(nn.Module):
    """Returns what a library of its own would."""

    def __init__(self, how: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.net = small_convnet()
        self.how = how

    def forward(self, x: torch.Tensor) -> object:
        return self.how(self.net(x))


@pytest.mark.parametrize("method", ttapca.METHODS)
@pytest.mark.parametrize(
    ("how", "find"),
    [
        (lambda z: {"logits": z, "hidden": None}, operator.itemgetter("logits")),
        (lambda z: (None, z), operator.itemgetter(1)),
        (lambda z: SimpleNamespace(logits=z), operator.attrgetter("logits")),
    ],
    ids=["dict", "tuple", "object"],
)
def test_logits_are_found_in_what_a_model_returns(
    method: str, how: Callable[[torch.Tensor], object], find: Callable[[object], torch.Tensor]
) -> None:
    plain = small_convnet()
    given = {**filter_for(method, FITTED), **options_of(method)}
    expected = ttapca.adapt(plain, method, **given)(X)
    model = Wrapped(how)
    inside = dict(given)
    if "filter" in inside:
        inside["filter"] = dataclasses.replace(FITTED, layer="net.conv1")
    if "split" in inside:
        inside["split"] = "net.bn1"
    found = ttapca.adapt(model, method, logits=find, **inside)(X)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_logits_that_are_not_found_are_explained() -> None:
    adapter = ttapca.adapt(Wrapped(lambda z: {"logits": z}), "tent", logits=lambda out: out.logits)
    with pytest.raises(LayerOutputError, match="returns, a dict; it failed: AttributeError"):
        adapter(X)
    adapter = ttapca.adapt(Wrapped(lambda z: {"logits": z}), "bn", logits=lambda out: "logits")
    with pytest.raises(LayerOutputError, match="found a str in a dict"):
        adapter(X)
    with pytest.raises(OptionError, match="`logits` is a function that finds"):
        ttapca.adapt(small_convnet(), Tent(), logits=3)  # type: ignore[arg-type]


def test_another_shape_at_test_time_loses_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    fitted = ttapca.fit(model, "0", DATA, 10)
    adapter = ttapca.adapt(model, "ttapca-relu", filter=fitted, forgetting="online", lr=0.1)
    adapter(X)
    before = adapter.surfaces[-1].filter.gains().detach()
    with pytest.raises(ttapca.errors.ShapeError, match=r"\(3, 6, 6\); found \(3, 9, 9\)"):
        adapter(images(5, shape=(3, 9, 9)))
    assert torch.equal(adapter.surfaces[-1].filter.gains().detach(), before)
    assert adapter.detach()(images(5, shape=(3, 9, 9))).shape == (5, 8)
