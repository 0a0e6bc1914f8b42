"""Plans: what they say, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttapca.bench import Plan, presets, read_plan, read_preset
from ttapca.corruptions import EXTRA, STANDARD
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError


def test_the_default_is_the_papers() -> None:
    plan = Plan()
    assert plan.data == "cifar10"
    assert plan.methods == ("source", "bn", "tent", "ttapca-exp", "ttapca-relu")
    assert plan.corruptions == STANDARD
    assert (plan.severities, plan.batch_sizes, plan.seeds) == ((5,), (200,), (0,))
    assert plan.settings == ("episodic", "online")


def test_groups_of_corruptions() -> None:
    assert Plan(corruptions=("extra", "clean")).corruptions == (*EXTRA, "clean")
    assert Plan(corruptions=("Motion Blur", "motion_blur")).corruptions == ("motion_blur",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ("tentt",)}, r"no method `tentt`\. Did you mean `tent`"),
        ({"methods": ()}, "`methods` takes at least one"),
        ({"methods": "tent"}, "`methods` is a list; found 'tent'"),
        ({"settings": ("onlin",)}, r"found `onlin`\. Did you mean `online`"),
        ({"corruptions": ("fogg",)}, r"found `fogg`\. Did you mean `fog`"),
        ({"corruptions": ("cleen",)}, r"found `cleen`\. Did you mean `clean`"),
        ({"corruptions": ()}, "`corruptions` takes at least one"),
        ({"severities": (6,)}, "`severities` takes whole numbers from 1 to 5; found 6"),
        ({"severities": ()}, "`severities` takes at least one"),
        ({"batch_sizes": (0,)}, "`batch_sizes` takes whole numbers from 1 on; found 0"),
        ({"seeds": (-1,)}, "`seeds` takes whole numbers from 0 on; found -1"),
        ({"seeds": (True,)}, "`seeds` takes whole numbers from 0 on; found True"),
        ({"images": 0}, "`images` takes whole numbers from 1 on; found 0"),
        ({"components": (1.5,)}, r"`components` takes whole numbers from 1 on; found 1\.5"),
        ({"lr": 0}, "`lr` is a finite number above 0"),
        ({"method": {"tent": {"gian": "relu"}}}, r"no option `gian`.*Did you mean `gain`"),
        ({"method": {"tnet": {}}}, "no method `tnet`"),
        ({"method": {"tent": 3}}, r"under \[method\.tent\]; found 3"),
        ({"method": {"tent": {"logits": "now"}}}, "is before or after; found 'now'"),
        ({"method": {"tent": {"filter": "yes"}}}, "is true or false; found 'yes'"),
        ({"method": {"roid": {"seed": 1}}}, "give `seeds` instead"),
    ],
)
def test_what_makes_no_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Plan(**values)  # type: ignore[arg-type]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'methods = ["tent", "bn"]\nseeds = [0, 1, 1]\nlr = 0.01\n[method.bn]\nalpha = 0.3\n'
    )
    plan = read_plan(path)
    assert (plan.methods, plan.seeds, plan.lr) == (("tent", "bn"), (0, 1), 0.01)
    assert plan.method == {"bn": {"alpha": 0.3}}
    # What is given beside the file wins; options of a method are added.
    changed = plan.changed(seeds=(7,), lr=None, method={"bn": {"lr": 1.0}, "tent": {"steps": 2}})
    assert (changed.seeds, changed.lr, changed.methods) == ((7,), 0.01, ("tent", "bn"))
    assert changed.method == {"bn": {"alpha": 0.3, "lr": 1.0}, "tent": {"steps": 2}}


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("method = [\n")
    with pytest.raises(DataFormatError, match="is not readable TOML"):
        read_plan(path)
    path.write_text("seedz = [1]\n")
    with pytest.raises(OptionError, match=r"key `seedz`, which a plan does not\. Did you mean `se"):
        read_plan(path)
    with pytest.raises(DataNotFoundError, match="No such file"):
        read_plan(tmp_path / "nothing.toml")


def test_presets() -> None:
    assert set(presets()) == {"paper-table1", "paper-table2", "paper-rank", "paper-steps"}
    first, second = read_preset("paper-table1"), read_preset("paper-table2")
    assert (first.settings, second.settings) == (("episodic",), ("online",))
    assert first.corruptions == second.corruptions == STANDARD
    assert set(second.methods) == {"tent", "ttapca-exp", "ttapca-relu"}
    assert set(first.methods) == {"source", "bn", *second.methods}
    rank, steps = read_preset("paper-rank"), read_preset("paper-steps")
    assert (rank.settings, steps.settings) == (("episodic",), ("online",))
    assert 2000 in rank.components
    assert 1 in steps.steps
    assert rank.seeds == steps.seeds == (0, 1, 2)
    with pytest.raises(OptionError, match=r"found `paper-tabel1`\. Did you mean `paper-table1`"):
        read_preset("paper-tabel1")
