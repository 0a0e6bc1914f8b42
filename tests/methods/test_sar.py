from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ttapca
from oracles import (
    group_norm_net,
    images,
    layer_norm_net,
    left_untouched,
    small_convnet,
    with_batch_statistics,
)
from ttapca.errors import AttachError, OptionError

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


def entropy(logits: Tensor) -> Tensor:
    p = torch.softmax(logits, 1)
    return -(p * torch.log(p)).sum(1)


def plain_sar(
    model: nn.Module,
    batches: list[Tensor],
    *,
    episodic: bool,
    lr: float,
    margin: float = 0.4,
    recover_below: float = 0.2,
) -> tuple[list[Tensor], int]:
    """The paper's algorithm 1, with momentum written out; logits from before the update."""
    network = with_batch_statistics(model)
    norms = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    theta = [p for m in network.modules() if isinstance(m, norms) for p in (m.weight, m.bias)]
    start = [p.detach().clone() for p in theta]

    def set_to(values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(theta, values, strict=True):
                p.copy_(value)

    speed, average, recoveries, outputs = None, None, 0, []
    for x in batches:
        if episodic:
            set_to(start)
            speed, average = None, None
        logits = network(x)
        outputs.append(logits.detach())
        limit = margin * math.log(logits.shape[1])
        first = entropy(logits)
        chosen = [i for i in range(len(x)) if float(first[i].detach()) < limit]
        if not chosen:
            continue
        g = torch.autograd.grad(sum(first[i] for i in chosen) / len(chosen), theta)
        length = math.sqrt(sum(float((v**2).sum()) for v in g))
        here = [p.detach().clone() for p in theta]
        set_to([p + 0.05 * v / length for p, v in zip(here, g, strict=True)])
        second = entropy(network(x))
        kept = [i for i in chosen if float(second[i].detach()) < limit]
        if kept:
            loss = sum(second[i] for i in kept) / len(kept)
            g = torch.autograd.grad(loss, theta)
        set_to(here)
        if not kept:
            continue
        speed = g if speed is None else [0.9 * s + v for s, v in zip(speed, g, strict=True)]
        set_to([p - lr * s for p, s in zip(here, speed, strict=True)])
        value = float(loss.detach())
        average = value if average is None else 0.9 * average + 0.1 * value
        if average < recover_below:
            set_to(start)  # the weights only: the momentum goes on
            average, recoveries = None, recoveries + 1
    return outputs, recoveries


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False])
@pytest.mark.parametrize(("entropy_margin", "below"), [(0.4, 0.2), (0.9, 0.0), (0.9, 0.6)])
def test_equals_a_plain_loop(make, episodic: bool, margin: float, below: float) -> None:
    options = {"entropy_margin": margin, "recover_below": below, "lr": 0.05}
    expected, recoveries = plain_sar(make(), BATCHES, episodic=episodic, **options)
    adapter = ttapca.adapt(
        make(), "sar", forgetting="episodic" if episodic else "online", **options
    )
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-8)
    assert adapter.mover.recoveries == recoveries
    assert adapter.skipped == 0


def test_momentum_goes_on_after_a_recovery() -> None:
    options = {"entropy_margin": 0.9, "recover_below": 1.41, "lr": 0.05}
    expected, recoveries = plain_sar(small_convnet(), BATCHES, forgetting="online", **options)
    assert 0 < recoveries < len(BATCHES)
    adapter = ttapca.adapt(small_convnet(), "sar", forgetting="online", **options)
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-10)
    assert adapter.mover.recoveries == recoveries


def test_recovery_returns_to_the_source() -> None:
    # A threshold above all entropies: every step is undone.
    adapter = ttapca.adapt(
        small_convnet(), "sar", forgetting="online", lr=0.1, margin=1.0, recover_below=10.0
    )
    bn = ttapca.adapt(small_convnet(), "bn")
    for x in BATCHES:
        assert torch.equal(adapter(x), bn(x))
    assert adapter.mover.recoveries == adapter.updates == len(BATCHES)
    assert "recoveries=10" in repr(adapter)


def test_no_reliable_sample_no_step() -> None:
    adapter = ttapca.adapt(small_convnet(), "sar", forgetting="online", margin=1e-9, logits="after")
    assert torch.equal(adapter(X), ttapca.adapt(small_convnet(), "bn")(X))
    assert (adapter.updates, adapter.skipped) == (0, 0)


def test_poisoned_batches_leave_no_mark() -> None:
    clean, adapter = (
        ttapca.adapt(small_convnet(), "sar", forgetting="online", lr=0.05, margin=0.9) for _ in "ab"
    )
    poisoned = X.clone()
    poisoned[3, 0, 0, 0] = float("nan")
    for x in BATCHES:
        assert torch.equal(adapter(x), clean(x))
        adapter(poisoned)
    assert adapter.skipped == len(BATCHES)


def test_logits_after_the_update() -> None:
    before = ttapca.adapt(small_convnet(), "sar", margin=0.9, lr=0.1)
    after = ttapca.adapt(small_convnet(), "sar", margin=0.9, lr=0.1, logits="after", steps=3)
    assert not torch.equal(before(X), after(X))
    assert (before.updates, after.updates) == (1, 3)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
def test_small_batches(make, size: int) -> None:
    adapter = ttapca.adapt(make(), "sar", forgetting="online", margin=0.99, lr=0.01)
    for x in BATCHES:
        assert torch.isfinite(adapter(x[:size])).all()


def test_a_pickle_takes_the_average_along() -> None:
    adapter = ttapca.adapt(small_convnet(), "sar", forgetting="online", margin=0.9, lr=0.05)
    adapter(X)
    assert pickle.loads(pickle.dumps(adapter)).mover.average == adapter.mover.average
    adapter.float()
    assert torch.isfinite(adapter(X.float())).all()


def test_layers_left_out() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer4, self.norm = nn.LayerNorm(6), nn.LayerNorm(6), nn.LayerNorm(6)
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(self.layer4(self.layer1(x))))

    assert ttapca.adapt(Deep(), "sar").n_parameters == 12
    assert ttapca.adapt(Deep(), "sar", leave_out=[]).n_parameters == 36
    model, x = Deep(), torch.zeros(2, 6)
    with left_untouched(model, x), pytest.raises(AttachError, match="not left out; the model has"):
        ttapca.adapt(model, "sar", leave_out=["*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_margin": 0.0}, "`margin` must be a finite number above 0; found 0.0"),
        ({"radius": float("nan")}, "`radius` must be a finite number above 0; found nan"),
        ({"recover_below": -1.0}, "`recover_below`, an entropy, is finite"),
        ({"leave_out": "fc"}, "`leave_out` is a list of patterns; found 'fc' alone"),
        ({"lr": 0.0}, "`lr` must be a finite number above 0"),
        ({"steps": 0}, "`steps` is a whole number"),
        ({"logits": "both"}, "`logits` must be one of before, after"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, "sar", **options)  # type: ignore[arg-type]
