"""`ttapca bench` as a user meets it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from unittest.mock import DEFAULT, MagicMock

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import ttapca
from ttapca.benchmark import Results, Row, measurement
from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import read_digits

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")
SMALL = "--data digits --images 60 --batch-sizes 30 --corruptions fog,clean"
FILTERED = f"{SMALL} --components 10"


def rows_of(path: str) -> list[Row]:
    with Results(path, readonly=True) as results:
        return results.rows()


def half_width(row: Row) -> float:
    """Of the 95 % interval of the error, over images."""
    wrong = [100.0 * (bit == "0") for byte in row.outcome.correct for bit in f"{byte:08b}"]
    wrong = wrong[: row.cell.images]
    low, high = stats.t.interval(0.95, len(wrong) - 1, np.mean(wrong), stats.sem(wrong))
    return float(high - low) / 2


def lines_of(told: str) -> list[list[str]]:
    """Return the method and the errors of each line of a table."""
    lines = [line.split("│")[1:-1] for line in told.splitlines() if line.startswith("│")]
    return [[word.strip() for word in line] for line in lines]


def expected(rows: list[Row], settings: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table of fog by setting, with clean images in brackets."""
    found = {(row.cell.method, row.cell.setting, row.cell.corruption): row for row in rows}
    lines = []
    for method in dict.fromkeys(row.cell.method for row in rows):
        line = [method]
        for setting in settings:
            fog, clean = (found[method, setting, name] for name in ("fog", "clean"))
            error, half = fog.outcome.error, half_width(fog)
            line.append(f"{error:.1f} ±{half:.1f} ({clean.outcome.error:.1f})")
        lines.append(line)
    return lines


def test_from_nothing_to_a_table(digits: Path, monkeypatch: pytest.MonkeyPatch, command) -> None:
    words = f"bench {digits} {FILTERED} --methods source,ttapca-exp --to sub/r.sqlite"
    assert "in a folder that exists; there is no" in command(words, 2).err
    Path("sub").mkdir()
    told = command(words)
    assert "bench: 8 measurements to make, 480 samples\n" in told.err
    assert "1/8  fog 5  episodic  source  batch 30  error " in told.err
    rows = rows_of("sub/r.sqlite")
    assert [row.outcome.status for row in rows] == ["done"] * 8
    assert lines_of(told.out) == expected(rows, ("episodic", "online"))
    assert told.out.endswith("sub/r.sqlite: 8 measurements\n")

    kept = AssertionError("the filter is kept beside the results")
    monkeypatch.setattr(ttapca, "fit", MagicMock(side_effect=kept))
    again = command(words)
    assert "bench: 0 measurements to make, 0 samples; 8 runs were finished before\n" in again.err
    assert again.out == told.out
    assert rows_of("sub/r.sqlite") == rows


def test_settings_are_shown_beside_one_another(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    settings = ("episodic", "correlated", "dirichlet-0.1", "changing")
    words = f"bench digits {SMALL} --methods source,bn --settings {','.join(settings[::-1])}"
    told = command(f"{words} --to r.sqlite").out
    assert lines_of(told) == expected(rows_of("r.sqlite"), settings)


def test_ctrl_c_and_then_the_same_command(monkeypatch: pytest.MonkeyPatch, command) -> None:
    words = f"bench digits {SMALL} --methods source,bn --settings online --to r.sqlite"
    measure = MagicMock(wraps=measurement.measure)
    monkeypatch.setattr(measurement, "measure", measure)
    measure.side_effect = [DEFAULT, DEFAULT, KeyboardInterrupt, DEFAULT, DEFAULT]
    told = command(words, 130).err
    assert "bench: stopped; the same command goes on after the last finished measurement\n" in told
    assert told.endswith("interrupted\n")
    assert len(rows_of("r.sqlite")) == 2
    assert "bench: 2 measurements to make" in command(words).err
    assert (measure.call_count, len(rows_of("r.sqlite"))) == (5, 4)


def test_the_command_of_a_row_gives_the_row(command) -> None:
    command(
        f"bench digits {FILTERED} --methods bn,tent --settings online,mixed --seeds 0-1 --lr 0.01 "
        "--option bn.alpha=0.5 --option tent.filter=true --option tent.gain=exponential "
        "--to r.sqlite"
    )
    rows = rows_of("r.sqlite")
    assert len(rows) == 16
    row = next(row for row in rows if row.cell.method == "tent" and row.cell.setting == "mixed")
    assert row.cell.components == 10
    again = shlex.split(row.outcome.command)
    assert again[:2] == ["ttapca", "bench"]
    command(shlex.join([*again[1 : again.index("--to")], "--to", "again.sqlite"]))
    for found in rows_of("again.sqlite"):
        [first] = [row for row in rows if row.cell == found.cell]
        assert found.outcome.entropy_stream == first.outcome.entropy_stream
    assert len(rows_of("again.sqlite")) == 2


def test_a_filter_of_ones_own_has_a_key_of_its_own(command) -> None:
    """Two filters of one rank are two things, in one file."""
    words = f"bench digits {FILTERED} --methods ttapca-exp --settings online --to r.sqlite"
    command(words)
    command("fit digits --layer conv1 --data digits --components 10 --limit 100 --to few-images")
    command(f"{words} --filter few-images")
    layers = [row.cell.layer for row in rows_of("r.sqlite")]
    assert layers == ["conv1", "conv1", "conv1, few-images", "conv1, few-images"]


def test_the_route_of_the_filter_is_part_of_its_key(command) -> None:
    words = f"bench digits {FILTERED} --methods source,ttapca-exp --settings online --to r.sqlite"
    command(words)
    command(f"{words} --route dct")
    rows = rows_of("r.sqlite")
    found = [row.cell.layer for row in rows if row.cell.method == "ttapca-exp"]
    assert found == ["conv1", "conv1", "conv1, dct", "conv1, dct"]
    assert len(rows) == 6  # a method without a filter is the same for every route
    filters = {ttapca.load(path).route for path in Path("r.sqlite-filters").iterdir()}
    assert filters == {"folded", "dct"}
    assert "--layer conv1 --route dct" in rows[-1].outcome.command
    commands = [row.outcome.command for row in rows if row.cell.method == "source"]
    assert not any("--route" in each for each in commands)
    listed = command(f"{words} --route dct --dry-run").out.splitlines()
    assert len(listed) == 4


def test_what_the_outputs_mean(place: Path, pictures, command) -> None:
    pictures(place / "images")
    words = (
        "bench own:one --data images --methods source,wiener,lame --corruptions clean --settings "
        "online --batch-sizes 20 --components 5 --to r.sqlite"
    )
    command(words)
    command(f"{words} --outputs binary")
    rows = rows_of("r.sqlite")
    assert [row.outcome.status for row in rows] == ["done"] * 6
    assert [row.cell.options for row in rows] == ["{}"] * 3 + ['{"outputs": "binary"}'] * 3
    assert "--outputs binary" in rows[-1].outcome.command
    filters = [ttapca.load(path) for path in sorted(Path("r.sqlite-filters").iterdir())]
    assert [each.classes_ is None for each in filters] == [True, False]
    labels = words.replace("own:one", "own:classes").replace("r.sqlite", "l.sqlite")
    told = command(f"{labels} --outputs multilabel", 1).err
    assert "lame  batch 20  FAILED: OptionError: `LAME` serves outputs of the kind" in told
    found = [row.outcome.status for row in rows_of("l.sqlite")]
    assert found == ["done", "done", "failed"]


def test_a_plan_and_options(digits: Path, command) -> None:
    Path("plan.toml").write_text(
        f'model = "{digits}"\ndata = "digits"\nmethods = ["bn", "tent"]\nimages = 40\n'
        'corruptions = ["contrast"]\nsettings = ["online"]\n[method.tent]\nlr = 0.5\n'
    )
    words = "bench --plan plan.toml --methods tent --steps 1,2"
    facts = json.loads(command(f"{words} --json").out)
    found = [(row["method"], row["steps"], row["lr"]) for row in facts]
    assert found == [("tent", 1, 0.5), ("tent", 2, 0.5)]
    assert (facts[0]["model"], facts[0]["status"]) == (digits.name, "done")
    told = command(words).out
    assert "tent, 1 step " in told
    assert "tent, 2 steps " in told


def test_a_dry_run_lists_and_leaves_nothing(place: Path, command) -> None:
    before = sorted(place.iterdir())
    told = command("bench digits --data digits --preset paper-rank --dry-run --to r.sqlite")
    lines = told.out.splitlines()
    assert len(lines) == 3 * 15 * (1 + 2 * 6)
    assert lines[0] == "gaussian_noise 5  episodic  tent"
    assert told.err == "585 measurements, 348,660 samples\n"
    words = "bench digits --methods wiener --corruptions fog --settings online --dry-run"
    told = command(words)  # a rank that only the fit knows is not named
    assert (told.out, told.err) == ("fog 5  online  wiener\n", "1 measurement, 596 samples\n")
    assert command(f"{words} --components 20").out == "fog 5  online  wiener  rank 20\n"
    assert sorted(place.iterdir()) == before


def test_a_mistyped_network_is_told_before_images_are_looked_for(command) -> None:
    expected = command("eval digitss --data digits", 2).err
    assert "`digitss` is neither a packaged network nor a file. Did you mean" in expected
    for words in ("bench digitss --methods source", "tune digitss bn --option prior=0,16"):
        assert command(words, 2).err == expected


def test_a_plan_that_names_no_data_takes_the_only_data_that_fit(command) -> None:
    plan = 'model = "digits"\nmethods = ["source"]\ncorruptions = ["fog"]\nsettings = ["online"]\n'
    Path("plan.toml").write_text(plan)
    assert command("bench --plan plan.toml --dry-run").err == "1 measurement, 596 samples\n"
    Path("plan.toml").write_text(f'data = "cifar10"\n{plan}')
    assert "cifar10" in command("bench --plan plan.toml --dry-run", 2).err


def test_clean_images_among_corruptions_have_an_error_for_each_severity(command) -> None:
    words = (
        "bench digits --images 200 --batch-sizes 50 --corruptions fog,clean --methods bn "
        "--settings mixed,continual,changing --to"
    )
    command(f"{words} both.sqlite --severities 1,5")
    both = {row.cell: row.outcome.error for row in rows_of("both.sqlite")}
    assert len(both) == 2 * 2 * 3
    for severity in (5, 1):
        command(f"{words} one.sqlite --severities {severity}")
    single = {row.cell: row.outcome.error for row in rows_of("one.sqlite")}
    assert single == both
    told = command(f"{words} both.sqlite --severities 1,5").out
    rows = rows_of("both.sqlite")
    settings = ("continual", "changing", "mixed")
    own = {  # clean images have a severity only by the corruptions among which they are
        severity: [row for row in rows if row.cell.corrupted.endswith("at 1") == (severity == 1)]
        for severity in (1, 5)
    }
    assert lines_of(told) == [line for found in own.values() for line in expected(found, settings)]


def test_methods_that_need_the_source_domain(command) -> None:
    words = f"{SMALL} --methods eata,pea,ttt --settings online --corruptions fog --to r.sqlite"
    command(f"bench digits-small-cnn-rotation {words}")
    assert [row.outcome.status for row in rows_of("r.sqlite")] == ["done"] * 3


def test_a_failure_is_told_and_exits_with_1(command) -> None:
    words = f"bench own:plain {SMALL} --methods source,bn --settings online --to r.sqlite"
    told = command(words, 1)
    assert "fog 5  online  bn  batch 30  FAILED: AttachError: " in told.err
    assert "r.sqlite: 4 measurements, 2 of them failed\n" in told.out
    assert lines_of(told.out)[1] == ["bn", "—"]
    again = command(words, 1).err
    assert "0 samples; 4 runs were finished before, 2 of them failed\n" in again
    assert again.endswith("bench: 2 measurements failed; --retry-failed repeats what failed\n")
    repeated = command(f"{words} --retry-failed", 1).err
    assert "bench: 2 measurements to make" in repeated
    assert "--retry-failed" not in repeated


def test_some_images_of_each_class(place: Path, pictures, command) -> None:
    pictures(place / "images")
    words = (
        "bench own:mean --data images --methods source --corruptions clean --settings online "
        "--batch-sizes 20 --to r.sqlite"
    )
    told = command(f"{words} --images 20").err
    assert "bench: 20 of 80 samples, 10 of each class of `images`" in told
    command(words)
    some, every = rows_of("r.sqlite")
    assert some.cell.data == "images, 10 of each class"
    assert some.outcome.error == 100  # of both classes: of one it would be 50
    assert every.cell.data == "images"  # all images are what they ever were


def test_corrupted_images_of_some_of_each_class(place: Path, pictures, command) -> None:
    """`corrupt` and `bench` choose the same images."""
    for path in pictures(place / "images").rglob("*.png"):
        Image.open(path).resize((32, 32)).save(path)
    errors = []
    for limit, to in (("--limit 20", "some"), ("", "all")):
        command(f"corrupt images --to {to} --corruptions fog --severities 5 --jobs 1 {limit}")
        said = command(
            "bench own:mean --data images --methods source --corruptions fog --settings online "
            f"--images 20 --corrupted {to} --to {to}.sqlite --json"
        )
        errors.append(json.loads(said.out)[0]["calibration_error"])
    assert np.bincount(np.load("some/labels.npy")).tolist() == [10, 10]
    assert errors[0] == pytest.approx(errors[1], abs=3)  # other noise on the same pictures


def test_each_batch_size_and_severity_has_a_table(weights: Path, command) -> None:
    words = (
        f"bench own:flat --weights {weights} --data digits --methods source,bn --corruptions "
        "fog,clean --settings online --images 50 --to r.sqlite"
    )
    told = command(f"{words} --batch-sizes 10,50").out
    rows = rows_of("r.sqlite")
    for size, lines in ((10, lines_of(told)[:2]), (50, lines_of(told)[2:])):
        own = [row for row in rows if row.cell.batch_size == size]
        assert lines == expected(own, ("online",))
    told = " ".join(command(f"{words} --severities 1,5").out.split())
    for severity in (1, 5):
        assert f"severity {severity}, by setting, batches of 200, 50 samples" in told


def test_a_plan_may_say_more_than_the_methods_that_are_left_of_it_take(command) -> None:
    Path("plan.toml").write_text(
        'model = "digits"\nmethods = ["source", "tent", "wiener"]\ncomponents = [20]\n'
        'steps = [2]\nlr = 0.01\ncorruptions = ["fog"]\nsettings = ["online"]\n'
        'corrupted = "folder"\ncorruption_seed = 5\n'
    )
    words = "bench --plan plan.toml --dry-run --methods"
    assert command(f"{words} source").out == "fog 5  online  source\n"
    assert command(f"{words} source,tent --lr 0.1").err == "2 measurements, 1,192 samples\n"
    assert "--components would have no effect" in command(f"{words} source --components 9", 2).err


def test_the_command_of_a_row_is_not_refused_for_what_its_plan_said_too_much(command) -> None:
    digits = read_digits()
    Path("folder").mkdir()
    np.save("folder/fog.npy", np.tile(corrupt_any_size(digits.images, "fog", 5), (5, 1, 1, 1)))
    np.save("folder/labels.npy", np.tile(digits.labels, 5))
    Path("plan.toml").write_text(
        'model = "digits"\nmethods = ["bn"]\ncorruptions = ["fog"]\nsettings = ["online"]\n'
        'corrupted = "folder"\ncorruption_seed = 5\n'
    )
    [row] = json.loads(command("bench --plan plan.toml --json").out)
    again = row["command"].removeprefix("ttapca ").replace("results.sqlite", "again.sqlite")
    [repeated] = json.loads(command(f"{again} --json").out)
    assert repeated["entropy_stream"] == row["entropy_stream"]
