"""`ttapca bench` as a user meets it."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sqlite3
import sys
from pathlib import Path

import pytest
from rich.console import Console

import ttapca
from ttapca.benchmark import Cell, Outcome, Results, Row, Unit
from ttapca.cli.app import run
from ttapca.cli.bench_view import Pace, RunView, title
from ttapca.networks.runs import WEIGHTS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = "train digits small-cnn --epochs 2 --batch-size 64 --peak 0.1 --rotation-head conv2"
    assert run([*words.split(), "--to", str(folder)]) == 0
    return folder / WEIGHTS


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = "--data digits --images 60 --batch-sizes 30 --corruptions fog,clean --components 10"


def rows_of(path: str) -> list[Row]:
    with Results(path, create=False) as results:
        return results.rows()


def test_from_nothing_to_a_table(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"bench {trained} {SMALL} --methods source,ttapca-exp --to sub/r.sqlite".split()
    assert run(command) == 2
    assert "in a folder that exists; there is no" in capsys.readouterr().err
    Path("sub").mkdir()
    assert run(command) == 0
    told = capsys.readouterr()
    assert "bench: 8 cells to run, 480 images\n" in told.err
    assert "1/8  fog 5  episodic  source  batch 30  error " in told.err
    rows = rows_of("sub/r.sqlite")
    assert [row.outcome.status for row in rows] == ["done"] * 8
    errors = {
        (row.cell.method, row.cell.setting, row.cell.corruption): f"{row.outcome.error:.2f}"
        for row in rows
    }
    [line] = [line for line in told.out.splitlines() if "ttapca-exp" in line]
    assert [word for word in line.split() if word[0].isdigit()] == [
        errors["ttapca-exp", setting, corruption]
        for setting in ("episodic", "online")
        for corruption in ("fog", "clean")
    ]
    assert told.out.endswith("sub/r.sqlite: 8 cells\n")

    def refuse(*words: object, **more: object) -> None:
        raise AssertionError("the filter is kept beside the results")

    monkeypatch.setattr(ttapca, "fit", refuse)
    assert run(command) == 0
    again = capsys.readouterr()
    assert "bench: 0 cells to run, 0 images; 8 units were finished before\n" in again.err
    assert again.out == told.out
    assert rows_of("sub/r.sqlite") == rows


def test_the_command_of_a_row_gives_the_row(trained: Path) -> None:
    words = (
        f"bench {trained} {SMALL} --methods bn,tent --settings online,mixed --seeds 0-1 --lr 0.01 "
        "--option bn.alpha=0.5 --option tent.filter=true --option tent.gain=exponential"
    )
    assert run([*words.split(), "--to", "r.sqlite"]) == 0
    rows = rows_of("r.sqlite")
    assert len(rows) == 16
    row = next(row for row in rows if row.cell.method == "tent" and row.cell.setting == "mixed")
    assert row.cell.components == 10
    again = shlex.split(row.outcome.command)
    assert again[:2] == ["ttapca", "bench"]
    place = again.index("--to")
    assert run([*again[1:place], "--to", "again.sqlite"]) == 0
    for found in rows_of("again.sqlite"):
        [first] = [row for row in rows if row.cell == found.cell]
        assert found.outcome.entropy_stream == first.outcome.entropy_stream
    assert len(rows_of("again.sqlite")) == 2


def test_a_filter_of_ones_own_has_cells_of_its_own(trained: Path) -> None:
    """Two filters of one rank are two things, in one file."""
    words = f"bench {trained} {SMALL} --methods ttapca-exp --settings online --to r.sqlite"
    assert run(words.split()) == 0
    fit = f"fit {trained} --layer conv1 --data digits --components 10"
    assert run([*fit.split(), "--limit", "100", "--to", "few-images"]) == 0
    assert run([*words.split(), "--filter", "few-images"]) == 0
    layers = [row.cell.layer for row in rows_of("r.sqlite")]
    assert sorted(set(layers)) == ["conv1", "conv1, few-images"]
    assert layers.count("conv1") == layers.count("conv1, few-images")


def test_a_plan_and_flags(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.toml").write_text(
        f'model = "{trained}"\ndata = "digits"\nmethods = ["bn", "tent"]\nimages = 40\n'
        'corruptions = ["contrast"]\nsettings = ["online"]\n[method.tent]\nlr = 0.5\n'
    )
    words = ["bench", "--plan", "plan.toml", "--methods", "tent", "--steps", "1,2"]
    assert run([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["steps"], row["lr"]) for row in facts] == [
        ("tent", 1, 0.5),
        ("tent", 2, 0.5),
    ]
    assert facts[0]["model"] == WEIGHTS
    assert facts[0]["status"] == "done"
    assert run(words) == 0
    told = capsys.readouterr().out
    assert "tent, steps 1" in told
    assert "tent, steps 2" in told


def test_a_dry_run_lists_and_leaves_nothing(
    trained: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"bench {trained} --data digits --preset paper-rank --dry-run --to r.sqlite"
    assert run(words.split()) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert len(lines) == 3 * 15 * (1 + 2 * 6)
    assert lines[0] == "gaussian_noise 5  episodic  tent"
    assert told.err == "585 cells, 348,660 images\n"
    assert list(home.iterdir()) == []


def test_methods_that_need_the_source_domain(trained: Path) -> None:
    words = f"bench {trained} {SMALL} --methods eata,ttt --settings online --corruptions fog"
    assert run([*words.split(), "--to", "r.sqlite"]) == 0
    assert [row.outcome.status for row in rows_of("r.sqlite")] == ["done", "done"]


def test_a_failed_cell_is_told_and_exits_with_1(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "my_networks_bench.py").write_text(
        "from torch import nn\n"
        "def flat():\n"
        "    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "    nn.init.zeros_(network[1].weight)\n"
        "    nn.init.zeros_(network[1].bias)\n"
        "    return network\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = f"bench my_networks_bench:flat {SMALL} --methods source,bn --settings online"
    assert run([*words.split(), "--to", "r.sqlite"]) == 1
    told = capsys.readouterr()
    assert "fog 5  online  bn  batch 30  FAILED: AttachError: " in told.err
    assert "r.sqlite: 4 cells, 2 of them failed\n" in told.out
    [line] = [line for line in told.out.splitlines() if "│ bn" in line]
    assert line.count("failed") == 2
    assert run([*words.split(), "--to", "r.sqlite", "--retry-failed"]) == 1
    assert "bench: 2 cells to run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--preset paper-tabel1", 2, "found `paper-tabel1`. Did you mean `paper-table1`"),
        ("--preset paper-table1 --plan x.toml", 2, "Give --plan FILE or --preset NAME"),
        ("--option tent", 2, "--option takes METHOD.NAME=VALUE"),
        ("--option tent.speed=3", 2, "`tent` has no option `speed`"),
        ("--seeds a", 2, "--seeds takes whole numbers, such as 1,3 or 0-2; found `a`"),
        ("--seeds 0-99999999999", 2, "--seeds takes at most 10,000 numbers"),
        ("--settings offline", 2, "must be one of episodic, online"),
        ("--images 1000000 --data digits", 1, "has 596 test images; asked for are 1,000,000"),
        ("--to foreign.sqlite --data digits", 1, "is another database"),
    ],
)
def test_calls_that_make_no_sense(
    trained: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, message: str
) -> None:
    with sqlite3.connect("foreign.sqlite") as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    assert run(["bench", str(trained), *words.split()]) == code
    assert message in capsys.readouterr().err


CELL = Cell("m", "w", "d", "g", "fog", 5, "online", "tent", "{}", "", 0, 200, 2, 0.1, 100, 1)
DONE = Outcome("done", "", 1.0, 1.0, 1.0, (), (), 0, 0, 0, 1.0, 1.0, {}, {}, "", "")


def test_the_view_on_a_terminal() -> None:
    text = io.StringIO()
    unit = Unit((CELL, dataclasses.replace(CELL, corruption="snow")))
    with RunView(Console(file=text, force_terminal=True, width=120)) as view:
        view.waits("process 1")
        view.starts([unit, unit], 3)
        view.unit_starts(unit)
        view.batch(100, 30)
        view.batch(100, 10)
        view._progress.refresh()
        view.unit_ends([Row(CELL, DONE)])
    shown = text.getvalue()
    assert "another run fills the file of results (process 1); waiting" in shown
    assert "4 cells to run in 2 units, 400 images; 3 units were finished before" in shown
    assert "4/5  2 corruptions 5  online  tent  steps 2  seed 1  error 20.0 %" in shown
    assert "200/200" in shown
    assert " left" in shown


def test_the_time_left_knows_that_methods_differ() -> None:
    slow = Unit((dataclasses.replace(CELL, method="memo"),))
    fast, other = Unit((CELL,)), Unit((dataclasses.replace(CELL, method="bn"),))
    pace = Pace()
    assert pace.left([fast]) is None
    pace.add("memo", 100, 50.0)
    pace.add("tent", 100, 1.0)
    pace.add("tent", 100, 2.0)
    assert pace.left([slow, slow, fast]) == pytest.approx(101.5)
    assert pace.left([other]) == pytest.approx((50 + 1.5) / 2)
    assert title(fast) == "fog 5  online  tent  steps 2  seed 1"
