from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ttapca
from oracles import images, left_untouched, small_convnet
from ttapca.adaptation.guards import CollapseGuard
from ttapca.errors import OptionError

BATCHES = list(images(600, seed=8).split(12))


def spread(sharpness: float, classes: int = 5) -> Tensor:
    return sharpness * torch.eye(classes).repeat(4, 1)


def one_class(sharpness: float = 50.0) -> Tensor:
    return sharpness * torch.eye(5)[:1].repeat(20, 1)


def test_collapse_is_few_classes_and_no_entropy_together() -> None:
    for logits, expected in (
        (spread(50.0), False),  # sure, of all classes
        (spread(0.0), False),  # unsure
        (one_class(1.0), False),  # one class, unsurely
        (one_class(), True),
    ):
        guard = CollapseGuard(window=3)
        assert [guard.collapsed(logits) for _ in range(4)] == [False, False, expected, expected]


def test_a_short_run_of_one_class_is_no_collapse() -> None:
    guard = CollapseGuard(window=10)
    for number in range(50):
        assert not guard.collapsed(one_class() if number % 10 < 5 else spread(50.0))


def test_what_is_not_finite_is_not_looked_at() -> None:
    guard = CollapseGuard(window=1)
    assert not guard.collapsed(one_class() * float("nan"))
    assert guard.entropies == ()
    assert guard.collapsed(one_class())


def test_dense_predictions() -> None:
    guard = CollapseGuard(window=1)
    assert guard.collapsed(one_class()[:, :, None, None].expand(-1, -1, 2, 2))


def collapsing(guard, **options: object) -> ttapca.Adapter:
    """TENT with a learning rate that is sure to run into the trivial minimum."""
    options = {"lr": 0.5, "forgetting": "online", "logits": "after"} | options
    return ttapca.adapt(small_convnet(), "tent", guard=guard, **options)  # type: ignore[arg-type]


def run(adapter: ttapca.Adapter) -> list[Tensor]:
    return [adapter(x) for x in BATCHES]


def test_without_a_guard_it_collapses_for_good() -> None:
    adapter = collapsing(None)
    final = run(adapter)[-1]
    guard = CollapseGuard(window=1)
    assert guard.collapsed(final)
    assert adapter.events == []


@pytest.mark.parametrize("action", ["reset", "rollback"])
def test_a_guard_intervenes_and_reports(action: str) -> None:
    adapter = collapsing(CollapseGuard(action, window=3))
    outputs = run(adapter)
    assert adapter.events
    event = adapter.events[0]
    assert event.action == action
    assert event.effective_classes < 2
    assert event.entropy < 0.05
    # The batch of the event is predicted from where the guard went back to.
    at = outputs[event.batch]
    assert not CollapseGuard(window=1).collapsed(at)
    if action == "reset":
        bn = ttapca.adapt(small_convnet(), "bn")
        torch.testing.assert_close(at, bn(BATCHES[event.batch]))


def test_rollback_returns_to_a_state_that_a_window_has_confirmed() -> None:
    adapter = collapsing(CollapseGuard("rollback", window=2), lr=0.15)
    surface = adapter.surfaces[-1]
    seen = []
    for x in BATCHES:
        adapter(x)
        seen.append([parameter.detach().clone() for parameter in surface.parameters()])
        if adapter.events:
            break
    assert adapter.events, "the learning rate must lead to a collapse"
    back = seen[-1]
    assert any(all(torch.equal(a, b) for a, b in zip(s, back, strict=True)) for s in seen[:-2])
    assert not torch.equal(back[0], small_convnet().bn1.weight)


def test_a_healthy_stream_is_left_alone() -> None:
    guarded = collapsing("rollback", lr=1e-3)
    plain = collapsing(None, lr=1e-3)
    for x in BATCHES:
        assert torch.equal(guarded(x), plain(x))
    assert guarded.events == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "panic"}, "`guard` must be one of rollback, reset; found 'panic'"),
        ({"window": 0}, "from 1 on; found 0"),
        ({"classes": 1.5}, "`classes` must be a finite number above 0 below 1; found 1.5"),
        ({"entropy": 0.0}, "`entropy` must be a finite number above 0 below 1"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CollapseGuard(**options)  # type: ignore[arg-type]
    model = small_convnet()
    with left_untouched(model, BATCHES[0]), pytest.raises(OptionError, match="one of rollback"):
        ttapca.adapt(model, "tent", guard="panic")  # type: ignore[arg-type]
