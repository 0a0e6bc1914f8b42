"""`Benchmark`: what the command line does, from Python; and results of an earlier version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ttapca
from benchmark.worlds import DIGITS_PLAN as SMALL
from benchmark.worlds import Recorder, small_subject
from ttapca.benchmark import Benchmark, Plan, Results, session
from ttapca.benchmark.measurement import adapted
from ttapca.datasets import read_digits
from ttapca.errors import (
    LayerOutputError,
    NotEnoughDataError,
    OptionError,
    TtapcaError,
)

OLD = Path(__file__).parent / "results_0_1.sqlite"
PLAN = SMALL.changed(methods=("bn", "ttapca-relu", "tent"), corruptions=("fog", "contrast"))


def test_results_of_version_0_1_are_read_and_not_run_again(tmp_path: Path) -> None:
    path, fresh = tmp_path / "results_0_1.sqlite", tmp_path / "fresh.sqlite"
    shutil.copy(OLD, path)
    with Results(path, readonly=True) as results:
        before, observations = results.rows(), results.observations()
    assert [(row.cell.corruption, row.cell.method) for row in before] == [
        (corruption, method) for corruption in PLAN.corruptions for method in PLAN.methods
    ]
    assert [one.cell.method for one in observations] == ["ttapca-relu"] * 2
    notes = Recorder()
    assert Benchmark(PLAN, reporter=notes).run(path) == before
    assert "0 measurements to make, 0 samples; 6 runs were finished before" in notes.notes
    with Results(path, readonly=True) as results:
        assert (results.rows(), results.observations()) == (before, observations)
    for new, old in zip(Benchmark(PLAN).run(fresh), before, strict=True):
        assert new.cell == old.cell
        # One image of 50 is 2 points: rounding differs from processor to processor.
        assert new.outcome.error == pytest.approx(old.outcome.error, abs=4.1)
        again = old.outcome.command.replace(OLD.name, str(fresh))
        assert sorted(new.outcome.command.split()) == sorted(again.split())


def test_the_filter_is_fitted_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, notes = tmp_path / "r.sqlite", Recorder()
    Benchmark(SMALL, reporter=notes).run(to)
    assert "fitting conv1" in notes.images
    (kept,) = (tmp_path / "r.sqlite-filters").iterdir()
    (row,) = Benchmark(SMALL.changed(components=())).run(to)
    assert row.cell.components == 60  # all there are: four pixels hardly vary
    monkeypatch.setattr("ttapca.fit", None)
    rows = Benchmark(SMALL.changed(seeds=(1,))).run(to)
    rows += Benchmark(SMALL, filter=str(kept)).run(to)
    assert [row.cell.layer for row in rows] == ["conv1", f"conv1, {kept.name}"]
    assert [unit.cells[0] for unit in Benchmark(SMALL, filter=kept).units()] == [rows[1].cell]


def test_other_images_of_the_same_name_are_not_taken_for_those_that_were_measured(
    tmp_path: Path,
) -> None:
    digits, to = read_digits("test"), tmp_path / "r.sqlite"

    def benchmark(folder: str, rows: slice, images: int = 50) -> Benchmark:
        path = tmp_path / folder / "photos.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, images=digits.images[rows], labels=digits.labels[rows])
        return Benchmark(SMALL.changed(data=str(path), images=images))

    before = benchmark("a", slice(100)).run(to)
    assert before == benchmark("a", slice(100)).run(to)
    for folder in ("a", "b"):  # the folder has other images now; another folder has them
        with pytest.raises(OptionError, match=r"same images; .*others called `photos\.npz`.*--to"):
            benchmark(folder, slice(100, 200)).run(to)
    with Results(to, readonly=True) as results:
        assert results.rows() == before
    filters = tmp_path / "r.sqlite-filters"
    assert len(list(filters.iterdir())) == 1
    benchmark("b", slice(100, 200), images=40).run(to)
    assert len(list(filters.iterdir())) == 2


@pytest.mark.parametrize(
    "plan",
    [
        SMALL.changed(components=(900,)),  # more than there are, which the fit finds out
        SMALL.changed(layer="nowhere"),
        SMALL.changed(images=1000),
        SMALL.changed(methods=("bn",), method={"bn": {"alpha": 0.5, "prior": 3}}),
        SMALL.changed(model="nothing"),
        SMALL.changed(corrupted="nowhere"),
    ],
)
def test_a_plan_that_is_refused_leaves_nothing_behind(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(TtapcaError):
        Benchmark(plan).run(tmp_path / "r.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_fit_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    to = tmp_path / "r.sqlite"
    rows = Benchmark(SMALL).run(to)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NotEnoughDataError, match="is at most the rank"):
        Benchmark(SMALL.changed(components=(900,))).run(to)
    assert sorted(tmp_path.rglob("*")) == before
    assert Benchmark(SMALL).run(to) == rows


def test_all_cosines_unless_the_plan_says_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttapca.benchmark.paper.COMPONENTS", 20)
    for route, components, expected in (("dct", (), 64), ("dct", (30,), 30), ("auto", (), 20)):
        plan = SMALL.changed(components=components, route=route)
        (row,) = Benchmark(plan).run(tmp_path / "r.sqlite")
        assert row.cell.components == expected
        assert row.cell.layer == ("conv1" if route == "auto" else "conv1, dct")


def test_methods_of_the_paper_ask_for_principal_components(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttapca.benchmark.paper.COMPONENTS", 20)
    monkeypatch.setattr(
        "ttapca.spectral.basis_choice.SMALL", 32
    )  # so that digits are images like others
    plan = SMALL.changed(components=())
    for methods, components in ((("wiener",), 64), (("wiener", "ttapca-relu"), 20)):
        rows = Benchmark(plan.changed(methods=methods)).run(tmp_path / "r.sqlite")
        assert [(row.cell.components, row.cell.layer) for row in rows] == [
            (components, "conv1") for _ in methods
        ]
        # A rank would ask for principal components.
        assert ("--components 20" in (rows[0].outcome.command or "")) == (components == 20)
    filters = (tmp_path / "r.sqlite-filters").iterdir()
    assert sorted(ttapca.load(each).route for each in filters) == ["dct", "folded"]


def test_a_filter_of_cosines_for_a_method_of_the_paper_is_said_once(tmp_path: Path) -> None:
    notes = Recorder()
    plan = SMALL.changed(route="dct", methods=("ttapca-exp", "ttapca-relu", "wiener"))
    rows = Benchmark(plan, reporter=notes).run(tmp_path / "r.sqlite")
    assert {row.outcome.status for row in rows} == {"done"}
    said = "ttapca-exp and ttapca-relu are made for principal components; this filter has cosines"
    assert [each for each in notes.notes if each.startswith(said)] != []
    assert len([each for each in notes.notes if "made for" in each]) == 1


def test_options_of_a_fit_that_is_not_made(tmp_path: Path) -> None:
    for name, plan in (
        ("layer", SMALL.changed(layer="conv1")),
        ("route", SMALL.changed(route="dct")),
    ):
        with pytest.raises(OptionError, match=f"`{name}=` would have no effect: .*`filter=`"):
            Benchmark(plan, filter=tmp_path).units()
    bare = SMALL.changed(methods=("bn",))
    for name, benchmark in (
        ("layer", Benchmark(bare.changed(layer="conv1"))),
        ("route", Benchmark(bare.changed(route="dct"))),
        ("filter", Benchmark(bare, filter=tmp_path)),
    ):
        with pytest.raises(OptionError, match=f"`{name}=` would have no effect: none of the meth"):
            benchmark.units()
    wrong = SMALL.changed(outputs="binary")
    with pytest.raises(LayerOutputError, match="needs one logit"):
        Benchmark(wrong).units()


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    network = small_subject().network
    plan = SMALL.changed(methods=("source",))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    (row,) = Benchmark(plan, network).run(tmp_path / "r.sqlite")
    assert (row.cell.model, row.outcome.status, row.outcome.command) == ("digits", "done", "")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with pytest.raises(OptionError, match="`ttt` needs the rotation head"):
        Benchmark(plan.changed(methods=("ttt",)), network).units()
    with pytest.raises(OptionError, match="A benchmark needs a network"):
        Benchmark(Plan(data="digits")).units()
    with pytest.raises(NotEnoughDataError, match="has 596 test samples; asked for are 1,000"):
        Benchmark(plan.changed(images=1000)).units()


@pytest.mark.parametrize("method", ["eata", "pea"])
def test_source_images_are_part_of_the_key(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SOURCE_IMAGES", 20)
    data = tmp_path / "images.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (80, 8, 8, 3), dtype=np.uint8)
    np.savez(data, images=pixels, labels=np.arange(80) // 40)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    plan = Plan(data=str(data), methods=(method,), corruptions=("clean",), settings=("online",))
    benchmark = Benchmark(plan, nn.Sequential(*layers).eval())
    (unit,) = benchmark.units()
    assert json.loads(unit.cells[0].options) == {
        "source": "20 of 80 samples, 10 of each class, shuffled with seed 0"
    }
    with adapted(unit.cells[0], benchmark._subject()) as adapter:
        assert adapter(torch.rand(8, 3, 8, 8)).shape == (8, 2)
