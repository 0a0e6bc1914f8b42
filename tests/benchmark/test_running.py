"""The harness against plain loops, and what becomes of a run that is cut off."""

from __future__ import annotations

import copy
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ttapca
from benchmark.worlds import IMAGES, lasting, small_subject
from ttapca.benchmark import Cell, Plan, Results, Setting, Subject, Unit, expand, run
from ttapca.benchmark.running import Pace, title
from ttapca.datasets import to_tensor
from ttapca.errors import DataNotFoundError, StorageError

BATCH = 20
SEED = 3
CORRUPTIONS = ("fog", "contrast", "clean")
METHODS = ("source", "tent", "ttapca-relu", "roid")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return small_subject()


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results.sqlite")


def small_plan(**values: object) -> Plan:
    usual = {"corruptions": CORRUPTIONS, "batch_sizes": (BATCH,), "seeds": (SEED,), "lr": 0.05}
    return Plan(**{**usual, **values})  # type: ignore[arg-type]


def plain_loop(subject: Subject, method: str, setting: Setting) -> dict[str, dict[str, object]]:
    """What the harness should find, written out: orders, batches, when to reset, what is wrong."""
    pixels = {name: subject.source.images([(name, 5)]).images for name in CORRUPTIONS[:2]}
    pixels["clean"] = subject.source.clean.images
    labels = subject.source.clean.labels
    random = np.random.default_rng(SEED)
    if setting == "mixed":
        pairs = [(name, place) for name in CORRUPTIONS for place in range(IMAGES)]
        streams = [[pairs[number] for number in random.permutation(len(pairs))]]
    else:
        order = list(random.permutation(IMAGES))
        if setting == "correlated":
            place_of = random.permutation(10)
            order = sorted(order, key=lambda place: place_of[labels[place]])  # sorting is stable
        streams = [[(name, place) for place in order] for name in CORRUPTIONS]

    def fresh() -> ttapca.Adapter:
        return ttapca.adapt(
            copy.deepcopy(subject.network),
            method,  # type: ignore[arg-type]
            filter=subject.fitted if method.startswith("ttapca") else None,
            forgetting="continual",
            lr=0.05,
            **({"seed": SEED} if method == "roid" else {}),
        )

    adapter = fresh()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in CORRUPTIONS}
    for stream in streams:
        if setting in ("online", "correlated"):
            adapter = fresh()
        for start in range(0, len(stream), BATCH):
            if setting == "episodic":
                adapter = fresh()
            batch = stream[start : start + BATCH]
            logits = adapter(to_tensor(np.stack([pixels[name][place] for name, place in batch])))
            for (name, place), row in zip(batch, logits.double(), strict=True):
                chances = torch.exp(row) / torch.exp(row).sum()
                facts = {
                    "wrong": 100.0 * (int(row.argmax()) != labels[place]),
                    "entropy": -float(sum(p * torch.log(p) for p in chances if p > 0)),
                    "batch": start // BATCH,
                }
                for key, value in facts.items():
                    found[name].setdefault(key, []).append(value)
    return {
        name: {
            "error": np.mean(facts["wrong"]),
            "entropy": np.mean(facts["entropy"]),
            "error_stream": by_batch(facts["wrong"], facts["batch"]),
            "entropy_stream": by_batch(facts["entropy"], facts["batch"]),
        }
        for name, facts in found.items()
    }


def by_batch(values: list[float], batches: list[float]) -> list[float]:
    return [
        np.mean([value for value, batch in zip(values, batches, strict=True) if batch == number])
        for number in sorted(set(batches))
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", ["episodic", "online", "continual", "mixed", "correlated"])
def test_the_harness_is_a_plain_loop(
    subject: Subject, results: Results, method: str, setting: Setting
) -> None:
    run(expand(small_plan(methods=(method,), settings=(setting,)), subject), subject, results)
    rows = results.rows()
    assert [row.cell.corruption for row in rows] == list(CORRUPTIONS)
    expected = plain_loop(subject, method, setting)
    for row in rows:
        assert row.outcome.status == "done", row.outcome.reason
        for name, value in expected[row.cell.corruption].items():
            found = getattr(row.outcome, name)
            assert found == pytest.approx(value, rel=1e-6, abs=1e-6), (row.cell.corruption, name)
    assert subject.network.training is False
    assert not subject.network._forward_pre_hooks


def test_the_same_seed_twice_gives_the_same_rows(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((SEED, SEED, SEED + 1)):
        fresh = small_subject()
        plan = small_plan(
            methods=("roid", "ttapca-exp"), settings=("online", "mixed"), seeds=(seed,)
        )
        with Results(tmp_path / f"{number}.sqlite") as results:
            run(expand(plan, fresh), fresh, results)
            found.append(lasting(results))
    assert found[0] == found[1]
    assert (len(found[0][0]), len(found[0][1])) == (12, 6)
    streams = [[row.outcome.error_stream for row in rows] for rows, _ in found]
    assert streams[2] != streams[0]


class Recorder:
    """A reporter that remembers: which tasks began, how many images were done, what was said."""

    def __init__(self) -> None:
        self.images: dict[str, int] = {}
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        assert total is not None
        assert self.images.get(task, 0) <= done <= total
        self.images[task] = done


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
        f"4 measurements to make in 2 runs, {4 * IMAGES} images; 2 runs were finished before"
    ]
    rows, observations = lasting(results)
    assert rows[:2] == before[0]
    assert len(rows) == len({row.cell for row in rows}) == 6
    run(units, subject, results, reporter=last)
    assert last.images == {}
    assert lasting(results) == (rows, observations)


def test_a_failure_is_a_row_and_the_others_go_on(results: Results) -> None:
    broken = small_subject()
    for name, module in list(broken.network.named_children()):
        if isinstance(module, torch.nn.BatchNorm2d):
            setattr(broken.network, name, torch.nn.Identity())
    plan = small_plan(methods=("source", "bn", "ttapca-relu"), settings=("online",))
    units = expand(plan, broken)
    told = Recorder()
    run(units, broken, results, reporter=told)
    statuses = {(row.cell.method, row.outcome.status) for row in results.rows()}
    assert statuses == {("source", "done"), ("bn", "failed"), ("ttapca-relu", "done")}
    failed = [row.outcome for row in results.rows() if row.outcome.status == "failed"]
    assert len(failed) == len(CORRUPTIONS)
    assert failed[0].reason.startswith("AttachError: ")
    assert (failed[0].error, failed[0].error_stream) == (None, ())
    assert sum("FAILED: AttachError" in note for note in told.notes) == len(CORRUPTIONS)
    again = Recorder()
    run(units, broken, results, reporter=again)
    assert again.images == {}
    run(units, broken, results, reporter=again, retry_failed=True)
    assert len(again.images) == len(CORRUPTIONS)
    assert all("  bn  " in task for task in again.images)
    assert len(results.rows()) == len(units)


def test_a_bug_of_a_network_is_a_failure(
    subject: Subject, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(images: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(subject.network, "forward", explode)
    run(expand(small_plan(methods=("source",)), subject)[:1], subject, results)
    assert results.rows()[0].outcome.reason == "ZeroDivisionError: no such luck"


def test_what_a_row_tells(subject: Subject, results: Results) -> None:
    plan = small_plan(methods=("source", "tent", "ttapca-relu"), settings=("online",))
    run(
        expand(plan, subject),
        subject,
        results,
        command=lambda unit: ["again", unit.cells[0].method, "a b"],
    )
    facts = {row.cell.method: row for row in results.rows() if row.cell.corruption == "fog"}
    batches = -(-IMAGES // BATCH)
    assert [facts[name].outcome.updates for name in facts] == [0, batches, batches]
    norms = sum(
        module.weight.numel() + module.bias.numel()
        for module in subject.network.modules()
        if isinstance(module, torch.nn.BatchNorm2d)
    )
    assert [facts[name].outcome.parameters for name in facts] == [0, norms, 10]
    outcome = facts["tent"].outcome
    assert outcome.skipped == 0
    assert outcome.seconds > 0
    assert outcome.peak_memory > 50
    assert outcome.versions["ttapca"] == ttapca.__version__
    assert set(outcome.machine) == {"cpu", "cores", "threads", "system"}
    assert outcome.finished.endswith("+00:00")
    assert outcome.command == "again tent 'a b'"
    assert 0 <= outcome.calibration_error <= 100  # type: ignore[operator]


def test_what_a_filter_did(subject: Subject, results: Results) -> None:
    plan = small_plan(methods=("bn", "ttapca-exp"), settings=("online",), components=(4, 10))
    run(expand(plan, subject), subject, results)
    seen = {(one.cell.corruption, one.cell.components): one for one in results.observations()}
    assert set(seen) == {(name, rank) for name in CORRUPTIONS for rank in (4, 10)}
    one = seen["fog", 10]
    assert one.source_spectrum == pytest.approx(
        (subject.fitted.singular_values_ / np.sqrt(99)).tolist(),
        rel=1e-5,  # type: ignore[union-attr]
    )
    pixels = to_tensor(subject.source.images([("fog", 5)]).images).flatten(1)
    fitted = subject.fitted
    components = fitted.basis.project(pixels.double() - fitted.center_)  # type: ignore[union-attr]
    assert one.test_spectrum == pytest.approx(components.std(0).tolist(), rel=1e-4)
    assert one.test_spectrum[:4] == seen["fog", 4].test_spectrum
    assert len(one.gains) == 10
    assert all(0 < gain < 1 for gain in one.gains)
    assert len(one.before) == len(one.after) == 6
    assert all(png.startswith(b"\x89PNG") for png in (*one.before, *one.after))
    assert one.before[0] != seen["clean", 10].before[0]
    assert one.before != one.after


def test_images_that_cannot_be_had_stop_the_run_before_it_starts(results: Results) -> None:
    subject = small_subject()
    clean = subject.source.clean
    # large enough to need real photographs of frost
    subject.source.clean = dataclasses.replace(clean, images=np.tile(clean.images, (1, 4, 4, 3)))
    plan = small_plan(methods=("source",), corruptions=("fog", "frost"))
    with pytest.raises(DataNotFoundError, match="Frost needs photographs"):
        run(expand(plan, subject), subject, results)
    assert results.rows() == []


def test_a_full_disk_stops_the_run_and_the_next_one_goes_on(
    subject: Subject, results: Results
) -> None:
    units = expand(
        small_plan(methods=("bn",), settings=("online",), seeds=tuple(range(20))), subject
    )
    run(units[:3], subject, results)
    before = lasting(results)
    results._pragma(f"max_page_count = {results._pragma('page_count')}")
    with pytest.raises(StorageError, match="All finished measurements are in the file"):
        run(units, subject, results)  # a page has some room left, but not for all
    rows = lasting(results)[0]
    assert rows[:3] == before[0]
    assert all(row.outcome.status == "done" for row in rows)
    results._pragma("max_page_count = 1000000")
    run(units, subject, results)
    assert {cell for unit in units for cell in unit.cells} == set(results.statuses())


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

def killed(path, event, number):
    child = os.fork()
    if child == 0:
        killer = Killer(event, number)
        with Results(path) as results:
            results._connection.set_trace_callback(killer.statement)
            run(units, subject, results, reporter=killer)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

def content(path):
    count = Killer("never", -1)
    with Results(path) as results:
        kept = len(results.statuses())
        run(units, subject, results, reporter=count)
        return kept, count.units, repr(lasting(results))

_, _, whole = content(folder / "whole.sqlite")
told = []
for event, number in json.loads(sys.argv[2]):
    path = folder / f"{event}-{number}.sqlite"
    death = killed(path, event, number)
    kept, run_again, found = content(path)
    told.append({"signal": death, "kept": kept, "again": run_again, "same": found == whole})
print(json.dumps({"units": len(units), "told": told}))
"""


@pytest.mark.slow
def test_kill_9_at_ten_points_then_the_same_file(tmp_path: Path) -> None:
    # In the middle of cells, between them, and inside of transactions; rows that must be there.
    points = {
        ("start", 1): 0,
        ("batch", 2): 0,
        ("INSERT", 1): 0,
        ("COMMIT", 2): 1,
        ("end", 1): 1,
        ("batch", 5): 2,
        ("INSERT", 4): 1,  # the first picture of what the filter did
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
    facts = json.loads(found.stdout)
    assert facts["units"] == 6
    for (point, rows), told in zip(points.items(), facts["told"], strict=True):
        assert told["signal"] == signal.SIGKILL, point
        assert told["same"], point
        assert told["kept"] == rows, (point, told)
        assert told["again"] == facts["units"] - min(rows, 5), point


def test_the_time_left_knows_that_methods_differ() -> None:
    cell = Cell("m", "w", "d", "g", "fog", 5, "online", "tent", "{}", "", 0, 200, 2, 0.1, 100, 1)
    slow, fast, other = (
        Unit((dataclasses.replace(cell, method=name),)) for name in ("memo", "tent", "bn")
    )
    pace = Pace()
    assert pace.left([fast]) is None
    pace.add("memo", 100, 50.0)
    pace.add("tent", 100, 1.0)
    pace.add("tent", 100, 2.0)
    assert pace.left([slow, slow, fast]) == pytest.approx(101.5)
    assert pace.left([other]) == pytest.approx((50 + 1.5) / 2)
    assert title(fast) == "fog 5  online  tent  steps 2  seed 1"
    both = Unit((cell, dataclasses.replace(cell, corruption="snow")))
    assert title(both) == "2 corruptions 5  online  tent  steps 2  seed 1"
