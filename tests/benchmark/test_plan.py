"""Plans: what they say, what they refuse, and the units of work that they give."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.worlds import small_subject
from ttapca.benchmark import Plan, Subject, expand, presets, read_plan, read_preset
from ttapca.corruptions import EXTRA, STANDARD
from ttapca.errors import DataFormatError, DataNotFoundError, NotEnoughDataError, OptionError
from ttapca.networks.source import fingerprint


def test_the_default_is_the_papers_with_the_recommended_method() -> None:
    plan = Plan()
    assert plan.data == "cifar10"
    assert plan.methods == ("source", "bn", "tent", "ttapca-exp", "ttapca-relu", "wiener")
    assert plan.corruptions == STANDARD
    assert (plan.severities, plan.batch_sizes, plan.seeds) == ((5,), (200,), (0,))
    assert plan.settings == ("episodic", "online")
    assert Plan(corruptions=("extra", "clean")).corruptions == (*EXTRA, "clean")
    assert Plan(corruptions=("Motion Blur", "motion_blur")).corruptions == ("motion_blur",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ("tentt",)}, r"no method `tentt`\. Did you mean `tent`"),
        ({"methods": ()}, "`methods` must be a list of 1 to 1,000 entries; found 0"),
        ({"methods": (["tent"],)}, r"`methods\[0\]` must be text; found \['tent'\]"),
        ({"settings": ("onlin",)}, r"found 'onlin'\. Did you mean `online`"),
        ({"corruptions": ("cleen",)}, r"found `cleen`\. Did you mean `clean`"),
        ({"severities": (6,)}, r"`severities\[0\]` must be a whole number from 1 to 5; found 6"),
        ({"batch_sizes": (0,)}, r"`batch_sizes\[0\]` must be .* from 1 to 1,000,000; found 0"),
        ({"seeds": (10**5000,)}, "found a number of thousands of digits"),
        ({"images": 0}, "`images` must be a whole number from 1 .*; found 0"),
        ({"components": (1.5,)}, r"`components\[0\]` must be a whole number .*; found 1\.5"),
        (
            {"seeds": tuple(range(1000)), "components": tuple(range(1, 1001))},
            "at most 100,000 measurements.* found 180,000,000",
        ),
        ({"method": {"tnet": {}}}, "no method `tnet`"),
        ({"method": {"tent": 3}}, r"`method\.tent` must be an object: names with values; found 3"),
        ({"method": {"tent": {"gian": "relu"}}}, r"no option `gian`.*Did you mean `gain`"),
        ({"method": {"tent": {"logits": "now"}}}, "logits` must be one of before, after; found"),
        ({"method": {"tent": {"filter": "yes"}}}, "`method.tent.filter` must be true or false"),
        ({"method": {"tent": {"statistics": []}}}, "one of source, batch, mixed, or a finite"),
        ({"method": {"tent": {"steps": 0}}}, "`method.tent.steps` must be a whole number from 1"),
        ({"method": {"tent": {"gain": [[[[[[[[[[1]]]]]]]]]]}}}, "not nested too deep"),
        ({"method": {"bn": {"guard": "reset"}}}, "would have no effect: `bn` learns nothing"),
        ({"method": {"roid": {"seed": 1}}}, "give `seeds` instead"),
    ],
)
def test_what_makes_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Plan(**values)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'methods = ["tent", "bn"]\nseeds = [0, 1, 1]\nlr = 0.01\n[method.bn]\nalpha = 0.3\n'
    )
    plan = read_plan(path)
    assert (plan.methods, plan.seeds, plan.lr) == (("tent", "bn"), (0, 1), 0.01)
    assert plan.method == {"bn": {"alpha": 0.3}}
    # What is given beside the file wins; options of a method are added.
    changed = plan.changed(seeds=(7,), lr=None, method={"bn": {"prior": 3}, "tent": {"steps": 2}})
    assert (changed.seeds, changed.lr, changed.methods) == ((7,), 0.01, ("tent", "bn"))
    assert changed.method == {"bn": {"alpha": 0.3, "prior": 3}, "tent": {"steps": 2}}
    with pytest.raises(DataNotFoundError, match="No such file"):
        read_plan(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method = [\n", "is not readable TOML"),
        ("a = " + "[" * 5000, "nested too deep"),
        ("a." * 10_000 + "a = 1", "nested more than 32 deep"),
        ("# " + "x" * 30_000, "at most 30,000 bytes"),
        ("seeds = [" + "9" * 5000 + "]", "4300 digits"),
        ("seeds = [0x" + "f" * 9000 + "]", "thousands of digits"),
        ("lr = nan", "`lr` must be a finite number"),
        ("data = 1979-05-27", "`data` must be text"),
        ("methods = ['nothing']", "no method `nothing`"),
        ("seedz = [1]", r"no names but .*; found 'seedz'\. Did you mean `se"),
    ],
    ids=range(10),
)
def test_files_that_are_no_plans(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises((DataFormatError, OptionError), match=f"plan.toml.*{message}"):
        read_plan(path)


def test_presets() -> None:
    plans = {name: read_preset(name) for name in presets() if name.startswith("paper-")}
    for plan in plans.values():  # the paper judges TENT after its step
        assert plan.method == {"tent": {"logits": "after"}}
    first, second, both = (plans[f"paper-table{name}"] for name in "12s")
    assert [each.settings for each in (first, second)] == [("episodic",), ("online",)]
    assert first.corruptions == second.corruptions == STANDARD
    assert set(second.methods) == {"tent", "ttapca-exp", "ttapca-relu"}
    assert set(first.methods) == {"source", "bn", *second.methods}
    assert (both.settings, both.corruptions) == (("episodic", "online"), (*STANDARD, "clean"))
    assert set(both.methods) == {*first.methods, "wiener"}
    rank, steps = plans["paper-rank"], plans["paper-steps"]
    assert (rank.settings, steps.settings) == (("episodic",), ("online",))
    assert 2000 in rank.components
    assert 1 in steps.steps
    assert rank.seeds == steps.seeds == (0, 1, 2)
    with pytest.raises(OptionError, match=r"found `paper-tabel1`\. Did you mean `paper-table"):
        read_preset("paper-tabel1")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return small_subject()


def small_plan(**values: Any) -> Plan:
    return Plan(**{"methods": ("bn",), "corruptions": ("fog",), "settings": ("online",)} | values)


def test_all_methods_of_a_condition_come_before_the_next(subject: Subject) -> None:
    plan = small_plan(
        methods=("bn", "tent"),
        corruptions=("fog", "snow"),
        severities=(1, 5),
        settings=("online", "continual", "mixed"),
        seeds=(0, 1),
    )
    units = expand(plan, subject)
    assert [sum(len(unit.cells) == count for unit in units) for count in (1, 2)] == [16, 16]
    assert len({cell for unit in units for cell in unit.cells}) == 16 + 2 * 16
    # Each condition is visited once: its images are made once.
    visits = [unit.conditions for unit in units]
    changes = [one for one, before in zip(visits, [None, *visits], strict=False) if one != before]
    fog, snow = ([[(name, severity)] for severity in (1, 5)] for name in ("fog", "snow"))
    expected = [[fog[at], snow[at], fog[at] + snow[at]] for at in (0, 1)]
    assert changes == [*expected[0], *expected[1]]
    clean = expand(small_plan(corruptions=("clean",), severities=(1, 5)), subject)
    assert [unit.conditions for unit in clean] == [[("clean", 0)]]  # once for all severities


def test_what_a_method_decides(subject: Subject) -> None:
    own = {
        "bn": {"alpha": 0.5},
        "eata": {"lr": 0.5, "steps": 2, "redundancy_margin": 0.1},
        "shot": {"filter": True, "gain": "exponential"},
    }
    methods = ("source", "ttapca-relu", *own)
    plan = small_plan(methods=methods, components=(4, 10), steps=(1, 3), method=own)
    facts = {
        (cell.method, cell.options, cell.layer, cell.components, cell.steps, cell.lr)
        for unit in expand(plan, subject)
        for cell in unit.cells
    }
    assert {each for each in facts if each[0] != "shot"} == {
        ("bn", '{"alpha": 0.5}', "", 0, 0, 0.0),
        ("eata", '{"redundancy_margin": 0.1}', "", 0, 2, 0.5),
        ("source", "{}", "", 0, 0, 0.0),
        *(("ttapca-relu", "{}", "conv1", rank, s, 1e-3) for rank in (4, 10) for s in (1, 3)),
    }
    assert {each[1:5] for each in facts if each[0] == "shot"} == {
        ('{"gain": "exponential"}', "conv1", rank, s) for rank in (4, 10) for s in (1, 3)
    }


def test_a_bad_value_of_an_option_is_refused_before_any_work(subject: Subject) -> None:
    with pytest.raises(OptionError, match="found both"):
        expand(small_plan(method={"bn": {"alpha": 0.5, "prior": 3}}), subject)
    with pytest.raises(NotEnoughDataError, match="has 10 components"):
        expand(small_plan(methods=("ttapca-exp",), components=(11,)), subject)
    bare = small_subject()
    bare.fitted = None
    with pytest.raises(OptionError, match="needs a fitted filter; found none"):
        expand(small_plan(methods=("ttapca-exp",)), bare)


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ({"corruptions": ("fog", "snow"), "settings": ("mixed",)}, ", among fog snow"),
        ({"corruptions": ("standard",), "settings": ("mixed",)}, ""),
        (
            {"corruptions": ("fog", "snow"), "settings": ("mixed",), "severities": (1,)},
            ", among fog snow",
        ),
        ({"corruptions": ("fog", "clean"), "settings": ("mixed",)}, ", among fog clean"),
        (
            {"corruptions": ("fog", "clean"), "settings": ("changing",), "severities": (1,)},
            ", among fog clean at 1",
        ),
        ({"corruptions": ("clean",), "settings": ("mixed",), "severities": (1,)}, ", among clean"),
        ({"corruptions": ("fog", "clean"), "severities": (1,)}, ""),
        ({}, ""),
    ],
)
def test_joint_results_say_what_they_were_run_with(
    subject: Subject, values: dict[str, Any], end: str
) -> None:
    assert expand(small_plan(**values), subject)[0].cells[0].corrupted == f"generated, seed 0{end}"


def test_clean_images_of_two_severities_are_two_measurements(subject: Subject) -> None:
    """In a stream that they share, what adaptation saw before depends on the severity."""
    plan = small_plan(
        corruptions=("fog", "clean"),
        severities=(1, 5),
        settings=("online", "continual", "changing", "mixed"),
    )
    clean = [cell for unit in expand(plan, subject) for cell in unit.cells if not cell.severity]
    assert len(clean) == len(set(clean)) == 1 + 2 * 3


def test_gradual_streams_have_all_severities(subject: Subject) -> None:
    plan = small_plan(settings=("gradual",), corruptions=("fog", "clean", "snow"), severities=(2,))
    (unit, *_) = expand(plan, subject)
    assert unit.conditions == [(name, at) for name in ("fog", "snow") for at in range(1, 6)]
    assert unit.cells[0].corrupted.endswith("among fog snow")


def test_clean_images_have_no_severity_to_grow() -> None:
    with pytest.raises(OptionError, match=r"`gradual` raises.*found clean images only\. Name a"):
        small_plan(settings=("gradual",), corruptions=("clean",))


def test_a_fingerprint_is_of_all_that_makes_a_prediction(subject: Subject) -> None:
    network = copy.deepcopy(subject.network)
    assert fingerprint(network) == subject.weights
    assert len(subject.weights) == 16
    network.normalise.mean += 0.1  # not in the state dict
    changed = fingerprint(network)
    with torch.no_grad():
        network.conv1.weight[0, 0, 0, 0] += 1e-6
    assert len({subject.weights, changed, fingerprint(network)}) == 3
