"""`ClassPlan`: which classes are taken out of statistics, and for how many images they count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ttapca.spectral.chain import ChainReading
from ttapca.spectral.class_plan import SPECTRUM, ClassPlan
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.source_classes import SourceClasses

SHARES = torch.tensor([0.5, 0.3, 0.2])
LIKENESS = {"early": 0.05, "late": 0.6}


def classes() -> SourceClasses:
    generator = torch.Generator().manual_seed(0)
    sums = {}
    for path in LIKENESS:
        mean = torch.randn(3, 4, generator=generator)
        sums[path] = torch.stack([mean, mean.square() + 1], 1) * SHARES[:, None, None]
    found = SourceClasses.from_sums(SHARES, sums)
    found.likeness.update(LIKENESS)
    return found


def reading(place: list[float], known: Tensor | None = None) -> ChainReading:
    """Of one stream in which runs are all that is known."""
    images = len(place)
    shares = torch.zeros(images, 3) if known is None else known
    return ChainReading(
        outputs=np.full((1, images, 3), 1 / 3),
        plain=np.zeros((1, images)),
        known=shares.double().numpy()[None],
        place=np.array([place]),
        held=np.zeros((1, images)),
        crowd=np.zeros(1),
        ordered=np.ones(1),
        run_length=np.ones(1),
    )


def worth(length: float, alike: float) -> float:
    """How many independent images so many of one class are worth."""
    return length / (1 + (length - 1) * alike)


def test_what_is_not_known_is_drawn_from_the_source() -> None:
    known = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.4, 0.0, 0.1]])
    plan = ClassPlan.of_reading(classes(), reading([1, 2, 3], known), 0.0, 0.0)
    expected = [[0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.4 + 0.25, 0.15, 0.1 + 0.1]]
    torch.testing.assert_close(plan.shares, torch.tensor(expected))


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [6], [4, 2], [1, 3, 2]], ids=str)
def test_runs_count_by_their_design_effect(lengths: list[int]) -> None:
    places = [float(place) for length in lengths for place in range(1, length + 1)]
    plan = ClassPlan.of_reading(classes(), reading(places), 0.0, 0.0)
    for path, alike in {**LIKENESS, SPECTRUM: CONSTANTS.likeness}.items():
        found = plan.images(path, None, 0, len(places))
        assert found == pytest.approx(sum(worth(length, alike) for length in lengths))
    assert plan.counts.dtype == torch.float64


def test_a_run_that_goes_on_adds_what_it_is_worth_more() -> None:
    whole, rest = (
        ClassPlan.of_reading(classes(), reading(places), 0.0, 0.0).images(
            "late", None, 0, len(places)
        )
        for places in ([1.0, 2, 3, 4, 5, 6, 7], [5.0, 6, 7])
    )
    first = ClassPlan.of_reading(classes(), reading([1.0, 2, 3, 4]), 0.0, 0.0).images(
        "late", None, 0, 4
    )
    assert first + rest == pytest.approx(whole) == pytest.approx(worth(7, 0.6))


def test_images_in_no_order_count_for_one_each() -> None:
    plan = ClassPlan.of_shares(classes(), SHARES.expand(8, 3))
    for path in ("early", "late", SPECTRUM):
        assert plan.images(path, None, 0, 8) == 8
        assert plan.images(path, torch.tensor([1, 5]), 1, 2) == 2


def test_each_condition_counts_its_own_images() -> None:
    plan = ClassPlan.of_reading(classes(), reading([1, 2, 3, 1]), 0.0, 0.0)
    rows = torch.tensor([0, 3]), torch.tensor([1, 2])
    found = [plan.images("late", some, number, 2) for number, some in enumerate(rows)]
    assert found[0] == pytest.approx(2 * worth(1, 0.6))
    assert found[1] == pytest.approx(worth(3, 0.6) - worth(1, 0.6))
    assert sum(found) == pytest.approx(float(plan.counts[:, 1].sum()))


def test_what_is_not_known_of_counts_for_one() -> None:
    """Layers without a likeness, and those whose rows are not images."""
    plan = ClassPlan.of_reading(classes(), reading([1, 2, 3]), 0.0, 0.0)
    assert plan.images("another", None, 0, 3) == 3
    assert plan.images("late", None, 0, 48) == 48


def test_corrections_go_by_condition() -> None:
    """Those of the classes that its images have; a layer that nothing is known of stays."""
    source = classes()
    plan = ClassPlan.of_shares(source, torch.eye(3)[torch.tensor([0, 0, 1, 2])])
    moments = torch.randn(4).double(), torch.rand(4).double()
    groups = {0: torch.tensor([0, 1]), 1: torch.tensor([2, 3])}
    for condition, rows in groups.items():
        shift, scale = source.corrections(plan.shares[rows].mean(0))["late"]
        mean, var = plan.corrected("late", moments, rows, condition)
        torch.testing.assert_close(mean, moments[0] - shift.double())
        torch.testing.assert_close(var, moments[1] * scale.double())
        assert mean.dtype == var.dtype == torch.float64
    again = plan.corrected("late", moments, groups[0], 0)
    assert not torch.equal(again[0], mean)
    assert plan.corrected("another", moments, None, 0) is moments


def test_images_like_the_source_need_no_correction() -> None:
    plan = ClassPlan.of_shares(classes(), SHARES.expand(5, 3))
    mean, var = plan.corrected("early", (torch.ones(4), torch.ones(4)), None, 0)
    torch.testing.assert_close(mean, torch.ones(4))
    torch.testing.assert_close(var, torch.ones(4))


def test_plans_differ_by_the_share_of_images_whose_class_is_another_one() -> None:
    one, other = (
        ClassPlan.of_shares(classes(), torch.eye(3)[torch.tensor(labels)])
        for labels in ([0, 0, 1, 1], [1, 0, 1, 2])
    )
    assert one.differs(one, None) == 0.0
    assert one.differs(other, None) == other.differs(one, None) == pytest.approx(0.25)
    # Of the first two, one is of another class.
    assert one.differs(other, torch.tensor([0, 1])) == pytest.approx(0.5)
    assert one.differs(other, torch.tensor([2])) == 0.0
    # Only shares count: classes that trade places have the same statistics.
    moved = ClassPlan.of_shares(classes(), torch.eye(3)[torch.tensor([1, 1, 0, 0])])
    assert one.differs(moved, None) == 0.0
