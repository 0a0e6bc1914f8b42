"""From plans to units of work."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmark.worlds import small_subject
from ttapca.benchmark import Plan, Subject, expand
from ttapca.benchmark.cells import canonical
from ttapca.benchmark.subject import fingerprint
from ttapca.errors import NotEnoughDataError, OptionError


@pytest.fixture(scope="module")
def subject() -> Subject:
    return small_subject()


def test_all_methods_of_a_condition_come_before_the_next(subject: Subject) -> None:
    plan = Plan(
        methods=("bn", "tent"),
        corruptions=("fog", "snow"),
        severities=(1, 5),
        settings=("online", "continual", "mixed"),
        seeds=(0, 1),
    )
    units = expand(plan, subject)
    singles = [unit for unit in units if len(unit.cells) == 1]
    assert len(singles) == 2 * 2 * 2 * 2
    assert len(units) == 16 + 2 * 2 * 2 * 2
    # Each condition is visited once: its images are made once.
    visits = [unit.conditions for unit in units]
    changes = [one for one, before in zip(visits, [None, *visits], strict=False) if one != before]
    assert changes == [
        [("fog", 1)],
        [("snow", 1)],
        [("fog", 1), ("snow", 1)],
        [("fog", 5)],
        [("snow", 5)],
        [("fog", 5), ("snow", 5)],
    ]
    assert len({cell for unit in units for cell in unit.cells}) == 16 + 2 * 16


def test_clean_images_are_run_once_for_all_severities(subject: Subject) -> None:
    plan = Plan(methods=("bn",), corruptions=("clean",), severities=(1, 5), settings=("online",))
    assert [unit.conditions for unit in expand(plan, subject)] == [[("clean", 0)]]


def test_what_a_method_decides(subject: Subject) -> None:
    plan = Plan(
        methods=("source", "bn", "tent", "ttapca-relu", "eata"),
        corruptions=("fog",),
        settings=("online",),
        components=(4, 10),
        steps=(1, 3),
        method={"bn": {"alpha": 0.5}, "eata": {"lr": 0.5, "steps": 2, "d_margin": 0.1}},
    )
    facts = [
        (cell.method, cell.options, cell.layer, cell.components, cell.steps, cell.lr)
        for unit in expand(plan, subject)
        for cell in unit.cells
    ]
    assert sorted(facts) == [
        ("bn", '{"alpha": 0.5}', "", 0, 0, 0.0),
        ("eata", '{"d_margin": 0.1}', "", 0, 2, 0.5),
        ("source", "{}", "", 0, 0, 0.0),
        ("tent", "{}", "", 0, 1, 1e-3),
        ("tent", "{}", "", 0, 3, 1e-3),
        ("ttapca-relu", "{}", "conv1", 4, 1, 1e-3),
        ("ttapca-relu", "{}", "conv1", 4, 3, 1e-3),
        ("ttapca-relu", "{}", "conv1", 10, 1, 1e-3),
        ("ttapca-relu", "{}", "conv1", 10, 3, 1e-3),
    ]


def test_a_filter_below_another_method(subject: Subject) -> None:
    plan = Plan(
        methods=("tent",),
        corruptions=("fog",),
        settings=("online",),
        method={"tent": {"filter": True, "gain": "exponential"}},
    )
    [unit] = expand(plan, subject)
    cell = unit.cells[0]
    assert (cell.layer, cell.components) == ("conv1", 10)
    assert cell.options == canonical({"gain": "exponential"})


def test_a_bad_value_of_an_option_is_refused_before_any_work(subject: Subject) -> None:
    plan = Plan(methods=("bn",), method={"bn": {"alpha": 0.5, "prior": 3}})
    with pytest.raises(OptionError, match="found both"):
        expand(plan, subject)
    with pytest.raises(NotEnoughDataError, match="has 10 components"):
        expand(Plan(methods=("ttapca-exp",), components=(11,)), subject)
    bare = small_subject()
    bare.fitted = None
    with pytest.raises(OptionError, match="needs a fitted filter; found none"):
        expand(Plan(methods=("ttapca-exp",)), bare)


def test_joint_cells_say_what_they_were_run_with(subject: Subject) -> None:
    few = expand(Plan(methods=("bn",), corruptions=("fog", "snow"), settings=("mixed",)), subject)
    all_of_them = expand(Plan(methods=("bn",), settings=("mixed",)), subject)
    alone = expand(Plan(methods=("bn",), corruptions=("fog",), settings=("online",)), subject)
    assert few[0].cells[0].corrupted == "generated, seed 0, among fog snow"
    assert all_of_them[0].cells[0].corrupted == "generated, seed 0"
    assert alone[0].cells[0].corrupted == "generated, seed 0"


def test_a_fingerprint_is_of_all_that_makes_a_prediction(subject: Subject) -> None:
    network = copy.deepcopy(subject.network)
    assert fingerprint(network) == subject.weights
    assert len(subject.weights) == 16
    network.normalise.mean += 0.1  # not in the state dict
    changed = fingerprint(network)
    with torch.no_grad():
        network.conv1.weight[0, 0, 0, 0] += 1e-6
    assert len({subject.weights, changed, fingerprint(network)}) == 3
