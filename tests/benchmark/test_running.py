"""The harness against plain loops, and what becomes of a run that is cut off."""

from __future__ import annotations

import copy
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ttapca
from benchmark.worlds import IMAGES, Recorder, lasting, plain_streams, small_subject
from ttapca.benchmark import Cell, Plan, Results, Setting, Subject, Unit, expand, run
from ttapca.benchmark.rows import SETTINGS
from ttapca.benchmark.running import interleaved, seconds_left
from ttapca.benchmark.subject import Condition
from ttapca.datasets import to_tensor
from ttapca.errors import DataNotFoundError

BATCH = 20
SEED = 3
CHANGE_EVERY = 15
CORRUPTIONS = ("fog", "contrast", "clean")
METHODS = ("source", "tent", "ttapca-relu", "roid")

Expected = dict[Condition, dict[str, object]]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return small_subject()


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results.sqlite")


def small_plan(**values: object) -> Plan:
    usual = {"corruptions": CORRUPTIONS, "batch_sizes": (BATCH,), "seeds": (SEED,), "lr": 0.05}
    return Plan(**{**usual, **values})  # type: ignore[arg-type]


def conditions_of(setting: Setting) -> list[Condition]:
    """Corruptions and severities, in the order of the rows."""
    if setting == "gradual":
        return [(name, at) for name in CORRUPTIONS if name != "clean" for at in range(1, 6)]
    return [(name, 0 if name == "clean" else 5) for name in CORRUPTIONS]


def plain_loop(
    subject: Subject, method: str, setting: Setting, batch_size: int = BATCH
) -> Expected:
    """What the harness should find, written out: orders, batches, when to reset, what is wrong."""
    conditions = conditions_of(setting)
    pixels = {each: subject.source.images([each]).images for each in conditions}
    labels = subject.source.clean.labels
    orders = plain_streams(setting, labels.tolist(), len(conditions), SEED, CHANGE_EVERY)
    streams = [[(conditions[number], place) for number, place in order] for order in orders]
    options = {
        "source": {},
        "tent": {"lr": 0.05},
        "ttapca-relu": {"lr": 0.05, "filter": subject.fitted},
        "roid": {"lr": 0.05, "seed": SEED},
        "bn": {},
        "wiener": {"filter": subject.fitted},
    }[method]

    def fresh() -> ttapca.Adapter:
        network = copy.deepcopy(subject.network)
        return ttapca.adapt(network, method, forgetting="continual", **options)  # type: ignore[arg-type]

    adapter = fresh()
    found: dict[Condition, list[tuple[int, int, float, float]]] = {each: [] for each in conditions}
    for stream in streams:
        if setting in ("online", "correlated", "dirichlet-0.1", "dirichlet-1"):
            adapter = fresh()
        for start in range(0, len(stream), batch_size):
            if setting in ("episodic", "episodic-sorted"):
                adapter = fresh()
            batch = stream[start : start + batch_size]
            logits = adapter(to_tensor(np.stack([pixels[name][place] for name, place in batch])))
            for (name, place), row in zip(batch, logits.double(), strict=True):
                chances = torch.exp(row) / torch.exp(row).sum()
                entropy = -float(sum(p * torch.log(p) for p in chances if p > 0))
                wrong = 100.0 * (int(row.argmax()) != labels[place])
                found[name].append((start // batch_size, place, wrong, entropy))
    expected = {}
    for name, facts in found.items():
        batches, places, *columns = np.array(facts).T
        means = [column.mean() for column in columns]
        parts = [[column[batches == at].mean() for at in np.unique(batches)] for column in columns]
        names = ("error", "entropy", "error_stream", "entropy_stream")
        expected[name] = dict(zip(names, [*means, *parts], strict=True))
        wrong = columns[0][np.argsort(places)]  # in the order of the images
        bits = "".join("0" if each else "1" for each in wrong).ljust(-(-len(wrong) // 8) * 8, "0")
        expected[name]["correct"] = int(bits, 2).to_bytes(len(bits) // 8)
    return expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each != "real-time"])
def test_the_harness_is_a_plain_loop(
    subject: Subject,
    results: Results,
    method: str,
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two rounds and a half, and batches that hold the end of one corruption and the next.
    monkeypatch.setattr("ttapca.benchmark.streams.CHANGE_EVERY", CHANGE_EVERY)
    run(expand(small_plan(methods=(method,), settings=(setting,)), subject), subject, results)
    compare(subject, results, plain_loop(subject, method, setting))


def test_a_stream_in_real_time_says_how_many_batches_were_in_time(
    subject: Subject, results: Results
) -> None:
    plan = small_plan(methods=("source", "tent"), settings=("real-time",), corruptions=("fog",))
    run(expand(plan, subject), subject, results)
    for row in results.rows():
        assert row.outcome.status == "done"
        assert re.fullmatch(r"\d+ % of the batches were adapted to", row.outcome.reason)


@pytest.mark.parametrize("method", ["source", "bn", "wiener"])
@pytest.mark.parametrize("setting", ["correlated", "episodic-sorted"])
def test_single_images_in_order(
    subject: Subject, results: Results, method: str, setting: Setting
) -> None:
    plan = small_plan(methods=(method,), settings=(setting,), batch_sizes=(1,))
    run(expand(plan, subject), subject, results)
    compare(subject, results, plain_loop(subject, method, setting, batch_size=1))
    assert {len(row.outcome.error_stream) for row in results.rows()} == {IMAGES}


def compare(subject: Subject, results: Results, expected: Expected) -> None:
    rows = results.rows()
    assert [(row.cell.corruption, row.cell.severity) for row in rows] == list(expected)
    for row in rows:
        assert row.outcome.status == "done", row.outcome.reason
        for name, value in expected[row.cell.corruption, row.cell.severity].items():
            found = getattr(row.outcome, name)
            if name != "correct":  # bits are exactly the same
                value = pytest.approx(value, rel=1e-6, abs=1e-6)
            assert found == value, (row.cell.corruption, name)
    assert subject.network.training is False
    assert not subject.network._forward_pre_hooks


def test_what_is_finished_is_never_run_twice(subject: Subject, results: Results) -> None:
    units = expand(small_plan(methods=("bn",), settings=("online", "continual")), subject)
    first, second, last = Recorder(), Recorder(), Recorder()
    run(units[:2], subject, results, reporter=first)
    assert first.images == {
        f"1/2  fog 5  online  bn  batch {BATCH}  seed {SEED}": IMAGES,
        f"2/2  contrast 5  online  bn  batch {BATCH}  seed {SEED}": IMAGES,
    }
    before = lasting(results)
    run(units, subject, results, reporter=second)
    assert [task.split("/")[0] for task in second.images] == ["3", "4"]
    assert sum(second.images.values()) == sum(unit.images for unit in units[2:])
    assert second.notes == [
        f"4 measurements to make in 2 runs, {4 * IMAGES} samples; 2 runs were finished before"
    ]
    rows, observations = lasting(results)
    assert rows[:2] == before[0]
    assert len(rows) == len({row.cell for row in rows}) == 6
    run(units, subject, results, reporter=last)
    assert last.images == {}
    assert lasting(results) == (rows, observations)


def test_a_failure_is_a_row_and_the_others_go_on(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = small_subject()
    for name, module in list(broken.network.named_children()):
        if isinstance(module, torch.nn.BatchNorm2d):
            setattr(broken.network, name, torch.nn.Identity())
    plan = small_plan(methods=("source", "bn", "ttapca-relu"), settings=("online",))
    units, count = expand(plan, broken), len(CORRUPTIONS)
    told, again = Recorder(), Recorder()
    run(units, broken, results, reporter=told)
    statuses = {(row.cell.method, row.outcome.status) for row in results.rows()}
    assert statuses == {("source", "done"), ("bn", "failed"), ("ttapca-relu", "done")}
    failed = [row.outcome for row in results.rows() if row.outcome.status == "failed"]
    assert len(failed) == sum("FAILED: AttachError" in note for note in told.notes) == count
    assert failed[0].reason.startswith("AttachError: ")
    assert (failed[0].error, failed[0].error_stream, failed[0].correct) == (None, (), b"")
    run(units, broken, results, reporter=again)
    assert again.images == {}
    monkeypatch.setattr(broken.network, "forward", lambda images: 1 // 0)  # a bug of a network
    run(units, broken, results, reporter=again, retry_failed=True)
    assert len(again.images) == count
    assert all("  bn  " in task for task in again.images)
    run(expand(small_plan(methods=("source",), seeds=(9,)), broken)[:1], broken, results)
    assert results.rows()[-1].outcome.reason.startswith("ZeroDivisionError: ")
    assert len(results.rows()) == len(units) + 1


def test_what_a_row_tells(subject: Subject, results: Results) -> None:
    plan = small_plan(methods=("source", "tent", "ttapca-relu"), settings=("online",))
    words = ["again", "a b"]
    run(expand(plan, subject), subject, results, command=lambda unit: words)
    facts = [row.outcome for row in results.rows() if row.cell.corruption == "fog"]
    batches = -(-IMAGES // BATCH)
    assert [outcome.updates for outcome in facts] == [0, batches, batches]
    norms = sum(
        module.weight.numel() + module.bias.numel()
        for module in subject.network.modules()
        if isinstance(module, torch.nn.BatchNorm2d)
    )
    assert [outcome.parameters for outcome in facts] == [0, norms, 10]
    outcome = facts[1]
    assert outcome.skipped == 0
    assert outcome.seconds > 0
    assert outcome.peak_memory > 50
    assert outcome.versions["ttapca"] == ttapca.__version__
    assert set(outcome.machine) == {"cpu", "cores", "threads", "system"}
    assert outcome.finished.endswith("+00:00")
    assert outcome.command == "again 'a b'"
    assert 0 <= outcome.calibration_error <= 100  # type: ignore[operator]


def test_what_a_filter_did(subject: Subject, results: Results) -> None:
    plan = small_plan(methods=("bn", "ttapca-exp"), settings=("online",), components=(4, 10))
    run(expand(plan, subject), subject, results)
    seen = {(one.cell.corruption, one.cell.components): one for one in results.observations()}
    assert set(seen) == {(name, rank) for name in CORRUPTIONS for rank in (4, 10)}
    one, fitted = seen["fog", 10], subject.filter(10)
    source = (fitted.singular_values_ / np.sqrt(99)).tolist()
    assert one.source_spectrum == pytest.approx(source, rel=1e-5)
    pixels = to_tensor(subject.source.images([("fog", 5)]).images).flatten(1)
    components = fitted.basis.project(pixels.double() - fitted.center_)
    assert one.test_spectrum == pytest.approx(components.std(0).tolist(), rel=1e-4)
    assert one.test_spectrum[:4] == seen["fog", 4].test_spectrum
    assert len(one.gains) == 10
    assert all(0 < gain < 1 for gain in one.gains)
    assert len(one.before) == len(one.after) == 6
    assert all(png.startswith(b"\x89PNG") for png in (*one.before, *one.after))
    assert one.before[0] != seen["clean", 10].before[0]
    assert one.before != one.after


def test_gains_are_shown_with_the_corruption_that_they_are_for(
    subject: Subject, results: Results
) -> None:
    plan = small_plan(methods=("wiener",), settings=("continual", "changing", "mixed"))
    run(expand(plan, subject), subject, results)
    seen = [(one.cell.setting, one.cell.corruption) for one in results.observations()]
    both = [(setting, name) for setting in ("continual", "mixed") for name in CORRUPTIONS]
    assert sorted(seen) == sorted([*both, ("changing", CORRUPTIONS[-1])])


def test_images_that_cannot_be_had_stop_the_run_before_it_starts(results: Results) -> None:
    subject = small_subject()
    clean = subject.source.clean
    # too large for the photographs of frost that ship
    subject.source.clean = replace(clean, images=np.tile(clean.images, (1, 8, 8, 3)))
    plan = small_plan(methods=("source",), corruptions=("fog", "frost"))
    with pytest.raises(DataNotFoundError, match="Frost needs a folder of photographs"):
        run(expand(plan, subject), subject, results)
    assert results.rows() == []


KILLS = """
import json, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from benchmark.worlds import lasting, small_subject
from ttapca.benchmark import Plan, Results, expand, run

folder = Path(sys.argv[1])
subject = small_subject()
plan = Plan(methods=("bn", "ttapca-relu"), corruptions=("fog", "clean"),
            settings=("online", "continual"), batch_sizes=(20,))
units = expand(plan, subject)

class Killer:
    def __init__(self, event, number):
        self.event, self.left, self.units = event, number, 0
    def happened(self, event):
        self.left -= event == self.event
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def note(self, text):
        pass
    def advance(self, task, done, total, facts=""):
        self.units += done == 0
        self.happened("start" if done == 0 else "end" if done == total else "batch")
    def statement(self, sql):
        self.happened(sql.split()[0])

def killed(path, killer):
    child = os.fork()
    if child == 0:
        with Results(path) as results:
            results._connection.set_trace_callback(killer.statement)
            run(units, subject, results, reporter=killer)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def resumed(path):
    count = Killer("never", -1)
    with Results(path) as results:
        kept = len(results.statuses())
        run(units, subject, results, reporter=count)
        return kept, count.units, repr(lasting(results))

_, _, whole = resumed(folder / "whole.sqlite")
told = []
for event, number in json.loads(sys.argv[2]):
    path = folder / f"{event}-{number}.sqlite"
    code = killed(path, Killer(event, number))
    kept, again, found = resumed(path)
    told.append([code, kept, again, found == whole])
print(json.dumps(told))
"""


@pytest.mark.slow
def test_kill_9_at_ten_points_then_the_same_file(tmp_path: Path) -> None:
    # Within units, between them, and inside of transactions; and the rows that must be there.
    points = {
        ("start", 1): 0,
        ("batch", 2): 0,
        ("INSERT", 2): 0,  # which images were right, after the first row
        ("COMMIT", 2): 1,
        ("end", 1): 1,
        ("batch", 5): 2,
        ("INSERT", 6): 1,  # the first picture of what the filter did
        ("end", 4): 4,
        ("batch", 9): 4,
        ("COMMIT", 6): 6,  # the last unit; two rows came with the one before it
    }
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path), json.dumps(list(points))],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(["tests", *sys.path]), "PATH": "", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert found.returncode == 0, found.stderr
    expected = [[-signal.SIGKILL, rows, 6 - min(rows, 5), True] for rows in points.values()]
    assert json.loads(found.stdout) == expected


def test_the_time_left_knows_that_methods_differ() -> None:
    cell = Cell("m", "w", "d", "g", "fog", 5, "online", "tent", "{}", "", 0, 200, 2, 0.1, 100, 1)
    names = ("memo", "tent", "bn")
    slow, fast, other = (Unit((replace(cell, method=name),)) for name in names)
    spent = ({"memo": 50.0, "tent": 3.0}, {"memo": 100, "tent": 200})
    assert seconds_left([slow, slow, fast], *spent) == pytest.approx(101.5)
    assert seconds_left([other], *spent) == pytest.approx((50 + 1.5) / 2)
    assert fast.title == "fog 5  online  tent  steps 2  seed 1"
    both = Unit((cell, replace(cell, corruption="snow")))
    assert both.title == "2 corruptions 5  online  tent  steps 2  seed 1"


def test_workers_begin_with_different_images(subject: Subject) -> None:
    plan = small_plan(methods=("source", "bn"), settings=("online",))
    cells = [unit.cells[0] for unit in interleaved(expand(plan, subject), workers=2)]
    assert [(cell.corruption, cell.method) for cell in cells] == [
        *((name, method) for method in plan.methods for name in CORRUPTIONS[:2]),
        *((CORRUPTIONS[2], method) for method in plan.methods),
    ]
