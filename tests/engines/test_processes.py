"""Tasks in processes of this machine: real ones, which are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmark.worlds import by_cell, lasting
from deadly_work import ALWAYS, ONCE, deadly_subject, raise_at_two, wait_for
from ttapca.benchmark import Plan, Results, Row, expand, run
from ttapca.cli.app import run as command
from ttapca.engines import Engine, Finished, SerialEngine, engine_of
from ttapca.engines.processes import JoblibEngine
from ttapca.errors import OptionError

ROOT = Path(__file__).parents[2]


class Pretended(SerialEngine):
    """Everything as if it were sent, and nothing is."""

    remote = True
    workers = 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", [JoblibEngine(2), Pretended()], ids=["processes", "sent"])
def test_the_same_rows_from_workers_some_of_which_die(engine: Engine, tmp_path: Path) -> None:
    usual = Plan(
        methods=("bn", "wiener"),
        corruptions=("fog", "clean"),
        settings=("online", "continual"),
        batch_sizes=(20,),
    )
    calm, told = deadly_subject(None), list[str]()
    reporter = SimpleNamespace(
        note=told.append,
        advance=lambda task, done, total, facts="": told.append(task) if done == total else None,
    )
    deadly = usual.changed(
        methods=("source",), corruptions=("fog",), settings=("online",), batch_sizes=(ONCE, ALWAYS)
    )
    units = expand(usual, calm) + expand(deadly, calm)
    with Results(tmp_path / "serial.sqlite") as results:
        run(units, calm, results)
        expected = by_cell(results)
    dies = isinstance(engine, JoblibEngine)
    path = tmp_path / "results.sqlite"
    with Results(path) as results:
        subject = deadly_subject(tmp_path if dies else None)
        run(units, subject, results, reporter=reporter, engine=engine)
        found, rows = by_cell(results), results.rows()
    failed = [row for row in rows if row.outcome.status == "failed"]
    if dies:
        assert [row.cell.batch_size for row in failed] == [ALWAYS]
        assert failed[0].outcome.reason == (
            "WorkerDied: its process died twice (SIGKILL(-9)): it was killed, crashed, or needed "
            "more memory than there was"
        )
        again = "a process died (SIGKILL(-9)); its task is tried once more"
        assert told.count(again) == 2
        assert any("  FAILED: WorkerDied" in text for text in told)
    else:
        assert failed == []
    for row in failed:
        del expected[row.cell], found[row.cell]
    assert found == expected
    assert len(rows) == 10
    assert "2 at a time" in told
    assert sorted(each.name for each in tmp_path.glob("results*")) == [
        path.name,
        f"{path.name}-lock",
    ]


@pytest.mark.slow
def test_what_the_work_raises_ends_the_run_and_its_workers() -> None:
    ended = JoblibEngine(1).run([1, 2, 3], raise_at_two)
    first = next(ended)
    assert isinstance(first, Finished)
    process, threads = first.result
    assert threads == torch.get_num_threads() == 1
    assert psutil.pid_exists(process)
    with pytest.raises(FileNotFoundError, match="no such task"):
        next(ended)
    assert not psutil.pid_exists(process)
    assert list(ended) == []


# Two measurements are written; the third is waited for until somebody kills this process.
STOPS = """
import time
from ttapca.benchmark import Results
from ttapca.cli import main
add, added = Results.add, []
def add_two(results, *given):
    if len(added) == 2:
        print("stopped", flush=True)
        time.sleep(3600)
    added.append(given)
    add(results, *given)
Results.add = add_two
main()
"""


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody takes notice: whoever adopts orphans in a container may not."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_kill_9_of_the_parent_and_then_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bench", "digits", "--images", "100", "--batch-sizes", "5", "--settings", "online"]
    words += ["--corruptions", "fog,contrast,clean", "--methods", "source,bn,lame,neo", "--to"]
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPS, *words, "r.sqlite", "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "stopped\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(workers) >= 2
    assert wait_for(lambda: all(has_ended(each) for each in workers))
    assert (tmp_path / "r.sqlite-scratch").exists()

    def rows(path: str) -> list[Row]:
        with Results(path, readonly=True) as results:
            return lasting(results)[0]

    kept = rows("r.sqlite")
    assert len(kept) == 2
    assert command([*words, "r.sqlite", "--jobs", "1"]) == 0
    assert command([*words, "s.sqlite"]) == 0
    assert rows("r.sqlite")[: len(kept)] == kept

    def without_command(path: str) -> list[Row]:  # it names the file
        found = [replace(row, outcome=replace(row.outcome, command="")) for row in rows(path)]
        return sorted(found, key=lambda row: row.cell)

    assert without_command("r.sqlite") == without_command("s.sqlite")


def test_engines_by_name() -> None:
    assert isinstance(engine_of(None), SerialEngine)
    assert engine_of("joblib:3").workers == 3
    for words, address in (
        ("dask://here:8786", "tcp://here:8786"),
        ("dask+tls://[::1]:1", "tls://[::1]:1"),
    ):
        assert engine_of(words).address == address  # type: ignore[attr-defined]
    for words in ("joblib", "joblib:", "joblib:x", "dask://here", "dask:here:1", "ray://h:1"):
        with pytest.raises(OptionError, match="An engine is `joblib:N` or `dask://HOST:PORT`"):
            engine_of(words)
    with pytest.raises(OptionError, match="jobs"):
        engine_of("joblib:0")
