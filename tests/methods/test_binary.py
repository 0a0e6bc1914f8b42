"""One logit: every method does with it what it does with the two logits 0 and z."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import options_for
from methods.plain_loops import (
    affine_with_batch_statistics,
    assert_follows,
    copied,
    labels,
    mean_entropy,
    plain_steps,
    set_to,
)
from oracles import images, left_untouched
from small_networks import pixelwise, with_outputs
from ttapca.adaptation.guards import CollapseGuard
from ttapca.errors import LayerOutputError, OptionError

DATA = images(150)
BATCHES = [3 * images(12, seed=8), 0.3 * images(12, seed=9), images(12, seed=10)]
X = BATCHES[0]


class ZeroBeside(nn.Module):
    """The two logits 0 and z."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z), z], 1)


SERVED = [name for name, each in ttapca.METHODS.items() if "binary" in each.method.outputs]


@pytest.mark.parametrize("method", SERVED)
def test_one_logit_is_served_as_two_are(method: str) -> None:
    one, two = with_outputs(1), with_outputs(1, ZeroBeside())
    given = options_for(method, one, ttapca.fit(one, "conv1", DATA, 40))  # it knows no classes
    given |= {"classifier": "fc.1"} if method == "neo" else {}  # where `two` makes one logit
    pair = ttapca.adapt(two, method, forgetting="online", **given)
    with left_untouched(one, X):
        adapted = ttapca.adapt(one, method, forgetting="online", **given)
        for x in BATCHES:
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
    assert torch.equal(adapted(X), expected(X)[:, 0])
    with adapted.disabled():
        assert torch.equal(adapted(X), flat(X))


@pytest.mark.parametrize("make", [with_outputs, pixelwise])
def test_tent_lowers_the_entropy_of_the_sigmoid(make: Any) -> None:
    adapted = ttapca.adapt(make(1), "tent", lr=0.05, forgetting="online")
    before = ttapca.adapt(make(1), "bn", forgetting="online")
    lowered = affine_with_batch_statistics(make(1))
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    expected = plain_steps(lowered, BATCHES, adam, mean_entropy, labels, after=False)
    assert_follows(adapted, expected, BATCHES, atol=1e-9)
    assert float((expected[-1] - before(BATCHES[-1])).abs().max()) > 0.01


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
        ttapca.adapt(model, "tent", outputs="binary")(X)
    with pytest.raises(LayerOutputError, match="needs two logits or more"):
        ttapca.adapt(with_outputs(1), "tent", outputs="multiclass")(X)
    with left_untouched(model, X), pytest.raises(LayerOutputError, match="needs one logit"):
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
    adapted(X)
    adapted(X)
    assert [event.action for event in adapted.events] == ["rollback"]
