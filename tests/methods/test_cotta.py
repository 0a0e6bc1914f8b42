from __future__ import annotations

import pytest
import torch

import ttapca
from methods.plain_loops import BATCHES, X, assert_follows, both_ways, every_norm, plain_cotta
from oracles import small_convnet, with_batch_statistics


@every_norm
@both_ways
@pytest.mark.parametrize("confident", [0, 5])
def test_equals_a_plain_loop(make, forgetting: str, confident: int) -> None:
    # The least confident first: as long as student and teacher are the same, a confident batch has
    # no gradient but rounding errors, which Adam would make large.
    source = with_batch_statistics(make())
    confidences = [float(source(x).detach().softmax(1).amax(1).mean()) for x in BATCHES]
    order = sorted(range(len(BATCHES)), key=lambda i: confidences[i])
    batches = [BATCHES[i] for i in order]
    threshold = confidences[order[len(order) - confident]] if confident else 1.0
    options = {
        "lr": 0.01,
        "views": 3,
        "confidence_below": threshold,
        "teacher_momentum": 0.9,
        "restored_share": 0.1,
        "forgetting": forgetting,
    }
    expected, averaged = plain_cotta(make(), batches, **options)
    adapter = ttapca.adapt(make(), "cotta", **options)
    assert_follows(adapter, expected, batches, atol=1e-7)
    assert adapter.updates == len(BATCHES)
    assert averaged == len(BATCHES) - confident


def test_the_official_values() -> None:
    expected, _ = plain_cotta(small_convnet(), BATCHES[:3], forgetting="online")
    adapter = ttapca.adapt(small_convnet(), "cotta", forgetting="online")
    assert_follows(adapter, expected, BATCHES[:3], atol=1e-9)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_is_restored_or_nothing(share: float) -> None:
    adapter = ttapca.adapt(small_convnet(), "cotta", views=2, restored_share=share, lr=0.1)
    adapter(X)
    pairs = zip(adapter.surfaces.parameters(), adapter.model.parameters(), strict=True)
    assert all(torch.equal(copy_, own) for copy_, own in pairs) == bool(share)


def test_logits_after_are_the_moved_teachers() -> None:
    options = {"views": 2, "lr": 0.1, "teacher_momentum": 0.5}
    before = ttapca.adapt(small_convnet(), "cotta", **options)
    after = ttapca.adapt(small_convnet(), "cotta", logits="after", steps=2, **options)
    assert not torch.equal(before(X), after(X))
    teacher = with_batch_statistics(small_convnet())
    with torch.no_grad():
        for weight, value in zip(teacher.parameters(), after.predictor.teacher, strict=True):
            weight.copy_(value)
        torch.testing.assert_close(after(X), teacher(X))
