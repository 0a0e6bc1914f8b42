"""Samples that resemble each other: what `fit` makes of groups, and of data in order of time."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn

import ttapca
from ttapca.errors import FewIndependentWarning, OptionError, SavedFilterError
from ttapca.fitting.source_statistics import PredictedClasses

DRIVES, FRAMES, SIDE = 24, 25, 8


def frames(drives: int = DRIVES, seed: int = 0) -> Tensor:
    """Images of drives: those of one have a brightness and a sharpness of their own."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(drives, FRAMES, 1, SIDE, SIDE, generator=generator)
    smooth = nn.functional.avg_pool2d(images.flatten(0, 1), 3, 1, 1).view_as(images)
    scales = torch.randn(2, drives, 1, 1, 1, 1, generator=generator).mul(0.6).exp()
    return (scales[0] * smooth + 0.1 * scales[1] * images).flatten(0, 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))


NAMES = [f"drive {row // FRAMES}" for row in range(DRIVES * FRAMES)]
SOURCE = frames()
ROUTES = ["folded", "exact", "gram", "randomised", "dct"]


def fit(data: Tensor = SOURCE, **options: object) -> ttapca.FittedFilter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewIndependentWarning)
        return ttapca.fit(network(), "0", data.split(64), **options)  # type: ignore[arg-type]


def rare_drives(fitted: ttapca.FittedFilter) -> int:
    """How many of twenty new clean drives have a p-value under 0.01."""
    p_values = []
    with ttapca.adapt(network(), "wiener", filter=fitted, states=1) as adapted:
        for drive in frames(20, seed=7).split(FRAMES):
            adapted(drive)
            p_values.append(adapted.health.p_value)
    return sum(p_value < 0.01 for p_value in p_values)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("groups", [None, NAMES], ids=["in order", "named"])
def test_clean_drives_look_as_usual(route: str, groups: list[str] | None) -> None:
    """A new clean drive is no shift; counted as independent frames, nearly each would be one."""
    few = {"n_components": 40} if route in ("gram", "randomised") else {}
    fitted = fit(route=route, groups=groups, **few)
    rows = torch.randperm(len(NAMES), generator=torch.Generator().manual_seed(1))
    unordered = fit(frames()[rows], route=route, **few)
    rare = {}
    for name, each in (("known", fitted), ("not known", unordered)):
        rare[name] = rare_drives(each)
    assert rare["known"] <= 2 < 8 < rare["not known"]
    assert fitted.resemblance_ is not None
    assert fitted.resemblance_.correlation > 0.05
    assert unordered.resemblance_ is not None
    assert unordered.resemblance_.correlation == 0


def test_groups_in_any_order_are_the_same_groups() -> None:
    rows = torch.randperm(len(NAMES), generator=torch.Generator().manual_seed(2))
    mixed = fit(frames()[rows], groups=[NAMES[row] for row in rows.tolist()])
    sorted_ = fit(groups=NAMES)
    one, other = mixed.resemblance_, sorted_.resemblance_
    assert one is not None
    assert other is not None
    assert one.independent == pytest.approx(other.independent, rel=0.3)
    assert one.correlation == pytest.approx(other.correlation, rel=0.3)


def test_few_groups_are_warned_of_and_widen_what_is_usual() -> None:
    few = frames(4)
    with pytest.warns(FewIndependentWarning, match=r"count for about \d+ independent ones"):
        fitted = ttapca.fit(network(), "0", few, groups=NAMES[: len(few)])
    assert rare_drives(fitted) <= 4
    assert rare_drives(fit(few[torch.randperm(len(few))])) >= 15


def test_independent_samples_are_not_warned_of() -> None:
    data = torch.randn(300, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewIndependentWarning)
        fitted = ttapca.fit(network(), "0", data)
    assert fitted.resemblance_ is not None
    assert fitted.resemblance_.independent == 300


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (NAMES[:-1], "found 599 names for 600 samples"),
        (["all"] * len(NAMES), "found 'all' for all samples"),
    ],
)
def test_groups_that_say_nothing_are_refused(groups: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fit(groups=groups)


def test_a_saved_filter_knows_it_and_wrong_ones_are_refused(tmp_path) -> None:
    fitted = fit(groups=NAMES)
    fitted.save(tmp_path / "filter", dtype="float64")
    again = ttapca.load(tmp_path / "filter")
    assert again.visible_shift(50) == fitted.visible_shift(50)
    assert fitted.resemblance_ is not None
    wrong = dataclasses.replace(fitted.resemblance_, correlations=(1.5,))
    dataclasses.replace(fitted, resemblance_=wrong).save(tmp_path / "wrong")
    with pytest.raises(SavedFilterError, match="`resemblance` of the filter"):
        ttapca.load(tmp_path / "wrong")


def test_a_truncated_filter_can_be_used() -> None:
    fewer = fit(groups=NAMES).truncated(9)
    with ttapca.adapt(network(), "wiener", filter=fewer) as adapted:
        adapted(frames(2, seed=9))
        assert adapted.health.p_value > 0


def test_predicted_classes_are_found_by_position_and_merge() -> None:
    both = [PredictedClasses(), PredictedClasses()]
    both[0].add(torch.tensor([8, 2]), torch.eye(3)[[2, 0]])
    both[1].add(torch.tensor([5]), torch.eye(3)[[1]])
    both[0].merge(both[1])
    assert both[0].at(torch.tensor([2, 3, 5, 8, 9])).tolist() == [0, -1, 1, 2, -1]
    assert PredictedClasses().at(torch.tensor([1])).tolist() == [-1]
