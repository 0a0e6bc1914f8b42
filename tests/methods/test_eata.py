from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ttapca
from methods.plain_loops import (
    BATCHES,
    X,
    affine_with_batch_statistics,
    assert_follows,
    both_ways,
    copied,
    every_norm,
    set_to,
    sharp,
)
from oracles import images, left_untouched, small_convnet

SOURCE = images(100, seed=3)
# Wide margins, so that samples pass both filters with as few classes as here.
WIDE = {"entropy_margin": 0.75, "redundancy_margin": 0.8}
DEFAULT = {"entropy_margin": 0.4, "redundancy_margin": 0.4}


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
    margin = entropy_margin * math.log(logits.shape[1])
    terms, kept = [], []
    for row in logits:
        p = torch.softmax(row, 0)
        entropy = -(p * p.log()).sum()
        value, p = float(entropy.detach()), p.detach()
        likeness = 0.0 if mean is None else abs(float(p @ mean / (p.norm() * mean.norm())))
        if value < margin and likeness < redundancy_margin:
            terms.append(entropy / math.exp(value - margin))
            kept.append(p)
    return terms, kept


def plain_eata(
    model: nn.Module, *, forgetting: str, fisher_weight: float, **margins: float
) -> tuple[list[Tensor], list[int]]:
    """EATA, two steps a batch, momentum by hand; logits from before the last update."""
    network, parameters = affine_with_batch_statistics(model)
    start = copied(parameters)
    fisher = plain_fisher(network, parameters)
    velocity, mean = [torch.zeros_like(p) for p in parameters], None
    outputs, used = [], []
    for x in BATCHES:
        if forgetting == "episodic":
            velocity, mean = [torch.zeros_like(p) for p in parameters], None
            set_to(parameters, start)
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
                loss = loss + fisher_weight * (importance * (parameter - value) ** 2).sum()
            gradients = torch.autograd.grad(loss, parameters)
            velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
            set_to(parameters, [p - 0.01 * v for p, v in zip(parameters, velocity, strict=True)])
        outputs.append(logits.detach())
    return outputs, used


@every_norm
@both_ways
@pytest.mark.parametrize("weight", [0.0, 50.0])
@pytest.mark.parametrize("margins", [WIDE, DEFAULT], ids=["wide", "default"])
def test_equals_a_plain_loop(
    make, forgetting: str, weight: float, margins: dict[str, float]
) -> None:
    expected, used = plain_eata(
        sharp(make()), forgetting=forgetting, fisher_weight=weight, **margins
    )
    options = {"source": SOURCE, "fisher_weight": weight} if weight else {}
    options |= margins if margins is WIDE else {}
    adapter = ttapca.adapt(
        sharp(make()), "eata", forgetting=forgetting, steps=2, lr=0.01, **options
    )
    assert_follows(adapter, expected, atol=1e-6)
    assert adapter.updates == sum(number > 0 for number in used)
    assert adapter.skipped == 0
    if margins is WIDE:
        assert any(0 < number < 12 for number in used)


@pytest.mark.parametrize(("classes", "margin", "weight"), [(100, 0.4, 1.0), (101, 0.05, 2000.0)])
def test_few_and_many_classes_have_the_papers_settings(
    classes: int, margin: float, weight: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = 3 * torch.randn(4, 64, 8, generator=generator)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))
    with torch.no_grad():
        network[3].weight.mul_(20)  # sure of what it predicts

    def logits(**options: Any) -> Tensor:
        options |= {"forgetting": "online", "lr": 0.05, "source": batches[0]}
        adapter = ttapca.adapt(copy.deepcopy(network).eval(), "eata", **options)
        return torch.cat([adapter(batch) for batch in batches])

    assert ttapca.METHODS["eata"].options["lr"] == 2.5e-4
    usual = logits()
    assert torch.equal(usual, logits(redundancy_margin=margin, fisher_weight=weight))
    for other in ({"redundancy_margin": 1.5}, {"fisher_weight": 100.0}):
        assert not torch.equal(usual, logits(**other))


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
    expected = ttapca.adapt(sharp(small_convnet()), "eata", source=SOURCE).predictor.fisher
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "eata", source=source)
        for value, reference in zip(adapter.predictor.fisher, expected, strict=True):
            assert torch.equal(value, reference)
        adapter.detach()


def test_a_shuffling_loader_leaves_the_random_state() -> None:
    loader = DataLoader(TensorDataset(SOURCE), batch_size=50, shuffle=True)
    model = sharp(small_convnet())
    with left_untouched(model, X), torch.no_grad():
        ttapca.adapt(model, "eata", source=loader).detach()


def test_a_filter_has_its_share_of_the_penalty() -> None:
    fitted = ttapca.fit(sharp(small_convnet()), "conv1", images(150), 20)
    adapter = ttapca.adapt(sharp(small_convnet()), "eata", filter=fitted, source=SOURCE)
    assert sum(value.numel() for value in adapter.predictor.fisher) == 48
    assert torch.isfinite(adapter(X)).all()
