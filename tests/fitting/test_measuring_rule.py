"""Which images are run through the whole network."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ttapca.fitting.measuring_rule import MEASURED_FIRST, ONE_IN, MeasuringRule, measuring_rule


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(1, 60), st.integers(0, 4000))
def test_the_rule_is_that_of_a_reader_who_counts(first: int, block: int, blocks: int) -> None:
    """It measures a block where fewer were measured than at first, and than one in 32."""
    measured, expected = 0, []
    for number in range(blocks):
        seen = (number + 1) * block
        expected.append(measured < max(first, seen / ONE_IN))
        measured += block * expected[-1]
    found = MeasuringRule(first, block, classes=0).of(torch.arange(blocks) * block)
    assert found.tolist() == expected


def test_all_images_of_a_block_or_none() -> None:
    found = MeasuringRule(first=30, block=20, classes=0).of(torch.arange(4000))
    each = found.view(-1, 20)
    assert bool((each.all(1) == each.any(1)).all())


def test_nothing_is_measured_where_nothing_is_needed() -> None:
    """A thousand classes cannot be told apart by 700 images, and BatchNorm remembers the rest."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    rule = measuring_rule(model, 700, 1000)
    assert (rule.expected, rule.stored_bytes(model)) == (0, 0)
    assert not rule.of(torch.arange(700)).any()
    with_groups = nn.Sequential(*model, nn.GroupNorm(1, 2))
    assert measuring_rule(with_groups, 700, 1000).expected == 700
    unknown = measuring_rule(model, None, 10)
    assert unknown.expected is None
    assert unknown.of(torch.arange(math.ceil(MEASURED_FIRST))).all()


def test_a_network_without_classes_is_run_only_for_layers_that_remember_nothing() -> None:
    """A backbone that returns features has no classes to tell apart."""
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    for images in (2000, None):
        rule = measuring_rule(backbone, images, 0)
        assert (rule.needed, rule.expected) == (False, 0)
        assert measuring_rule(nn.Sequential(*backbone, nn.GroupNorm(1, 2)), images, 0).needed
