"""What all methods have in common: names, options, what is refused, where logits are found."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from scripts import write_methods
from torch import nn

import ttapca
from oracles import filter_for, images, left_untouched, options_of, small_convnet
from ttapca.adaptation.adapter import Forgetting
from ttapca.errors import (
    AttachError,
    InputTypeError,
    LayerNotFoundError,
    LayerOutputError,
    OptionError,
    ShapeError,
)
from ttapca.methods import TTAPCA, Tent, Wiener
from ttapca.methods.adapt import MethodName

DATA = images(150)
X = images(12, seed=8)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA, 20)
NAN = float("nan")
HEAD = {"head": nn.Identity(), "split": "bn1"}


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
    [("source", 0), ("bn", 0), ("tent", 28), ("ttapca-relu", 20), ("ttapca-multiplicative", 40)],
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
        # One value that makes no sense for each option of each method.
        ("cotta", {"views": 0}, "`views` must be a whole number from 1 on; found 0"),
        ("cotta", {"confidence_below": 2.0}, "`confidence_below` must be .* from 0 to 1; found 2"),
        ("cotta", {"teacher_momentum": -0.1}, "`teacher_momentum` must be .*; found -0.1"),
        ("cotta", {"restored_share": NAN}, "`restored_share` must be .*; found nan"),
        ("eata", {"entropy_margin": 0.0}, "`entropy_margin` must be .* above 0; found 0.0"),
        ("eata", {"redundancy_margin": -1}, "`redundancy_margin` must be .* above 0; found -1"),
        ("eata", {"fisher_weight": NAN}, "`fisher_weight` must be a finite number above 0"),
        ("lame", {"affinity": "cosine"}, "one of knn, rbf, linear; found 'cosine'"),
        ("lame", {"neighbours": 0}, "`neighbours` must be a whole number from 1 on; found 0"),
        ("lame", {"iterations": True}, "`iterations` must be a whole number from 1 on"),
        ("memo", {"views": 0}, "`views` must be a whole number from 1 on; found 0"),
        ("memo", {"statistics": -1.0}, "`statistics` must be .*from 0 to 1.*; found -1.0"),
        ("roid", {"source_momentum": 0.0}, "`source_momentum` must be .* above 0 to 1; found 0.0"),
        ("roid", {"source_momentum": 1.1}, "found 1.1"),
        ("roid", {"temperature": 0.0}, "`temperature` must be .* above 0; found 0.0"),
        ("roid", {"consistency": 1}, "`consistency` must be true or false; found 1"),
        ("sar", {"entropy_margin": 0.0}, "`entropy_margin` must be .* above 0; found 0.0"),
        ("sar", {"radius": NAN}, "`radius` must be a finite number above 0; found nan"),
        ("sar", {"recover_below": -1.0}, "`recover_below` must be a finite number from 0 on"),
        ("sar", {"leave_out": "fc"}, "`leave_out` must be a list.*; found 'fc'"),
        ("shot", {"pseudo_labels": -0.1}, "`pseudo_labels` must be a finite number from 0 on"),
        ("shot", {"pseudo_labels": True}, "`pseudo_labels` must be .*; found True"),
        ("slr+it", {"likelihood": "firm"}, "`likelihood` must be one of soft, hard; found 'firm'"),
        ("slr+it", {"confidence_weight": -1.0}, "`confidence_weight` must be .* from 0 on"),
        ("slr+it", {"marginal_momentum": 1.0}, "`marginal_momentum` must be .* from 0 below 1"),
        ("slr+it", {"channels": 0}, "`channels` must be a whole number from 1 on; found 0"),
        ("slr+it", {"seed": -1}, "`seed` must be a whole number from 0 on; found -1"),
        ("ttt", {"head": None}, "needs a rotation head.*found none"),
        ("ttt", {"head": "linear"}, "needs a rotation head.*found a str"),
        ("ttt", {"head": nn.Identity()}, "needs the dotted path.*found None"),
        ("ttt", {**HEAD, "rotations": "two"}, "`rotations` must be one of all, random"),
        ("ttt", {**HEAD, "seed": 1}, "`seed` would have no effect: with all rotations"),
        ("ttapca-closed", {"filter": FITTED, "pull": -1.0}, "`pull` must be .* from 0 on; found"),
    ],
)
def test_bad_calls_leave_the_model_untouched(
    method: str, options: dict[str, object], message: str
) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, method, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [name for name, m in ttapca.METHODS.items() if m.method.learns])
def test_how_to_step_is_a_choice_of_every_method_that_learns(method: str) -> None:
    given = {**filter_for(method, FITTED), **options_of(method)}
    if method == "eata":
        given |= {"entropy_margin": 1.1, "redundancy_margin": 2.0}
    outputs, each = [], 12 if method == "memo" else 1
    for logits, steps in (("before", 1), ("after", 3)):
        chosen = {"logits": logits, "steps": steps, "lr": 0.1}
        adapter = ttapca.adapt(small_convnet(), method, **chosen, **given)
        outputs.append(adapter(X))
        assert adapter.updates == steps * each
    assert not torch.equal(*outputs)
    model = small_convnet()
    for option, value, rule in (
        ("lr", 0.0, "a finite number above 0; found 0.0"),
        ("lr", -1.0, "a finite number above 0; found -1.0"),
        ("steps", 0, "a whole number from 1 on; found 0"),
        ("logits", "both", "one of before, after; found 'both'"),
    ):
        message = f"`{option}` must be {rule}"
        with left_untouched(model, X), pytest.raises(OptionError, match=message):
            ttapca.adapt(model, method, **given, **{option: value})


@pytest.mark.parametrize("method", ["eata", "sar"])
def test_no_reliable_sample_no_step(method: str) -> None:
    options = {"entropy_margin": 1e-9, "forgetting": "online", "logits": "after"}
    adapter = ttapca.adapt(small_convnet(), method, **options)
    bn = ttapca.adapt(small_convnet(), "bn")
    for x in (X, images(12, seed=9)):
        assert torch.equal(adapter(x), bn(x))
    assert (adapter.updates, adapter.skipped) == (0, 0)


@pytest.mark.parametrize(
    ("methods", "options", "model", "message"),
    [
        ("bn tent eata roid sar slr+it", {}, nn.Conv2d(3, 4, 6), "the model has none"),
        ("memo cotta", {}, nn.Flatten(), "moves the weights; the model has none"),
        ("shot lame", {"classifier": "fd"}, small_convnet(), "no layer `fd`"),
        ("ttt", {"head": nn.Identity(), "split": "bm1"}, small_convnet(), "Did you mean `bn1`"),
    ],
)
def test_models_that_cannot_be_adapted(
    methods: str, options: dict[str, object], model: nn.Module, message: str
) -> None:
    model = model.double()
    for method in methods.split():
        errors = (AttachError, LayerNotFoundError)
        with left_untouched(model, X), pytest.raises(errors, match=message):
            ttapca.adapt(model, method, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["memo", "cotta", "ttt"])
def test_inputs_that_are_no_images(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    given = {"head": nn.Identity(), "split": "0"} if method == "ttt" else {}
    adapter = ttapca.adapt(model, method, **given)
    with pytest.raises(ShapeError, match=rf"`{method}` changes images.*found \[\(5, 3\)\]"):
        adapter(torch.zeros(5, 3))
    with pytest.raises(InputTypeError, match="floating point; found a tensor of int64"):
        adapter(torch.zeros(5, 3, 6, 6, dtype=torch.int64))


@pytest.mark.parametrize("method", ["eata", "roid"])
def test_samples_are_not_chosen_among_dense_predictions(method: str) -> None:
    dense = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    with pytest.raises(LayerOutputError, match=r"found \(12, 4, 6, 6\)"):
        ttapca.adapt(dense, method)(X)


def test_a_name_is_short_for_a_method() -> None:
    by_name = ttapca.adapt(small_convnet(), "tent", lr=0.1, forgetting="online")
    by_class = ttapca.adapt(small_convnet(), Tent(lr=0.1), forgetting="online")
    for x in (X, images(12, seed=9)):
        assert torch.equal(by_name(x), by_class(x))
    relu, gains = (
        ttapca.adapt(small_convnet(), TTAPCA(FITTED, gain=gain))(X)
        for gain in ("relu", "exponential")
    )
    for name in ("ttapca", "ttapca-relu"):
        assert torch.equal(relu, ttapca.adapt(small_convnet(), name, filter=FITTED)(X))
    assert torch.equal(gains, ttapca.adapt(small_convnet(), "ttapca-exp", filter=FITTED)(X))
    matched = ttapca.adapt(small_convnet(), Wiener(FITTED, shrink=0.5, restore=0.5))(3 * X)
    assert torch.equal(matched, ttapca.adapt(small_convnet(), "match", filter=FITTED)(3 * X))


def test_what_is_registered_is_what_editors_offer() -> None:
    assert tuple(ttapca.METHODS) == get_args(MethodName)
    for name, found in ttapca.METHODS.items():
        assert found.summary[0].isupper(), name
        assert not found.summary.endswith("."), name
        assert dataclasses.is_dataclass(found.method)
        assert found.rules.keys() == found.options.keys()


def test_the_page_of_methods_lists_what_is_registered() -> None:
    page = write_methods.PAGE.read_text()
    assert write_methods.with_table(page) == page, "run python scripts/write_methods.py"
    for name in ttapca.METHODS:
        assert page.count(f"`{name}`") > 1, name  # in the table, and beyond it


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
