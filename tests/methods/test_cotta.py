from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Generator, Tensor, nn

import ttapca
from oracles import (
    group_norm_net,
    images,
    layer_norm_net,
    left_untouched,
    small_convnet,
    with_batch_statistics,
)
from ttapca.errors import AttachError, OptionError, ShapeError
from ttapca.methods.cotta import STRONG

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


def plain_cotta(
    model: nn.Module,
    batches: list[Tensor],
    *,
    episodic: bool,
    lr: float,
    views: int,
    threshold: float,
    momentum: float = 0.999,
    restore: float = 0.01,
) -> tuple[list[Tensor], int]:
    """Three whole networks and torch's own Adam; also how often the views were used."""
    averaged, outputs = 0, []

    def fresh() -> tuple[nn.Module, nn.Module, nn.Module, torch.optim.Optimizer, Generator]:
        student, teacher, source = (with_batch_statistics(model) for _ in range(3))
        optimizer = torch.optim.Adam(student.parameters(), lr=lr, betas=(0.9, 0.999))
        return student, teacher, source, optimizer, Generator().manual_seed(0)

    student, teacher, source, optimizer, generator = fresh()
    for x in batches:
        if episodic:
            student, teacher, source, optimizer, generator = fresh()
        with torch.no_grad():
            confidence = source(x).softmax(1).max(1).values.mean()
            target = teacher(x)
            if confidence < threshold:
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
                t.copy_(momentum * t + (1 - momentum) * s)
                mask = (torch.rand(s.shape, generator=generator) < restore).double()
                s.copy_(o * mask + s * (1 - mask))
        outputs.append(target)
    return outputs, averaged


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False])
@pytest.mark.parametrize("confident", [0, 5])
def test_equals_a_plain_loop(make, episodic: bool, confident: int) -> None:
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
    }
    expected, averaged = plain_cotta(make(), batches, episodic=episodic, **options)
    adapter = ttapca.adapt(
        make(), "cotta", forgetting="episodic" if episodic else "online", **options
    )
    for x, reference in zip(batches, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-7)
    assert adapter.updates == len(BATCHES)
    assert averaged == len(BATCHES) - confident


def test_the_official_values() -> None:
    expected, _ = plain_cotta(
        small_convnet(), BATCHES[:3], forgetting="online", lr=1e-3, views=32, threshold=0.92
    )
    adapter = ttapca.adapt(small_convnet(), "cotta", forgetting="online")
    for x, reference in zip(BATCHES[:3], expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-9)


def test_nothing_of_the_caller_changes() -> None:
    model = small_convnet()
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "cotta", views=3, forgetting="online", lr=0.1)
        for x in BATCHES:
            adapter(x)
        adapter.detach()


def test_all_is_restored_or_nothing() -> None:
    whole = ttapca.adapt(
        small_convnet(), "cotta", views=2, forgetting="online", restore=1.0, lr=0.1
    )
    none = ttapca.adapt(small_convnet(), "cotta", views=2, forgetting="online", restore=0.0, lr=0.1)
    whole(X)
    none(X)
    for copy_, own in zip(whole.surfaces.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(copy_, own)
    pairs = zip(none.surfaces.parameters(), none.model.parameters(), strict=True)
    assert any(not torch.equal(copy_, own) for copy_, own in pairs)


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


def test_flips_are_a_choice() -> None:
    options = {"views": 3, "confidence_below": 1.0}
    flipped = ttapca.adapt(small_convnet(), "cotta", **options)
    upright = ttapca.adapt(small_convnet(), "cotta", flip=False, **options)
    assert not torch.equal(flipped(X), upright(X))


def test_a_poisoned_batch_leaves_no_mark() -> None:
    clean, adapter = (
        ttapca.adapt(small_convnet(), "cotta", views=2, forgetting="online", lr=0.05) for _ in "ab"
    )
    poisoned = X.clone()
    poisoned[3, 0, 0, 0] = float("nan")
    for x in BATCHES[:4]:
        assert torch.equal(adapter(x), clean(x))
        adapter(poisoned)
    assert (adapter.skipped, adapter.updates) == (4, 4)


def test_copies_pickles_and_casts_take_the_teacher_along() -> None:
    adapter = ttapca.adapt(small_convnet(), "cotta", views=2, forgetting="online", lr=0.05)
    adapter(X)
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    expected = adapter(X)
    assert all(torch.equal(twin(X), expected) for twin in twins)
    adapter.float()
    assert all(value.dtype == torch.float32 for value in adapter.mover.teacher)
    assert adapter(X.float()).dtype == torch.float32


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
def test_small_batches(make, size: int) -> None:
    adapter = ttapca.adapt(make(), "cotta", views=2, forgetting="online")
    for x in BATCHES:
        assert torch.isfinite(adapter(x[:size])).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 0}, "`views` must be a whole number from 1 on; found 0"),
        ({"confidence_below": 2.0}, "`threshold` must be a finite number from 0 to 1; found 2.0"),
        ({"teacher_momentum": -0.1}, "`momentum` must be a finite number from 0 to 1; found -0.1"),
        (
            {"restored_share": float("nan")},
            "`restore` must be a finite number from 0 to 1; found nan",
        ),
        ({"lr": -1.0}, "`lr` must be a finite number above 0"),
        ({"steps": 0}, "`steps` is a whole number"),
        ({"logits": "both"}, "`logits` must be one of before, after"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, "cotta", **options)  # type: ignore[arg-type]


def test_what_it_cannot_serve() -> None:
    with pytest.raises(AttachError, match="moves the weights; the model has none"):
        ttapca.adapt(nn.Flatten(), "cotta")
    adapter = ttapca.adapt(nn.Linear(3, 2), "cotta")
    with pytest.raises(ShapeError, match=r"`cotta` changes images.*found \[\(5, 3\)\]"):
        adapter(torch.zeros(5, 3))
