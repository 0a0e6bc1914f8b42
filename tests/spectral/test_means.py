"""Means that have surely moved, against plain loops and what can be derived by hand."""

from __future__ import annotations

import pytest
import torch

from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.means import (
    allowed_reach,
    class_reach,
    sure_share,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_the_share_by_its_formula() -> None:
    data = drawn(30, 5) * torch.tensor([0.1, 1.0, 3.0, 1.0, 0.5]) + torch.tensor([2, 2, 2, 0.1, 1])
    reach = torch.tensor([0.25, 0.25, 1.0, 0.5, 4.0], dtype=torch.float64)
    found = sure_share(data.mean(0).square(), data.square().mean(0), reach, 30, 12.0)
    for component, share in enumerate(found.tolist()):
        values = data[:, component].tolist()
        mean = sum(values) / 30
        spread = sum((value - mean) ** 2 for value in values) / 30
        own = (30 * spread + CONSTANTS.prior) / (30 + CONSTANTS.prior)
        bound = reach[component].item() * own + CONSTANTS.chance * max(own, 1.0) / 12
        expected = max(0.0, 1 - bound / mean**2) * 11 / 12
        assert share == pytest.approx(expected, rel=1e-9)
    assert found[0] > 0.4  # far, and with little variance of its own
    assert found[3] == 0  # near


def test_reach_by_a_loop_over_classes() -> None:
    labels = torch.arange(300) % 3
    data = drawn(300, 4) + torch.tensor([[0.0] * 4, [3, 0, 0, 0], [0, 0, 1, 0]])[labels]
    mean, variances = data.mean(0), data.var(0, correction=0)
    means = torch.stack([data[labels == k].mean(0) for k in range(3)])
    found = class_reach(means - mean, torch.full((3,), 1 / 3, dtype=torch.float64), variances)
    for component in range(4):
        own = [data[labels == k, component] for k in range(3)]
        within = sum(float(each.var(correction=0)) for each in own) / 3
        farthest = max(float(each.mean() - mean[component]) ** 2 for each in own)
        assert found[component].item() == pytest.approx(farthest / within)
    assert found[0] > 1 > 0.3 > found[1]


def test_no_class_is_so_far_that_nothing_is_left_within() -> None:
    found = class_reach(torch.tensor([[2.0], [-2.0]]), torch.tensor([0.5, 0.5]), torch.ones(1))
    assert found.item() == pytest.approx(4 * 64)


def test_a_batch_of_the_farthest_class_is_left_alone_where_the_rule_is_whole() -> None:
    """At the whole reach, the mean of a class counts for nothing, however many images it has."""
    square, within = torch.tensor(9.0), torch.tensor(1.0)
    for count in (10, 1000):
        assert sure_share(square, square + within, square / within, count, count) == 0
    # The same mean with a tenth of the variance is no class: contrast was lost.
    assert sure_share(square, square + 0.1, torch.tensor(4.5), 1000, 1000) > 0.8


def test_what_is_allowed() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    assert allowed_reach(None, ones).tolist() == [CONSTANTS.chance] * 2
    found = allowed_reach(torch.tensor([10.0, 0.0]), ones)
    assert found.tolist() == [10 * CONSTANTS.farthest_class, CONSTANTS.smallest_reach]
    assert found.dtype == torch.float64


def test_more_images_are_surer_and_one_says_nothing() -> None:
    square, energy = torch.tensor(4.0), torch.tensor(5.0)
    shares = [
        sure_share(square, energy, torch.tensor(0.25), n, n).item() for n in (1, 2, 8, 32, 200)
    ]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.85
