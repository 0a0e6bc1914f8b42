from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, X, assert_follows, both_ways, every_norm
from oracles import small_convnet, with_batch_statistics
from ttapca.methods.views import STRONG


def plain_cotta(
    model: nn.Module,
    batches: list[Tensor],
    *,
    forgetting: str,
    lr: float = 1e-3,
    views: int = 32,
    confidence_below: float = 0.92,
    teacher_momentum: float = 0.999,
    restored_share: float = 0.01,
) -> tuple[list[Tensor], int]:
    """Three whole networks and torch's own Adam; also how often the views were used."""
    averaged, outputs = 0, []

    def fresh() -> tuple[nn.Module, nn.Module, nn.Module, torch.optim.Optimizer, Generator]:
        student, teacher, source = (with_batch_statistics(model) for _ in range(3))
        optimizer = torch.optim.Adam(student.parameters(), lr=lr, betas=(0.9, 0.999))
        return student, teacher, source, optimizer, Generator().manual_seed(0)

    student, teacher, source, optimizer, generator = fresh()
    for x in batches:
        if forgetting == "episodic":
            student, teacher, source, optimizer, generator = fresh()
        with torch.no_grad():
            confidence = source(x).softmax(1).max(1).values.mean()
            target = teacher(x)
            if confidence < confidence_below:
                averaged += 1
                target = torch.stack([teacher(STRONG(x, generator)) for _ in range(views)]).mean(0)
        loss = -(target.softmax(1) * torch.log(student(x).softmax(1))).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s, o in zip(
                teacher.parameters(), student.parameters(), source.parameters(), strict=True
            ):
                t.copy_(teacher_momentum * t + (1 - teacher_momentum) * s)
                mask = (torch.rand(s.shape, generator=generator) < restored_share).double()
                s.copy_(o * mask + s * (1 - mask))
        outputs.append(target)
    return outputs, averaged


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
        for weight, value in zip(teacher.parameters(), after.mover.teacher, strict=True):
            weight.copy_(value)
        torch.testing.assert_close(after(X), teacher(X))
