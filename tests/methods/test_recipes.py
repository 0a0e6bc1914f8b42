from __future__ import annotations

import pytest
import torch
from torch import nn

import ttapca
from oracles import images, left_untouched, options_of, small_convnet
from ttapca.errors import AttachError, OptionError
from ttapca.methods.recipe import Wishes

DATA = images(150)
X = images(12, seed=8)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA, 20)


@pytest.mark.parametrize("method", ttapca.RECIPES)
@pytest.mark.parametrize("episodic", [True, False])
def test_every_method_takes_the_same_call(method: str, episodic: bool) -> None:
    adapter = ttapca.adapt(
        small_convnet(),
        method,
        filter=FITTED,
        episodic=episodic,
        steps=1,
        lr=1e-3,
        logits="after",
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
    assert ttapca.adapt(small_convnet(), method, filter=FITTED).n_parameters == number


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
        ("ttapca-relu", {"filter": FITTED, "statistics": 2.0}, "between 0 and 1; found 2.0"),
        ("source", {"alpha": 0.5}, "`source` has no option `alpha`; it has none of its own"),
        ("bn", {"alpha": 1.5}, "between 0 and 1; found 1.5"),
        ("bn", {"prior": -1.0}, "`prior`, a number of samples, is finite and not below 0"),
        ("bn", {"alpha": 0.5, "prior": 8}, "found both"),
        ("tent", {"filter": "wrn-conv1/"}, "needs a fitted filter; found a str"),
        ("ttapca-exp", {"filter": FITTED, "lr": -1.0}, "`lr` is a finite number above 0"),
        ("ttapca-exp", {"filter": FITTED, "steps": 0}, "`steps` is a whole number"),
        ("bn", {"episodic": True, "forgetting": "online"}, "contradict each other"),
        ("bn", {"episodic": False, "forgetting": "episodic"}, "contradict each other"),
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "episodic"),
        ({"episodic": True}, "episodic"),
        ({"episodic": False}, "online"),
        ({"episodic": False, "forgetting": "continual"}, "continual"),
        ({"forgetting": "continual"}, "continual"),
    ],
)
def test_two_ways_to_say_when_to_forget(options: dict[str, object], expected: str) -> None:
    assert ttapca.adapt(small_convnet(), "bn", **options).forgetting == expected  # type: ignore[arg-type]


def test_another_shape_at_test_time_loses_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    fitted = ttapca.fit(model, "0", DATA, 10)
    adapter = ttapca.adapt(model, "ttapca-relu", filter=fitted, episodic=False, lr=0.1)
    adapter(X)
    before = adapter.surfaces[-1].filter.gains().detach()
    with pytest.raises(ttapca.errors.ShapeError, match=r"\(3, 6, 6\); found \(3, 9, 9\)"):
        adapter(images(5, shape=(3, 9, 9)))
    assert torch.equal(adapter.surfaces[-1].filter.gains().detach(), before)
    assert adapter.detach()(images(5, shape=(3, 9, 9))).shape == (5, 8)


def test_a_mover_tells_its_learning_rate() -> None:
    for wished, expected in ((None, 1e-3), (0.25, 0.25)):
        mover = ttapca.RECIPES["tent"].plan(Wishes(lr=wished)).mover
        assert mover.descent.lr == expected
        mover.bind(nn.Identity(), [nn.Parameter(torch.zeros(2))])
        assert mover.descent.lr == expected
