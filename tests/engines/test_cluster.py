"""A cluster of dask on this machine: workers that see nothing of this process's files, and die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmark.worlds import by_cell
from deadly_work import (
    ONCE,
    deadly_subject,
    kill_at_one,
    raise_at_two,
    sum_of_artifact,
    wait_for,
)
from ttapca import __version__
from ttapca.benchmark import Plan, Results, expand, run
from ttapca.engines import Finished, Lost
from ttapca.engines.artifacts import Artifact, write_artifact
from ttapca.errors import EngineError

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
from ttapca.engines import cluster as cluster_module
from ttapca.engines.cluster import DaskEngine

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BLIND = """
import dataclasses, pathlib
from ttapca.engines.artifacts import Artifact
def file(artifact, seen=Artifact.file):
    return seen(dataclasses.replace(artifact, folder=pathlib.Path("/nowhere")))
Artifact.file = file
"""
OTHER_VERSION = """
import distributed.versions
def told(names, told=distributed.versions.get_package_info):
    return {name: "0.0.1" if name == "ttapca" else found for name, found in told(names).items()}
distributed.versions.get_package_info = told
"""


@dataclass
class Cluster:
    """A scheduler and workers, each a process with a folder of its own."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        address: str = json.loads((self.folder / "scheduler.json").read_text())["address"]
        return address

    def start(self, kind: str, *words: str) -> subprocess.Popen[bytes]:
        paths = [str(ROOT / "tests"), *sys.path]  # what this process has, each of them has
        settings = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--no-dashboard", *words],
            env=os.environ | {"PYTHONPATH": ":".join(paths)} | settings,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def start_scheduler(self) -> None:
        words = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", "scheduler.json"]
        self.start("scheduler", *words)
        assert wait_for((self.folder / "scheduler.json").exists)

    def start_worker(self, name: str, preload: str) -> subprocess.Popen[bytes]:
        script = self.folder / f"{name}.py"
        script.write_text(preload)
        words = ["--nthreads", "1", "--no-nanny", "--name", name, "--local-directory", name]
        return self.start("worker", self.address, *words, "--preload", str(script))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers; a test that kills one leaves fewer to the next."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start_scheduler()
        for number in range(3):
            made.start_worker(f"worker{number}", BLIND)
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()


def test_the_same_rows_from_workers_one_of_which_dies(cluster: Cluster, tmp_path: Path) -> None:
    plan = Plan(
        methods=("source", "wiener"),
        corruptions=("fog", "clean"),
        settings=("online", "continual"),
        batch_sizes=(20,),
    )
    calm = deadly_subject(None)
    once = plan.changed(
        methods=("source",), corruptions=("fog",), settings=("online",), batch_sizes=(ONCE,)
    )
    units = expand(plan, calm) + expand(once, calm)
    with Results(tmp_path / "serial.sqlite") as results:
        run(units, calm, results)
        expected = by_cell(results)
    with Results(tmp_path / "results.sqlite") as results:
        engine = DaskEngine(cluster.address)
        run(units, deadly_subject(tmp_path), results, engine=engine)
        assert by_cell(results) == expected
    assert (tmp_path / "killed").exists()
    # What workers were sent is gone from their folders, but for the one that is dead.
    assert len({path.parent for path in cluster.folder.glob("worker*/*/*/ttapca/*")}) == 1


def test_what_the_work_raises_ends_the_run(cluster: Cluster) -> None:
    found = list[object]()
    with pytest.raises(FileNotFoundError, match="no such task"):  # no lost connection
        found.extend(DaskEngine(cluster.address).run([1, 2, 3], raise_at_two))
    with closing(DaskEngine(cluster.address).run(range(100), raise_at_two)) as ended:
        assert isinstance(next(ended), Finished)


def test_data_that_workers_do_not_see(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = write_artifact([1, 2], tmp_path, "the numbers")

    def refused(needs: Artifact[list[int]]) -> str:
        ended = DaskEngine(cluster.address).run([1], raise_at_two, needs=[needs])
        with pytest.raises(EngineError) as error:
            next(ended)
        return str(error.value)

    sum_of = partial(sum_of_artifact, artifact)
    run = DaskEngine(cluster.address).run([1], sum_of, needs=[artifact], ready=artifact.open)
    assert next(run).result == 4
    run.close()
    monkeypatch.setattr(cluster_module, "LARGEST_SENT", 1)
    said = refused(artifact)
    assert "cannot do the work: Every worker must see the numbers" in said
    assert f"does not see {tmp_path / artifact.digest}. Put the results into a folder" in said


def test_a_worker_of_another_version_is_refused(cluster: Cluster) -> None:
    other = cluster.start_worker("other", OTHER_VERSION)

    def tried() -> str:
        try:
            for _ in DaskEngine(cluster.address).run([1], raise_at_two):
                pass
        except EngineError as error:
            return str(error)
        return ""

    said = f"All workers must have ttapca {__version__}; the one at"
    assert wait_for(lambda: said in tried())  # it may have come, and not answer yet
    assert "has ttapca 0.0.1. Install the same versions there" in tried()
    other.kill()
    other.wait()
    assert wait_for(lambda: tried() == "")


def test_a_task_that_kills_every_worker(cluster: Cluster) -> None:
    (lost,) = DaskEngine(cluster.address).run([1], kill_at_one)
    assert isinstance(lost, Lost)
    assert lost.reason.startswith("WorkerDied: 2 workers died at it, the last one at tcp://127.")


def test_a_result_that_died_with_its_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()

    def outcomes(status: str, *results: object) -> list[object]:
        future = MagicMock(status=status, **{"result.side_effect": results})
        future.add_done_callback.side_effect = lambda ended: ended(future)
        client = MagicMock(
            status="running", **{"nthreads.return_value": {}, "submit.return_value": future}
        )
        monkeypatch.setattr(cluster_module, "Client", lambda *_, **__: client)
        engine = DaskEngine("tcp://nowhere:1")
        return [ending.result for ending in engine.run([1], raise_at_two, tell=told.append)]

    assert outcomes("pending", TimeoutError, TimeoutError, 7) == [7]
    assert told == ["there are no workers any more; waiting for others"]
    with pytest.raises(TimeoutError, match="of the work"):
        outcomes("error", TimeoutError("of the work"))


def test_a_scheduler_without_workers(cluster: Cluster) -> None:
    _, *workers = cluster.processes
    for worker in workers:
        worker.kill()
        worker.wait()
    engine = DaskEngine(cluster.address, patience=2)

    def refused() -> bool:
        try:
            return engine.workers < 0  # as long as the scheduler has not noticed
        except EngineError as error:
            return "must have workers; none came within 2 s" in str(error)

    assert wait_for(refused)
    assert wait_for(refused)  # again: it is not taken for a cluster of no threads


def test_nobody_is_there() -> None:
    with pytest.raises(EngineError, match=r"dask scheduler at tcp://127\.0\.0\.1:1; none answered"):
        list(DaskEngine("tcp://127.0.0.1:1", patience=0.2).run([1], raise_at_two))
