"""Outputs of other kinds than classes of images: of every pixel, labels, and no classes at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import options_for
from methods.plain_loops import (
    Draw,
    Rows,
    affine_with_batch_statistics,
    assert_follows,
    copied,
    labels,
    mean_entropy,
    pixels,
    plain_cotta,
    plain_memo,
    plain_sar,
    plain_slr,
    plain_steps,
    set_to,
)
from oracles import DensePCA, differentiable_filter, images, left_untouched, with_batch_statistics
from small_networks import pixelwise, with_last, with_outputs
from ttapca.adaptation.guards import CollapseGuard
from ttapca.errors import LayerOutputError, OptionError
from ttapca.methods.slr import InputTransform
from ttapca.methods.views import STRONG, STRONG_COLOURS

DATA = images(150)
BATCHES = [2 * images(4, seed=8), 0.3 * images(4, seed=9), images(4, seed=10)]
X = BATCHES[0]
ONLINE: dict[str, Any] = {"forgetting": "online"}
LABELS: dict[str, Any] = {"outputs": "multilabel", "forgetting": "online"}

# By method, options with which it serves pixels here as it serves rows, and moves something.
SERVED: dict[str, dict[str, Any]] = {
    **{method: {} for method in ("source", "bn", "tent", "come", "slr+it", "ttt")},
    **{method: {} for method in ("iabn", "unmix-tns", "ttapca-closed")},
    **{method: {} for method in ("ttapca", "ttapca-relu", "ttapca-exp", "ttapca-multiplicative")},
    **{method: {"order": "shuffled"} for method in ("wiener", "match", "two-sided")},
    "shot": {"classifier": "fc"},
    "neo": {"classifier": "fc"},
    "foa-shift": {"classifier": "fc"},
    "sar": {"entropy_margin": 0.95, "recover_below": 0.0},
    "pea": {"augment": "none", "entropy_jump": 0.05, "drift_factor": 2.5},
    # On rows of pixels, only the source's confidence decides whether there are views.
    "cotta": {"views": 2, "confidence_below": 0.0},
}
REFUSED = {
    **dict.fromkeys(
        ("eata", "rdumb", "deyo", "roid", "rotta", "lame", "t3a"), "one prediction per sample"
    ),
    "memo": "one prediction for each image.*Choose `tent`, `sar` or `cotta`",
    "pea": r"one prediction for each image.*Leave the views out: `augment=\"none\"`",
}


class PixelRows(nn.Module):
    """One row for each pixel of each image."""

    def forward(self, z: Tensor) -> Tensor:
        return z.movedim(1, -1).flatten(0, 2)


class Linewise(nn.Linear):
    """A linear layer that takes the channels of every pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("method", SERVED)
def test_each_pixel_is_a_sample(method: str) -> None:
    model, of_rows = pixelwise(5), pixelwise(5, PixelRows())
    fitted = ttapca.fit(model, "conv1", DATA, 40)
    given = options_for(method, model, fitted, **ONLINE, **SERVED[method])
    with left_untouched(model, X):
        adapted, as_samples = (ttapca.adapt(each, method, **given) for each in (model, of_rows))
        for x in BATCHES:
            z = adapted(x)
            assert z.shape == (4, 5, 6, 6)
            torch.testing.assert_close(PixelRows()(z), as_samples(x), rtol=0, atol=1e-7)
        assert (adapted.updates > 0) == ttapca.METHODS[method].method.learns
        adapted.detach()


def test_a_new_stream_may_have_images_of_several_sizes() -> None:
    model = pixelwise(5)
    fitted = ttapca.fit(model, "conv1", DATA, route="dct")
    with ttapca.adapt(model, "wiener", filter=fitted, **ONLINE) as adapted:
        for side in (6, 9, 5):
            x = images(4, seed=side, shape=(3, side, side))
            assert adapted(x).shape == (4, 5, side, side)


@pytest.mark.parametrize("method", REFUSED)
def test_other_methods_refuse_pixels_with_the_way_out(method: str) -> None:
    # `t3a` needs a linear layer.
    model = with_last(Linewise(4, 5)) if method == "t3a" else pixelwise(5)
    given = options_for(method, model, **({"classifier": "fc"} if method == "lame" else {}))
    with left_untouched(model, X), ttapca.adapt(model, method, **given) as adapted:
        with pytest.raises(LayerOutputError, match=REFUSED[method]):
            adapted(X)
        assert adapted.updates == 0


def test_every_method_serves_pixels_or_refuses_them() -> None:
    assert SERVED.keys() | REFUSED.keys() == ttapca.METHODS.keys()


OTHER_KINDS = {
    "labels": ("multilabel", lambda: with_outputs(4)),
    "one number": ("regression", lambda: with_outputs(1)),
    "four numbers": ("regression", lambda: with_outputs(4)),
    "a map": ("regression", lambda: pixelwise(1)),
}


@pytest.mark.parametrize("case", OTHER_KINDS)
def test_without_classes_methods_serve_or_refuse_with_the_way_out(case: str) -> None:
    kind, make = OTHER_KINDS[case]
    model = make()
    fitted = ttapca.fit(model, "conv1", DATA, 40, outputs=kind)
    assert (fitted.classes_, fitted.agreement_, fitted.mirror_agreement_) == (None, None, None)
    plain, refusals = model(X), 0
    for method, found in ttapca.METHODS.items():
        given = options_for(method, model, fitted, outputs=kind, **ONLINE)
        with left_untouched(model, X):
            if kind not in found.method.outputs:
                said = rf'kind multiclass.*; found `outputs="{kind}"`. Choose .*`wiener`'
                with pytest.raises(OptionError, match=said):
                    ttapca.adapt(model, method, **given)
                refusals += 1
                continue
            with ttapca.adapt(model, method, **given) as adapted:
                logits = adapted(X)
                assert logits.shape == plain.shape
                assert torch.isfinite(logits).all()
                with adapted.disabled():
                    assert torch.equal(adapted(X), plain)
    assert 0 < refusals < len(ttapca.METHODS)


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_the_closed_form_leaves_classes_aside(kind: Any) -> None:
    model = with_outputs(4)
    fitted = ttapca.fit(model, "conv1", DATA, 40)  # by default they are taken for classes
    assert fitted.classes_ is not None
    served = ttapca.adapt(model, "wiener", filter=fitted, outputs=kind, **ONLINE)
    found = [served(x) for x in BATCHES]
    served.detach()
    plain = ttapca.adapt(model, "wiener", filter=fitted, order="shuffled", **ONLINE)
    assert all(torch.equal(one, plain(x)) for one, x in zip(found, BATCHES, strict=True))
    plain.detach()
    with left_untouched(model, X), pytest.raises(OptionError, match=rf'outputs="{kind}"`, which'):
        ttapca.adapt(model, "wiener", filter=fitted, outputs=kind, order="auto")


@pytest.mark.parametrize("case", [case for case in OTHER_KINDS if case != "labels"])
def test_the_closed_form_brings_noisy_numbers_nearer(case: str) -> None:
    model = OTHER_KINDS[case][1]()
    fitted = ttapca.fit(model, "conv1", DATA, 40, outputs="regression")
    clean = images(96, seed=11)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).double()
    shifted = clean + 2 * clean.std() * noise
    with torch.no_grad():
        wanted, plain = model(clean), model(shifted)
        adapted = ttapca.adapt(model, "wiener", filter=fitted, outputs="regression", **ONLINE)
        found = torch.cat([adapted(x) for x in shifted.split(24)])
    assert (found - wanted).square().mean() < 0.8 * (plain - wanted).square().mean()


def test_an_alarm_watches_without_classes() -> None:
    model = with_outputs(4)
    fitted = ttapca.fit(model, "conv1", DATA, 40)  # as if they were classes
    told: list[ttapca.Health] = []
    given: dict[str, Any] = {"filter": fitted, "on_shift": told.append, **ONLINE}
    adapted = ttapca.adapt(model, "wiener", outputs="regression", **given)
    for x in (8 * images(400, seed=3)).split(50):
        adapted(x)
    assert len(told) == 1
    assert adapted.health.shifted
    assert adapted.health.composition is None  # classes are not counted ...
    assert adapted.health.skew == 1.0  # ... and taken to be few


def test_a_guard_cannot_see_labels_collapse() -> None:
    model = with_outputs(4)
    with left_untouched(model, X), pytest.raises(OptionError, match='"multilabel" do not'):
        ttapca.adapt(model, "tent", guard="reset", **LABELS)


# Plain loops over rows: the pixels of an image, or its labels.

ROWS: dict[str, tuple[Callable[[], nn.Module], Rows, Draw, dict[str, Any]]] = {
    "pixels": (lambda: pixelwise(5), pixels, STRONG_COLOURS, ONLINE),
    "labels": (lambda: with_outputs(4), labels, STRONG, LABELS),
    "labels of pixels": (lambda: pixelwise(3), labels, STRONG_COLOURS, LABELS),
}
each_row = pytest.mark.parametrize(("make", "rows", "view", "given"), ROWS.values(), ids=ROWS)


@each_row
def test_tent_equals_a_plain_loop(make: Any, rows: Rows, view: Draw, given: Any) -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    lowered = affine_with_batch_statistics(make())
    expected = plain_steps(lowered, BATCHES, adam, mean_entropy, rows, after=False)
    assert_follows(ttapca.adapt(make(), "tent", lr=0.05, **given), expected, BATCHES)


@each_row
def test_sar_equals_a_plain_loop(make: Any, rows: Rows, view: Draw, given: Any) -> None:
    options = {"entropy_margin": 0.95 if rows is pixels else 0.6, "recover_below": 0.0, "lr": 0.05}
    expected = plain_sar(make(), BATCHES, rows, **options)
    assert_follows(ttapca.adapt(make(), "sar", **options, **given), expected.outputs, BATCHES)
    assert all(0 < kept < 1 for kept in expected.kept)


@each_row
def test_cotta_equals_a_plain_loop(make: Any, rows: Rows, view: Draw, given: Any) -> None:
    options = {"views": 2, "confidence_below": 1.0, "lr": 0.01}
    options |= {"teacher_momentum": 0.9, "restored_share": 0.0}
    expected, averaged = plain_cotta(make(), BATCHES, rows, view, **options)
    assert averaged == len(BATCHES)
    assert_follows(ttapca.adapt(make(), "cotta", **options, **given), expected, BATCHES, atol=1e-7)


def test_memo_equals_a_plain_loop() -> None:
    expected = plain_memo(with_outputs(4), BATCHES, labels, lr=0.02, views=3)
    adapted = ttapca.adapt(with_outputs(4), "memo", views=3, lr=0.02, **LABELS)
    assert_follows(adapted, expected, BATCHES, atol=1e-9)


def test_shot_equals_a_plain_loop() -> None:
    network = with_batch_statistics(pixelwise(5))
    body = [p for name, p in network.named_parameters() if not name.startswith("fc")]
    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)

    def information(p: Tensor) -> Tensor:
        mean = p.mean(0)
        return mean_entropy(p) + (mean * torch.log(mean)).sum()

    expected = plain_steps((network, body), BATCHES, sgd, information, pixels, after=True)
    given = {"classifier": "fc", "lr": 0.05, **ONLINE}
    assert_follows(ttapca.adapt(pixelwise(5), "shot", **given), expected, BATCHES)


def test_slr_equals_a_plain_loop() -> None:
    adapted = ttapca.adapt(pixelwise(5), "slr+it", lr=0.01, **ONLINE)
    (transform,) = (each for each in adapted.surfaces if isinstance(each, InputTransform))
    expected = plain_slr(pixelwise(5), transform, BATCHES, pixels, lr=0.01)
    assert_follows(adapted, expected, BATCHES)


def test_the_spectral_filter_equals_a_plain_loop() -> None:
    model = pixelwise(5)
    with torch.no_grad():
        dense = DensePCA(model.conv1(DATA))
    spectrum = torch.from_numpy(dense.singular_values[:30] / dense.singular_values[0])
    network = with_batch_statistics(model)
    gamma = torch.full((30,), 0.2, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        gains = spectrum / (spectrum + torch.relu(gamma))
        filtered = differentiable_filter(dense, network.conv1(x), gains)
        return network.fc(torch.relu(network.bn1(filtered)))

    adam = functools.partial(torch.optim.Adam, lr=0.05)
    expected = plain_steps((forward, [gamma]), BATCHES, adam, mean_entropy, pixels, after=True)
    fitted = ttapca.fit(model, "conv1", DATA, 30)
    given = {"filter": fitted, "initial": 0.2, "lr": 0.05, "forgetting": "online"}
    assert_follows(ttapca.adapt(model, "ttapca-relu", **given), expected, BATCHES, atol=1e-6)


def test_the_views_of_pixels_do_not_move() -> None:
    ramp = torch.linspace(0, 1, 36, dtype=torch.float64).view(1, 1, 6, 6).expand(4, 3, -1, -1)
    view = STRONG_COLOURS(ramp, torch.Generator().manual_seed(0))
    for image, other in zip(ramp, view, strict=True):
        together = torch.stack([image.flatten(), other.flatten()])
        assert torch.corrcoef(together)[0, 1] > 0.99
    assert not torch.allclose(view, ramp)


# One logit: every method does with it what it does with the two logits 0 and z.

TWELVE = [3 * images(12, seed=8), 0.3 * images(12, seed=9), images(12, seed=10)]


class ZeroBeside(nn.Module):
    """The two logits 0 and z."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z), z], 1)


BINARY = [name for name, each in ttapca.METHODS.items() if "binary" in each.method.outputs]


@pytest.mark.parametrize("method", BINARY)
def test_one_logit_is_served_as_two_are(method: str) -> None:
    one, two = with_outputs(1), with_outputs(1, ZeroBeside())
    given = options_for(method, one, ttapca.fit(one, "conv1", DATA, 40))  # it knows no classes
    given |= (
        {"classifier": "fc.1"} if method in ("neo", "foa-shift") else {}
    )  # where `two` makes one logit
    pair = ttapca.adapt(two, method, forgetting="online", **given)
    with left_untouched(one, TWELVE[0]):
        adapted = ttapca.adapt(one, method, forgetting="online", **given)
        for x in TWELVE:
            expected = pair(x)
            expected = expected[:, 1:] - expected[:, :1]
            torch.testing.assert_close(adapted(x), expected, rtol=0, atol=1e-9)
        assert (adapted.updates > 0) == ttapca.METHODS[method].method.learns
        adapted.detach()


@pytest.mark.parametrize("method", ["source", "tent", "lame", "wiener"])
def test_a_flat_batch_of_logits_comes_back_flat(method: str) -> None:
    flat, column = with_outputs(1, nn.Flatten(0)), with_outputs(1)
    given = options_for(method, column, ttapca.fit(column, "conv1", DATA, 40))
    adapted, expected = (ttapca.adapt(each, method, **given) for each in (flat, column))
    assert torch.equal(adapted(TWELVE[0]), expected(TWELVE[0])[:, 0])
    with adapted.disabled():
        assert torch.equal(adapted(TWELVE[0]), flat(TWELVE[0]))


@pytest.mark.parametrize("make", [with_outputs, pixelwise])
def test_tent_lowers_the_entropy_of_the_sigmoid(make: Any) -> None:
    adapted = ttapca.adapt(make(1), "tent", lr=0.05, forgetting="online")
    before = ttapca.adapt(make(1), "bn", forgetting="online")
    lowered = affine_with_batch_statistics(make(1))
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    expected = plain_steps(lowered, TWELVE, adam, mean_entropy, labels, after=False)
    assert_follows(adapted, expected, TWELVE, atol=1e-9)
    assert float((expected[-1] - before(TWELVE[-1])).abs().max()) > 0.01


def test_a_filter_that_knows_both_answers_looks_at_them() -> None:
    one, two = with_outputs(1), with_outputs(1, ZeroBeside())
    assert ttapca.fit(one, "conv1", DATA, 40).classes_ is None  # it may be a regression
    fitted = ttapca.fit(one, "conv1", DATA, 40, outputs="binary")
    same = ttapca.fit(two, "conv1", DATA, 40)
    classes, expected = fitted.classes_, same.classes_
    assert classes is not None
    assert expected is not None
    torch.testing.assert_close(classes.shares, expected.shares)
    assert fitted.mirror_agreement_ == pytest.approx(same.mirror_agreement_)
    first = ttapca.adapt(one, "wiener", filter=fitted, order="auto", forgetting="online")
    second = ttapca.adapt(two, "wiener", filter=same, order="auto", forgetting="online")
    ordered = DATA[one(DATA)[:, 0] > 0][:48]  # of one answer alone
    for x in ordered.split(12):
        logits = second(x)
        torch.testing.assert_close(first(x), logits[:, 1:] - logits[:, :1], rtol=0, atol=1e-9)
    left_aside = ttapca.adapt(with_outputs(1), "wiener", filter=fitted, order="shuffled")
    assert not torch.allclose(left_aside(ordered[:12]), first(ordered[:12]))


def test_what_was_said_must_be_so() -> None:
    model = with_outputs(5)
    with pytest.raises(LayerOutputError, match=r'`outputs="binary"` needs one logit.*\(12, 5\)'):
        ttapca.adapt(model, "tent", outputs="binary")(TWELVE[0])
    with pytest.raises(LayerOutputError, match="needs two logits or more"):
        ttapca.adapt(with_outputs(1), "tent", outputs="multiclass")(TWELVE[0])
    with left_untouched(model, TWELVE[0]), pytest.raises(LayerOutputError, match="needs one logit"):
        ttapca.fit(model, "conv1", DATA, 40, outputs="binary")
    with pytest.raises(OptionError, match="`outputs` must be one of multiclass, binary"):
        ttapca.adapt(model, "bn", outputs="sigmoid")  # type: ignore[arg-type]


def test_a_guard_tells_one_answer_from_two() -> None:
    sure = torch.tensor([[0.0, 50.0]]).repeat(20, 1)
    both = torch.cat([sure[:10], -sure[:10]])
    for logits, expected in ((sure, True), (both, False), (0.0 * sure, False)):
        assert CollapseGuard(window=1).collapsed(logits) == expected
    adapted = ttapca.adapt(
        with_outputs(1), "tent", lr=1.0, guard=CollapseGuard(window=2), forgetting="online"
    )
    start = copied(list(adapted.surfaces.parameters()))
    parameters = list(adapted.surfaces.parameters())
    set_to(parameters, [start[0], start[1] + 300.0])  # one answer, whatever the image
    adapted(TWELVE[0])
    adapted(TWELVE[0])
    assert [event.action for event in adapted.events] == ["rollback"]
