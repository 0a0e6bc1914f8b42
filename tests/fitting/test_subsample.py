"""Which images are run through the whole network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ttapca
from ttapca.fitting.channel_statistics import MEASURED, ONE_IN, Subsample, choose_subsample


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(1, 40_000), st.integers(1, 12))
def test_measured_images_are_spread_over_all_data(wanted: int, images: int, period: int) -> None:
    """Over every stretch of the data, and over classes that take turns."""
    rule = Subsample(wanted, images, classes=0)
    measured = rule.of(torch.arange(images))
    assert rule.expected is not None
    assert abs(int(measured.sum()) - rule.expected) <= 3
    for part in measured.chunk(5):
        assert abs(int(part.sum()) - len(part) * rule.expected / images) <= 4
    for first in range(period):
        part = measured[first::period]
        assert abs(int(part.sum()) - len(part) * rule.expected / images) <= 8


@settings(deadline=None, max_examples=20)
@given(st.integers(20, 300), st.integers(1, 40_000))
def test_without_a_known_length_weights_make_up_for_rates(wanted: int, images: int) -> None:
    """The first images are all measured; later ones stand for those around them."""
    rule, positions = Subsample(wanted, None, classes=0), torch.arange(images)
    measured = rule.of(positions)
    assert measured[:wanted].all()
    assert rule.rates(positions).min() >= 1 / ONE_IN
    weights = rule.rates(positions[measured]).reciprocal()
    assert float(weights.sum()) == pytest.approx(images, rel=0.05, abs=3 * ONE_IN)


def test_nothing_is_measured_where_nothing_is_needed() -> None:
    """A thousand classes cannot be told apart by 700 images, and BatchNorm remembers the rest."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    rule = choose_subsample(model, 700, 1000)
    assert (rule.expected, rule.stored_bytes(model)) == (0, 0)
    assert not rule.of(torch.arange(700)).any()
    with_groups = nn.Sequential(*model, nn.GroupNorm(1, 2))
    assert choose_subsample(with_groups, 700, 1000).expected == 700
    unknown = choose_subsample(model, None, 10)
    assert unknown.expected is None
    assert unknown.of(torch.arange(MEASURED)).all()


def test_a_network_without_classes_is_run_only_for_layers_that_remember_nothing() -> None:
    """A backbone that returns features has no classes to tell apart."""
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    for images in (2000, None):
        rule = choose_subsample(backbone, images, 0)
        assert (rule.needed, rule.expected) == (False, 0)
        assert choose_subsample(nn.Sequential(*backbone, nn.GroupNorm(1, 2)), images, 0).needed


@pytest.mark.parametrize("known", [True, False])
def test_a_fit_does_not_depend_on_the_order_of_the_classes(known: bool) -> None:
    """Sorted by class, as pictures in folders are, and shuffled."""
    torch.manual_seed(0)
    classes = torch.arange(10).repeat_interleave(400)
    data = torch.randn(4000, 1, 6, 6) + 3 * torch.eye(10, 36)[classes].view(-1, 1, 6, 6)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(1, 4), nn.Flatten()
    )
    model.append(nn.Linear(144, 10))
    found = []
    for order in (torch.arange(4000), torch.randperm(4000)):
        batches = data[order].split(250)
        fitted = ttapca.fit(model, "0", batches if known else iter(batches))
        assert fitted.classes_ is not None
        found.append(fitted)
    one, two = (fitted.classes_ for fitted in found)
    torch.testing.assert_close(one.shares, two.shares, atol=0.01, rtol=0)
    for path in ("1", "2"):
        spread = one.layers[path][0][1].sqrt()
        away = (one.layers[path][0] - two.layers[path][0]).abs() / spread
        assert float(away.max()) < 0.1, path
    torch.testing.assert_close(*(each.group_norm_["2"] for each in found), atol=0.05, rtol=0.05)
