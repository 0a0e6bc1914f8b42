from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ttapca
from oracles import group_norm_net, images, layer_norm_net, left_untouched, small_convnet
from ttapca.adaptation.objectives import hard_likelihood_ratio, soft_likelihood_ratio
from ttapca.adaptation.surfaces import InputTransform
from ttapca.errors import AttachError, OptionError, ShapeError
from ttapca.methods.slr import DiverseLikelihood

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


def plain_ratio(logits: Tensor, likelihood: str) -> Tensor:
    """The paper's two ratios, one class at a time."""
    p = torch.softmax(logits, 1)
    total = torch.zeros((), dtype=logits.dtype)
    for row in p:
        for c in range(len(row)):
            others = sum(row[i] for i in range(len(row)) if i != c)
            weight = row[c] if likelihood == "soft" else float(c == int(row.argmax()))
            total = total - weight * torch.log(row[c] / others)
    return total / len(p)


def plain_slr(
    model: nn.Module, transform: InputTransform, batches: list[Tensor], *, episodic: bool, how: str
) -> list[Tensor]:
    """A copy of the model in training mode behind a transformation; torch's own Adam."""
    network = copy.deepcopy(model).train()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
    first, second = copy.deepcopy(transform.residual[0]), copy.deepcopy(transform.residual[2])
    channels = first.in_channels
    norms = [
        m for m in network.modules() if isinstance(m, (_BatchNorm, nn.GroupNorm, nn.LayerNorm))
    ]
    own = nn.ParameterDict(
        {
            "tau": torch.ones((), dtype=torch.float64),
            "gamma": torch.ones(1, channels, 1, 1, dtype=torch.float64),
            "beta": torch.zeros(1, channels, 1, 1, dtype=torch.float64),
        }
    )
    parameters = [
        *own.values(),
        *first.parameters(),
        *second.parameters(),
        *(p for m in norms for p in (m.weight, m.bias)),
    ]
    start = [p.detach().clone() for p in parameters]

    def forward(x: Tensor) -> Tensor:
        r = second(torch.relu(first(x)))
        return network(own["gamma"] * (own["tau"] * x + (1 - own["tau"]) * r) + own["beta"])

    optimizer = torch.optim.Adam(parameters, lr=6e-4)
    running = None
    outputs = []
    for x in batches:
        if episodic:
            optimizer, running = torch.optim.Adam(parameters, lr=6e-4), None
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
        for _ in range(2):
            logits = forward(x)
            mean = torch.softmax(logits, 1).mean(0)
            running = 0.9 * (mean if running is None else running).detach() + 0.1 * mean
            uniform = 1 / logits.shape[1]
            divergence = (running * torch.log(running / uniform)).sum()
            optimizer.zero_grad()
            (divergence + 0.025 * plain_ratio(logits, how)).backward()
            optimizer.step()
        outputs.append(forward(x).detach())
    return outputs


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False], ids=["episodic", "online"])
@pytest.mark.parametrize("how", ["soft", "hard"])
def test_equals_a_plain_loop(make, episodic: bool, how: str) -> None:
    adapter = ttapca.adapt(
        make(),
        "slr+it",
        forgetting="episodic" if episodic else "online",
        steps=2,
        likelihood=how,
        channels=3,
    )
    (transform,) = (s for s in adapter.surfaces if isinstance(s, InputTransform))
    expected = plain_slr(make(), transform, BATCHES, episodic=episodic, how=how)
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-6)
    assert (adapter.updates, adapter.skipped) == (20, 0)


@pytest.mark.parametrize("size", [1, 2])
def test_small_batches(size: int) -> None:
    adapter = ttapca.adapt(small_convnet(), "slr+it", forgetting="online")
    for x in BATCHES[:3]:
        assert torch.isfinite(adapter(x[:size])).all()
    assert adapter.skipped == 0


def test_a_poisoned_batch_leaves_the_running_marginal() -> None:
    clean = ttapca.adapt(small_convnet(), "slr+it", forgetting="online")
    adapter = ttapca.adapt(small_convnet(), "slr+it", forgetting="online")
    for x in BATCHES:
        adapter(x * float("nan"))
        assert torch.equal(adapter(x), clean(x))
    assert adapter.skipped == len(BATCHES)


def test_leaves_no_trace() -> None:
    model = small_convnet()
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "slr+it", forgetting="online")
        for x in BATCHES:
            adapter(x)
        adapter.detach()


def test_casting_takes_everything_along() -> None:
    adapter = ttapca.adapt(small_convnet(), "slr+it", forgetting="online")
    reference = ttapca.adapt(small_convnet(), "slr+it", forgetting="online")
    adapter(X)
    reference(X)
    adapter.float()
    for x in BATCHES:
        torch.testing.assert_close(adapter(x.float()).double(), reference(x), rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "firm"}, "`likelihood` must be one of soft, hard; found 'firm'"),
        ({"confidence_weight": -1.0}, "`confidence`, the weight of the likelihood ratio"),
        ({"confidence_weight": float("nan")}, "found nan"),
        ({"marginal_momentum": 1.0}, "`momentum`, the weight of the past"),
        ({"channels": 0}, "`channels` must be a whole number from 1 on; found 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, "slr+it", **options)  # type: ignore[arg-type]


def test_models_that_cannot_be_served() -> None:
    model = layer_norm_net()
    with left_untouched(model, X), pytest.raises(AttachError, match="has no convolution"):
        ttapca.adapt(model, "slr+it")
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()
    with left_untouched(plain, X), pytest.raises(AttachError, match="the model has none"):
        ttapca.adapt(plain, "slr+it")


# The ratios.


@pytest.mark.parametrize("how", ["soft", "hard"])
def test_ratios_by_their_definition(how: str) -> None:
    ratio = soft_likelihood_ratio if how == "soft" else hard_likelihood_ratio
    logits = images(20, shape=(7,))
    torch.testing.assert_close(ratio(logits).mean(), plain_ratio(logits, how))
    dense = logits.reshape(2, 10, 7).movedim(2, 1)
    torch.testing.assert_close(ratio(dense).flatten(), ratio(logits))


@pytest.mark.parametrize("ratio", [soft_likelihood_ratio, hard_likelihood_ratio])
def test_certain_predictions_keep_their_gradient(ratio) -> None:
    logits = torch.tensor([[90.0, 0.0, -90.0]], requires_grad=True)
    value = ratio(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.item() == pytest.approx(-90.0)
    assert gradient[0, 0].item() == pytest.approx(-1.0)


def test_clipped_ratios() -> None:
    p = torch.tensor([[0.995, 0.004, 0.001], [0.5, 0.3, 0.2]], dtype=torch.float64)
    clipped = p.clamp(max=0.99)
    expected = -(clipped * torch.log(clipped / (1 - clipped))).sum(1)
    torch.testing.assert_close(soft_likelihood_ratio(p.log(), clip=0.99), expected)


def test_the_marginal_is_forgotten() -> None:
    objective = DiverseLikelihood()
    first = objective(images(9, shape=(4,)))
    assert not torch.equal(objective(images(9, shape=(4,), seed=2)), first)
    objective.reset()
    assert torch.equal(objective(images(9, shape=(4,))), first)


# The surface.


def test_the_transformation_starts_as_the_identity_of_its_own_seed() -> None:
    model = small_convnet()
    plain = model(X)
    with left_untouched(model, X):
        transform = InputTransform(seed=3)
        transform.attach(model)
        assert torch.equal(model(X), plain)
        assert torch.equal(model(input=X), plain)
        transform.detach()
        transform.detach()
    twin, other = InputTransform(seed=3), InputTransform(seed=4)
    for surface in (twin, other):
        surface.attach(small_convnet())
    weights = transform.residual[0].weight
    assert torch.equal(twin.residual[0].weight, weights)
    assert not torch.equal(other.residual[0].weight, weights)
    assert "input transformation: 890 numbers" in repr(twin)


def test_a_model_that_calls_itself_is_transformed_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(x, again=False) if again else x

    model = Twice()
    transform = InputTransform(3)
    transform.attach(model)
    with torch.no_grad():
        transform.shift.fill_(1.0)
    x = torch.zeros(1, 3, 2, 2)
    assert torch.equal(model(x), x + 1)
    with pytest.raises(ShapeError, match="given no tensor"):
        model("x")
    assert torch.equal(model(x), x + 1)  # the pass that failed was counted out
    with pytest.raises(ShapeError, match=r"\(batch, 3, height, width\); found \(1, 2\)"):
        model(torch.zeros(1, 2))
    transform.enabled = False
    assert transform.enabled is False
    assert torch.equal(model(x), x)


def test_one_transformation_a_model() -> None:
    model = small_convnet()
    transform = InputTransform()
    transform.attach(model)
    with pytest.raises(AttachError, match="attached already"):
        transform.attach(small_convnet())
    with pytest.raises(AttachError, match="has one input transformation"):
        InputTransform().attach(model)
    model.to("meta")
    assert model(X.to("meta")).device.type == "meta"
