"""What all methods have in common: names, options, what is refused, where logits are found."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from scripts import write_methods
from torch import nn

import ttapca
from adapters import fitted, options_for
from oracles import images, left_untouched, small_convnet
from ttapca.errors import (
    AttachError,
    InputTypeError,
    LayerNotFoundError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)
from ttapca.methods import TTAPCA, MethodName, Tent, Wiener
from ttapca.methods.method import GradientMethod

DATA = images(150)
X = images(12, seed=8)
FILTER = object()  # stands for a fitted filter in the tables
NAN, INF = float("nan"), float("inf")
HEAD = {"head": nn.Identity(), "split": "bn1"}


def test_source_is_the_model() -> None:
    assert torch.equal(ttapca.adapt(small_convnet(), "source")(X), small_convnet()(X))


def test_bn_is_the_model_in_training_mode() -> None:
    expected = small_convnet().train()(X)
    assert torch.equal(ttapca.adapt(small_convnet(), "bn")(X), expected)
    assert torch.equal(ttapca.adapt(small_convnet(), "bn", alpha=0.0)(X), small_convnet()(X))
    mixed = ttapca.adapt(small_convnet(), "bn", alpha=0.5)(X)
    assert not torch.equal(mixed, expected)


def test_options_reach_the_gains() -> None:
    def gains(method: str, **options: object) -> torch.Tensor:
        adapter = ttapca.adapt(small_convnet(), method, filter=fitted(), **options)
        return adapter.surfaces[-1].filter.gains().detach()

    plain = fitted().singular_values_
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


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ttapca-rleu", {}, r"no method `ttapca-rleu`\. Did you mean `ttapca-relu`"),
        ("xyz", {}, "There are: source, bn"),
        ("ttapca-relu", {}, "needs a fitted filter; found none"),
        ("ttapca-relu", {"filter": "wrn-conv1/"}, "needs a fitted filter; found a str"),
        ("ttapca-relu", {"filter": FILTER, "intial": 1.0}, "Did you mean `initial`"),
        ("source", {"alpha": 0.5}, "`source` has no option `alpha`; it has none"),
        ("bn", {"alpha": 0.5, "prior": 8}, "found both"),
        ("tent", {"filter": "wrn-conv1/"}, "`filter` must be a FittedFilter; found 'wrn-conv1/'"),
        ("bn", {"forgetting": "never"}, "`forgetting` must be one of episodic"),
        # What would have no effect is refused, and so is what has another type.
        ("bn", {"filter": FILTER}, "`bn` has no option `filter`; it has alpha, prior"),
        ("wiener", {"filter": FILTER, "lr": -1}, "`wiener` has no option `lr`"),
        ("wiener", {"filter": FILTER, "logits": "after"}, "`wiener` has no option `logits`"),
        ("wiener", {"filter": FILTER, "guard": "rollback"}, "on a method that does not learn"),
        ("lame", {"guard": "reset", "forgetting": "online"}, "on a method that does not learn"),
        ("tent", {"guard": "rollback"}, "on a method that forgets after each batch"),
        ("memo", {"guard": "reset", "forgetting": "online"}, "that forgets after each sample"),
        ("tent", {"episodic": True}, "has no option `episodic`.*takes forgetting, guard, outputs"),
        (Tent, {}, r"or with its options, such as `Tent\(lr=0.01\)`; found the class `Tent`"),
        (["tent"], {}, "A method is given by its name, .*; found list"),
        ("wiener", {"filter": []}, "needs a fitted filter; found a list"),
        ("tent", {"gain": "wiener"}, "`gain` would have no effect: .* no `filter=`"),
        ("eata", {"fisher_weight": 1.0}, "`fisher_weight` would have no effect"),
        ("lame", {"affinity": "linear", "neighbours": 3}, "`neighbours` would have no effect"),
        ("roid", {"consistency": False, "seed": 1}, "`seed` would have no effect: without"),
        ("ttapca", {"filter": FILTER, "limit": 2.0}, "`limit` would have no effect"),
        ("ttapca-relu", {"filter": FILTER, "gain": "relu"}, "`ttapca-relu` has no option `gain`"),
        (Tent(), {"lr": 0.1}, r"go into the method itself, as in Tent\(lr=...\)"),
        ("ttt", {"head": None}, "needs a rotation head.*found none"),
        ("ttt", {"head": "linear", "split": "fc"}, "`head` must be a Module; found 'linear'"),
        ("ttt", {"head": nn.Identity()}, "needs the dotted path.*found none"),
        ("ttt", {**HEAD, "seed": 1}, "`seed` would have no effect: with all rotations"),
        ("rotta", {"statistics": "mixed"}, "`rotta` has no option `statistics`"),
        ("pea", {}, "needs source data to measure mean and covariance.*found none"),
        ("foa-shift", {}, "needs source data to measure the mean.*found none"),
    ],
)
def test_bad_calls_leave_the_model_untouched(
    method: str, options: dict[str, object], message: str
) -> None:
    model = small_convnet()
    options = {name: fitted() if value is FILTER else value for name, value in options.items()}
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, method, **options)  # type: ignore[arg-type]


# Values that make no sense, by method.
LEARNING = {name: each for name, each in ttapca.METHODS.items() if each.method.learns}
STEPPING = [("lr", 0.0), ("lr", -1.0), ("steps", 0), ("logits", "both")]
NONSENSE: dict[str, list[tuple[str, object]]] = {
    "bn": [("alpha", 1.5), ("prior", -1.0)],
    "tent": [("statistics", "both"), ("statistics", 2.0), ("entropy", "mean")],
    "deyo": [("shape_margin", 2.0), ("patches", 0), ("entropy_margin", NAN), ("leave_out", "fc")],
    "rdumb": [("reset_every", 0), ("reset_every", 2.5)],
    "iabn": [("width", -1.0), ("width", NAN)],
    "unmix-tns": [("components", 0), ("temperature", 0.0), ("seed", -1)],
    "foa-shift": [("momentum", 1.1), ("strength", -1.0), ("source", 3)],
    "shot": [("classifier", 2), ("lr", INF), ("lr", True)],
    "slr+it": [
        *[("likelihood", "firm"), ("confidence_weight", -1.0), ("confidence_weight", NAN)],
        *[("marginal_momentum", 1.0), ("channels", 0), ("seed", -1)],
    ],
    "eata": [
        *[("entropy_margin", 0.0), ("redundancy_margin", -1), ("fisher_weight", NAN)],
        ("optimiser", "lbfgs"),
    ],
    "roid": [
        *[("source_momentum", 0.0), ("source_momentum", 1.1), ("temperature", 0.0)],
        *[("consistency", 1), ("class_prior_correction", "no")],
    ],
    "lame": [("affinity", "cosine"), ("neighbours", 0), ("iterations", True)],
    "sar": [("entropy_margin", 0.0), ("radius", NAN), ("recover_below", -1.0), ("leave_out", "fc")],
    "memo": [("views", 0), ("flip", None), ("statistics", -1.0)],
    "cotta": [
        *[("views", 0), ("confidence_below", 2.0), ("teacher_momentum", -0.1)],
        ("restored_share", NAN),
    ],
    "rotta": [
        *[("capacity", 0), ("update_every", 0), ("statistics_momentum", 1.1), ("flip", 1)],
        *[("teacher_momentum", -0.1), ("timeliness_weight", -1.0), ("uncertainty_weight", NAN)],
    ],
    "pea": [
        *[("group_size", 0), ("momentum", 1.1), ("smoothing", -0.1), ("drift_factor", 0.0)],
        *[("entropy_jump", NAN), ("augment", "flip"), ("layers", "bn1"), ("source", 3)],
    ],
    "neo": [("momentum", 1.1), ("momentum", NAN), ("classifier", 3), ("statistics", "both")],
    "t3a": [("supports", 0), ("supports", 2.5), ("classifier", 3), ("statistics", -1.0)],
    "ttt": [("rotations", "two")],
    "ttapca": [("initial", NAN), ("normalise", 1), ("gain", "wiener")],
    "ttapca-multiplicative": [("limit", 1.0), ("penalty", "")],
    "wiener": [
        *[("shrink", -1.0), ("restore", NAN), ("largest_ratio", 1.0), ("threshold", "0.5")],
        *[("memory", 0.0), ("center", 1.1), ("outliers", 1)],
        *[("order", "sorted"), ("order", True), ("views", 3), ("mirror", 1), ("states", 0)],
    ],
    "ttapca-closed": [("pull", -1.0)],
}


@pytest.mark.parametrize("method", NONSENSE | LEARNING)
def test_values_that_make_no_sense_are_refused(method: str) -> None:
    model = small_convnet()
    given = {"filter": fitted()} if ttapca.METHODS[method].method.needs_filter else {}
    given |= HEAD if method == "ttt" else {}
    for option, value in (*NONSENSE.get(method, ()), *(STEPPING if method in LEARNING else ())):
        message = f"`{option}` must be .*; found {value!r}"
        with left_untouched(model, X), pytest.raises(OptionError, match=message):
            ttapca.adapt(model, method, **given, **{option: value})


# By method: other values than the defaults, or than the first ones.
CHOICES: dict[str, dict[str, object]] = {
    "bn": {"alpha": 0.5, "prior": 8},
    "tent": {"filter": FILTER, "statistics": 0.5, "entropy": "opinion"},
    "deyo": {"entropy_margin": 0.6, "weight_margin": 0.9, "shape_margin": 0.1, "patches": 2}
    | {"leave_out": ["bn1"], "seed": 1},
    "rdumb": {"reset_every": 2},
    "iabn": {"width": 0.1},
    "unmix-tns": {"components": 3, "temperature": 1.0, "seed": 1},
    "foa-shift": {"momentum": 0.5, "strength": 0.5, "classifier": "conv2", "statistics": "batch"},
    "shot": {"classifier": "conv2"},
    "slr+it": {"likelihood": "hard", "confidence_weight": 1.0, "marginal_momentum": 0.1, "seed": 1},
    "eata": {"entropy_margin": 0.9, "redundancy_margin": 0.3, "source": DATA}
    | {"optimiser": "adam", "entropy": "opinion"},
    "roid": {"source_momentum": 0.5, "temperature": 9.0, "consistency": False, "seed": 1}
    | {"class_prior_correction": "none"},
    "lame": {"affinity": "knn", "neighbours": 2, "iterations": 1}
    | {"classifier": "conv1", "statistics": "batch"},
    "sar": {"entropy_margin": 0.9, "radius": 0.5, "recover_below": 10.0, "leave_out": ["bn1"]},
    "memo": {"views": 2, "flip": False, "seed": 1},
    "cotta": {"views": 2, "flip": False, "confidence_below": 0.0, "teacher_momentum": 0.1}
    | {"restored_share": 0.5, "seed": 1},
    "rotta": {"update_every": 8, "capacity": 4, "statistics_momentum": 0.1, "seed": 1}
    | {
        "timeliness_weight": 0.0,
        "uncertainty_weight": 99.0,
        "teacher_momentum": 0.1,
        "flip": False,
    },
    "pea": {"source": DATA, "layers": ["bn1", "conv2", "bn2"], "group_size": 2, "momentum": 0.5}
    | {"smoothing": 0.01, "drift_factor": 2.0, "entropy_jump": 9.0, "augment": "crop"},
    "neo": {"momentum": 0.3, "classifier": "conv2", "statistics": "batch"},
    "t3a": {"supports": 1, "statistics": "batch"},
    "ttt": {"rotations": "all", "split": "bn1", "seed": 1},
    "ttapca": {"gain": "exponential", "initial": 0.5, "normalise": False},
    "ttapca-multiplicative": {"penalty": "exponential", "limit": 1.01},
    "wiener": {"shrink": 0.5, "restore": 0.0, "largest_ratio": 1.1, "threshold": 0.0, "memory": 1.0}
    | {"center": 0.0, "statistics": "source", "outliers": False, "order": "auto"},
    "ttapca-closed": {"pull": 100.0},
}
# The first values, with which each of the others makes a difference.
FIRST: dict[str, dict[str, object]] = {
    "deyo": {"entropy_margin": 0.99, "shape_margin": 0.001, "lr": 0.1},
    "rdumb": {"entropy_margin": 0.9, "redundancy_margin": 0.9, "lr": 0.1},
    "rotta": {"update_every": 6, "capacity": 8}
    | {"statistics_momentum": 0.5, "teacher_momentum": 0.5},
    "pea": {"drift_factor": 9.0, "entropy_jump": 0.01},
    "ttt": {"rotations": "random"},
    "ttapca-multiplicative": {"initial": 0.5},
    "wiener": {"order": "shuffled"},
    "ttapca-closed": {"steps": 2},
}


@pytest.mark.parametrize("method", CHOICES)
def test_every_option_has_an_effect(method: str) -> None:
    spiked = X.clone()
    spiked[:, 0, 1::3, 3] = 50.0

    def output(**options: object) -> torch.Tensor:
        given = FIRST.get(method, {}) | options
        given = options_for(method, small_convnet(), fitted(), forgetting="online", **given)
        adapter = ttapca.adapt(small_convnet(), method, **given)
        return torch.cat([adapter(x) for x in (3 * X, 0.2 * X, X[:4], X, spiked)])

    expected = output()
    for option, choice in CHOICES[method].items():
        value = fitted() if choice is FILTER else choice
        assert not torch.equal(output(**{option: value}), expected), option


def test_no_option_is_missing_above() -> None:
    # Of these, `channels` and `head` follow from the model; test_mirrored_view.py tries `mirror`,
    # and test_conditions.py `states`.
    known = {each.name for each in dataclasses.fields(GradientMethod)}
    known |= {"channels", "head", "fisher_weight", "mirror", "states"}.union(*CHOICES.values())
    assert known == {option for each in ttapca.METHODS.values() for option in each.options}


@pytest.mark.parametrize("method", LEARNING)
def test_how_to_step_is_a_choice_of_every_method_that_learns(method: str) -> None:
    given = options_for(method, small_convnet(), fitted(), lr=0.1)
    outputs = []
    for logits, steps in (("before", 1), ("after", 3)):
        adapter = ttapca.adapt(small_convnet(), method, logits=logits, steps=steps, **given)
        outputs.append(adapter(X))
        assert adapter.updates == steps * (12 if method == "memo" else 1)
    assert not torch.equal(*outputs)


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
        ("bn tent eata roid sar slr+it rotta", {}, nn.Conv2d(3, 4, 6), "the model has none"),
        ("pea", {"source": DATA}, nn.Conv2d(3, 4, 6), "the model has none. Name the layers"),
        ("pea", {"source": DATA, "layers": ["bn3"]}, small_convnet(), "Did you mean `bn"),
        ("memo cotta", {}, nn.Flatten(), "moves the weights; the model has none"),
        ("shot lame neo t3a", {"classifier": "fd"}, small_convnet(), "no layer `fd`"),
        ("shot lame neo t3a", {}, nn.Conv2d(3, 4, 6), 'one has none.*`classifier="head"`'),
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


@pytest.mark.parametrize(
    ("method", "source", "error", "message"),
    [
        ("eata", 3, OptionError, "`source` must be an? Iterable, or a Tensor; found 3"),
        ("eata", ["x"], OptionError, r"batch 0 \(counting from 0\) is a str"),
        ("eata", [], NotEnoughDataError, "`source` has none"),
        ("eata", DATA * NAN, NonFiniteError, "must be finite"),
        ("pea", [], NotEnoughDataError, "at least two samples of source data at every layer"),
        ("pea", [3.0], OptionError, "`source` yields tensors.* batch 0 .* is a float"),
    ],
)
def test_bad_source_data_leave_the_model_untouched(
    method: MethodName, source: object, error: type[Exception], message: str
) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(error, match=message):
        ttapca.adapt(model, method, source=source)
    model.train().bn1.eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(error, match=message):
        ttapca.adapt(model, method, source=source)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("method", ["memo", "cotta", "rotta", "pea", "ttt"])
def test_inputs_that_are_no_images(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    given = {"head": nn.Identity(), "split": "0"} if method == "ttt" else {}
    given |= {"source": torch.rand(9, 3)} if method == "pea" else {}
    adapter = ttapca.adapt(model, method, **given)
    with pytest.raises(ShapeError, match=rf"`{method}` changes images.*found shape \(5, 3\)"):
        adapter(torch.zeros(5, 3))
    with pytest.raises(InputTypeError, match="floating point; found a tensor of int64"):
        adapter(torch.zeros(5, 3, 6, 6, dtype=torch.int64))


def test_a_name_is_short_for_a_method() -> None:
    by_name = ttapca.adapt(small_convnet(), "tent", lr=0.1, forgetting="online")
    by_class = ttapca.adapt(small_convnet(), Tent(lr=0.1), forgetting="online")
    for x in (X, images(12, seed=9)):
        assert torch.equal(by_name(x), by_class(x))
    relu, gains = (
        ttapca.adapt(small_convnet(), TTAPCA(fitted(), gain=gain))(X)
        for gain in ("relu", "exponential")
    )
    for name in ("ttapca", "ttapca-relu"):
        assert torch.equal(relu, ttapca.adapt(small_convnet(), name, filter=fitted())(X))
    assert torch.equal(gains, ttapca.adapt(small_convnet(), "ttapca-exp", filter=fitted())(X))
    matched = ttapca.adapt(small_convnet(), Wiener(fitted(), shrink=0.5, restore=0.5))(3 * X)
    assert torch.equal(matched, ttapca.adapt(small_convnet(), "match", filter=fitted())(3 * X))


def test_what_is_registered_is_what_editors_offer() -> None:
    assert tuple(ttapca.METHODS) == get_args(MethodName)
    assert write_methods.TYPES.read_text() == write_methods.types(), "run scripts/write_methods.py"
    for name, found in ttapca.METHODS.items():
        assert found.summary[0].isupper(), name
        assert not found.summary.endswith("."), name
        assert dataclasses.is_dataclass(found.method)
        assert found.url or found.year in (0, math.inf), name  # no paper, or this library itself
        assert found.rules.keys() == found.options.keys()


def test_the_page_of_methods_lists_what_is_registered() -> None:
    page = write_methods.PAGE.read_text()
    assert write_methods.with_table(page) == page, "run python scripts/write_methods.py"
    for name in ttapca.METHODS:
        assert page.count(f"`{name}`") > 1, name  # in the table, and beyond it


def test_statistics_can_be_mixed_by_choice() -> None:
    def output(statistics: object) -> torch.Tensor:
        method = Wiener(fitted(), statistics=statistics)  # type: ignore[arg-type]
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

    def forward(self, pixels: torch.Tensor, *, flag: bool = True) -> object:
        assert flag
        return self.how(self.net(pixels))


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
    given = options_for(method, plain, fitted())
    if method == "eata":
        given |= {"source": DATA}
    if method in ("wiener", "match", "two-sided"):
        given |= {"order": "shuffled"}  # what the filter knows of layers is by their paths
    expected = ttapca.adapt(plain, method, **given)(X)
    model = Wrapped(how)
    inside = dict(given)
    if "filter" in inside:
        inside["filter"] = dataclasses.replace(fitted(), layer="net.conv1")
    if "split" in inside:
        inside["split"] = "net.conv1"
    adapter = ttapca.adapt(model, method, logits=find, **inside)
    torch.testing.assert_close(adapter(X), expected, rtol=0, atol=1e-12)
    by_name = adapter(flag=True, pixels=X)  # as the processors of Hugging Face give them
    torch.testing.assert_close(by_name, expected, rtol=0, atol=1e-12)


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
    own = ttapca.fit(model, "0", DATA, 10)
    adapter = ttapca.adapt(model, "ttapca-relu", filter=own, forgetting="online", lr=0.1)
    adapter(X)
    before = adapter.surfaces[-1].filter.gains().detach()
    with pytest.raises(ttapca.errors.ShapeError, match=r"\(3, 6, 6\); found \(3, 9, 9\)"):
        adapter(images(5, shape=(3, 9, 9)))
    assert torch.equal(adapter.surfaces[-1].filter.gains().detach(), before)
    assert adapter.detach()(images(5, shape=(3, 9, 9))).shape == (5, 8)
