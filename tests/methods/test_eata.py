from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ttapca
from oracles import group_norm_net, images, layer_norm_net, left_untouched, small_convnet
from small_networks import affine_with_batch_statistics, sharp
from ttapca.errors import (
    AttachError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
)

BATCHES = list(images(120, seed=8).split(12))
SOURCE = images(100, seed=3)
X = BATCHES[0]
# Wide margins, so that samples pass both filters with as few classes as here.
WIDE = {"entropy_margin": 1.2, "redundancy_margin": 0.8}


def plain_fisher(network: nn.Module, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Equation 9 on two batches of source data, with the network's own labels."""
    fisher = [torch.zeros_like(parameter) for parameter in parameters]
    for chunk in (SOURCE[:64], SOURCE[64:]):
        loss = -torch.log(torch.softmax(network(chunk), 1).max(1).values).mean()
        for total, g in zip(fisher, torch.autograd.grad(loss, parameters), strict=True):
            total += g**2 / 2
    return fisher


def plain_choice(
    logits: Tensor, mean: Tensor | None, entropy_margin: float, redundancy_margin: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Equations 2 to 6: the weighted entropies of the samples that count, and their predictions."""
    terms, kept = [], []
    for row in logits:
        p = torch.softmax(row, 0)
        entropy = -(p * p.log()).sum()
        value, p = float(entropy.detach()), p.detach()
        repeats = (
            mean is not None
            and abs(float(p @ mean / (p.norm() * mean.norm()))) >= redundancy_margin
        )
        if value < entropy_margin and not repeats:
            terms.append(entropy / math.exp(value - entropy_margin))
            kept.append(p)
    return terms, kept


def plain_eata(
    model: nn.Module, batches: list[Tensor], *, episodic: bool, beta: float, **margins: float
) -> tuple[list[Tensor], list[int]]:
    """EATA, two steps a batch, momentum by hand; logits from before the last update."""
    network, parameters = affine_with_batch_statistics(model)
    start = [p.detach().clone() for p in parameters]
    fisher = plain_fisher(network, parameters)
    velocity, mean = [torch.zeros_like(p) for p in parameters], None
    outputs, used = [], []
    for x in batches:
        if episodic:
            velocity, mean = [torch.zeros_like(p) for p in parameters], None
            for parameter, value in zip(parameters, start, strict=True):
                parameter.data = value.clone()
        for _ in range(2):
            logits = network(x)
            terms, kept = plain_choice(logits, mean, **margins)
            used.append(len(kept))
            if not kept:
                break
            here = torch.stack(kept).mean(0)
            mean = here if mean is None else 0.9 * mean + 0.1 * here
            loss = sum(terms) / len(terms)
            for importance, parameter, value in zip(fisher, parameters, start, strict=True):
                loss = loss + beta * (importance * (parameter - value) ** 2).sum()
            gradients = torch.autograd.grad(loss, parameters)
            velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
            for parameter, v in zip(parameters, velocity, strict=True):
                parameter.data = parameter.data - 0.01 * v
        outputs.append(logits.detach())
    return outputs, used


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False], ids=["episodic", "online"])
@pytest.mark.parametrize("beta", [0.0, 50.0])
@pytest.mark.parametrize("wide", [True, False])
def test_equals_a_plain_loop(make, episodic: bool, beta: float, wide: bool) -> None:
    classes = 5 if make is small_convnet else 4
    margins = (
        WIDE if wide else {"entropy_margin": 0.4 * math.log(classes), "redundancy_margin": 0.05}
    )
    expected, used = plain_eata(sharp(make()), BATCHES, episodic=episodic, beta=beta, **margins)
    options = {"source": SOURCE, "fisher_weight": beta} if beta else {}
    options |= margins if wide else {}
    adapter = ttapca.adapt(
        sharp(make()),
        "eata",
        forgetting="episodic" if episodic else "online",
        steps=2,
        lr=0.01,
        **options,
    )
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-6)
    assert adapter.updates == sum(number > 0 for number in used)
    assert adapter.skipped == 0
    if wide:
        assert any(0 < number < 12 for number in used)


def test_defaults_are_those_of_the_official_code() -> None:
    adapter = ttapca.adapt(sharp(small_convnet()), "eata", forgetting="online", steps=2)
    (group,) = adapter.mover.descent._optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (2.5e-4, 0.9)
    assert (adapter.mover.redundancy_margin, adapter.mover.fisher_weight) == (0.05, 2000.0)


def test_the_penalty_holds_back() -> None:
    def distance(**options: object) -> float:
        adapter = ttapca.adapt(
            sharp(small_convnet()), "eata", forgetting="online", lr=0.01, **WIDE, **options
        )
        start = [p.detach().clone() for p in adapter.surfaces.parameters()]
        for x in BATCHES:
            adapter(x)
        moved = zip(adapter.surfaces.parameters(), start, strict=True)
        return sum(float((p.detach() - s).square().sum()) for p, s in moved)

    assert distance(source=SOURCE, fisher_weight=10.0) < distance()


@pytest.mark.parametrize(
    "source",
    [
        list(SOURCE.split(64)),
        [(batch, torch.zeros(len(batch))) for batch in SOURCE.split(64)],
        iter(SOURCE.split(64)),
        DataLoader(TensorDataset(SOURCE), batch_size=64),
    ],
    ids=["list", "pairs", "iterator", "loader"],
)
def test_forms_of_source_data(source) -> None:
    model = sharp(small_convnet())
    expected = ttapca.adapt(sharp(small_convnet()), "eata", source=SOURCE).mover.fisher
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "eata", source=source)
        for value, reference in zip(adapter.mover.fisher, expected, strict=True):
            assert torch.equal(value, reference)
        adapter.detach()


def test_a_shuffling_loader_leaves_the_random_state() -> None:
    loader = DataLoader(TensorDataset(SOURCE), batch_size=50, shuffle=True)
    model = sharp(small_convnet())
    with left_untouched(model, X), torch.no_grad():
        ttapca.adapt(model, "eata", source=loader).detach()


def test_no_reliable_sample_no_step() -> None:
    adapter = ttapca.adapt(
        sharp(small_convnet()), "eata", entropy_margin=1e-9, forgetting="online", logits="after"
    )
    bn = ttapca.adapt(sharp(small_convnet()), "bn")
    for x in BATCHES:
        assert torch.equal(adapter(x), bn(x))
    assert (adapter.updates, adapter.skipped) == (0, 0)


def test_a_poisoned_batch_is_skipped_and_counted() -> None:
    clean = ttapca.adapt(sharp(small_convnet()), "eata", forgetting="online", **WIDE)
    adapter = ttapca.adapt(sharp(small_convnet()), "eata", forgetting="online", **WIDE)
    for x in BATCHES:
        adapter(x * float("nan"))
        assert torch.equal(adapter(x), clean(x))
    assert adapter.skipped == len(BATCHES)


@pytest.mark.parametrize("size", [1, 2])
def test_small_batches(size: int) -> None:
    adapter = ttapca.adapt(
        sharp(small_convnet()), "eata", forgetting="online", source=SOURCE, **WIDE
    )
    for x in BATCHES:
        assert torch.isfinite(adapter(x[:size])).all()
    assert adapter.skipped == 0


def test_copies_casts_and_resets_with_source_data() -> None:
    def made() -> ttapca.Adapter:
        return ttapca.adapt(
            sharp(small_convnet()),
            "eata",
            source=SOURCE,
            forgetting="online",
            lr=0.01,
            fisher_weight=1.0,
            **WIDE,
        )

    adapter = made()
    first = [adapter(x) for x in BATCHES]
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    for twin in (adapter, *twins):
        twin.reset()
        assert all(torch.equal(twin(x), y) for x, y in zip(BATCHES, first, strict=True))
    adapter.reset()
    adapter.float()
    for x, y in zip(BATCHES, first, strict=True):
        torch.testing.assert_close(adapter(x.float()).double(), y, rtol=0, atol=1e-3)


def test_a_filter_has_its_share_of_the_penalty() -> None:
    fitted = ttapca.fit(sharp(small_convnet()), "conv1", images(150), 20)
    adapter = ttapca.adapt(sharp(small_convnet()), "eata", filter=fitted, source=SOURCE)
    assert sum(value.numel() for value in adapter.mover.fisher) == 48
    assert torch.isfinite(adapter(X)).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"entropy_margin": 0.0},
            OptionError,
            "`entropy_margin` must be a finite number above 0; found 0.0",
        ),
        (
            {"redundancy_margin": -1},
            OptionError,
            "`redundancy_margin` must be a finite number above 0; found -1",
        ),
        ({"fisher_weight": float("nan")}, OptionError, "`fisher_weight` is a finite number"),
        ({"source": 3}, OptionError, "or a tensor; found a int"),
        ({"source": ["x"]}, OptionError, r"batch 0 \(counting from 0\) is a str"),
        ({"source": []}, NotEnoughDataError, "`source` has none"),
        ({"source": SOURCE * float("nan")}, NonFiniteError, "must be finite"),
    ],
)
def test_bad_options_leave_the_model_untouched(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    model = sharp(small_convnet()).train()
    model.bn1.eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(error, match=message):
        ttapca.adapt(model, "eata", **options)  # type: ignore[arg-type]
    assert [module.training for module in model.modules()] == before
    model = sharp(small_convnet())
    with left_untouched(model, X), pytest.raises(error, match=message):
        ttapca.adapt(model, "eata", **options)  # type: ignore[arg-type]


def test_models_that_cannot_be_served() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).double()
    with left_untouched(plain, X), pytest.raises(AttachError, match="the model has none"):
        ttapca.adapt(plain, "eata")
    dense = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    with pytest.raises(LayerOutputError, match=r"found \(12, 4, 6, 6\)"):
        ttapca.adapt(dense, "eata")(X)
