"""Kill workers at random moments during `ttapca bench`, and compare the rows with a serial run.

    python scripts/kill_workers.py --engine dask --kills 10 --restart
    python scripts/kill_workers.py --engine joblib --kills 10

With `dask`, a scheduler and four workers are started on this machine, each a process with a folder
of its own, as on four machines; `--restart` also kills the scheduler once and starts everything
again, and `--pause 20` stops it for so many seconds, as a cut cable does. With `joblib`, a cell
that is hit twice is recorded as failed; the same command with `--retry-failed` then completes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ttapca.benchmark import Results, Row
from ttapca.errors import DataFormatError, DataNotFoundError

WORKERS = 4
PLAN = [
    "bench", "digits", "--settings", "online", "--batch-sizes", "20",
    "--methods", "source,bn,wiener,tent,ttapca-exp,eata",
]  # fmt: skip
# What a second run cannot repeat, and the name of the file.
PASSING = {"seconds": 0.0, "peak_memory": 0.0, "finished": "", "command": ""}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
Process = subprocess.Popen[bytes]


class Cluster:
    """A scheduler and workers on this machine; a worker that is killed is started again by dask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.start()
        while self.scheduler.poll() is None and not self._answers():
            time.sleep(0.2)

    def start(self) -> None:
        """Start everything, at the same address as before."""
        host, port = self.address.split(":")
        self.scheduler = self._dask("scheduler", "--host", host, "--port", port)
        self.nannies = [
            self._dask(
                "worker", f"tcp://{self.address}", "--nthreads", "1",
                "--local-directory", str(self.folder / f"worker-{number}"),
            )
            for number in range(WORKERS)
        ]  # fmt: skip

    def workers(self) -> list[psutil.Process]:
        """The processes that do the work, which are children of those that watch them."""
        nannies = [psutil.Process(each.pid) for each in self.nannies if each.poll() is None]
        return [
            child
            for nanny in nannies
            for child in nanny.children()
            if "spawn_main" in _words(child)
        ]

    def end(self) -> None:
        """Kill everything."""
        for process in (self.scheduler, *self.nannies):
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        host, port = self.address.split(":")
        with socket.socket() as asking:
            return asking.connect_ex((host, int(port))) == 0

    def _dask(self, kind: str, *words: str) -> Process:
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--no-dashboard", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def bench(to: Path, *words: str) -> Process:
    command = [sys.executable, "-m", "ttapca", *PLAN, "--to", str(to), *words]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)


def rows(path: Path) -> list[Row]:
    with Results(path, readonly=True) as results:
        found = results.rows()
    same = (
        dataclasses.replace(row, outcome=dataclasses.replace(row.outcome, **PASSING))
        for row in found
    )
    return sorted(same, key=lambda row: row.cell)


def finished(path: Path) -> int:
    """How many rows there are so far."""
    try:
        with Results(path, readonly=True) as results:
            return len(results.statuses())
    except (DataFormatError, DataNotFoundError):  # it is just being made
        return 0


def disturb(
    run: Process, to: Path, total: int, cluster: Cluster | None, options: argparse.Namespace
) -> int:
    """Kill until the run ends; moments are drawn as numbers of rows that are finished by then."""
    draw = random.Random(options.seed)
    moments = sorted(draw.uniform(0.02, 0.9) * total for _ in range(options.kills))
    restart = 0.5 * total if options.restart else None
    pause = 0.7 * total if options.pause else None
    kills = 0
    while run.poll() is None:
        time.sleep(draw.uniform(0.02, 0.2))
        done = finished(to)
        if moments and done >= moments[0]:
            workers = cluster.workers() if cluster else _loky(run.pid)
            if workers:
                draw.choice(workers).kill()
                moments.pop(0)
                kills += 1
                print(f"killed a worker after {done} rows", flush=True)
        if cluster and restart is not None and done >= restart:
            cluster.end()
            print(f"killed the scheduler after {done} rows", flush=True)
            time.sleep(2)
            cluster.start()
            restart = None
        if cluster and pause is not None and done >= pause:
            cluster.scheduler.send_signal(signal.SIGSTOP)
            print(f"stopped the scheduler after {done} rows", flush=True)
            time.sleep(options.pause)
            cluster.scheduler.send_signal(signal.SIGCONT)
            pause = None
    return kills


def _loky(parent: int) -> list[psutil.Process]:
    children = psutil.Process(parent).children()
    return [child for child in children if "popen_loky" in _words(child)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("dask", "joblib"), default="dask")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="kill the scheduler once")
    parser.add_argument("--pause", type=float, default=0, help="seconds to stop the scheduler for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serial, to = folder / "serial.sqlite", folder / "results.sqlite"
        if bench(serial).wait():
            sys.exit("the serial run failed")
        expected = rows(serial)
        cluster = Cluster(folder) if options.engine == "dask" else None
        words = ["--engine", f"dask://{cluster.address}"] if cluster else ["--jobs", "2"]
        try:
            run = bench(to, *words)
            kills = disturb(run, to, len(expected), cluster, options)
        finally:
            if cluster:
                cluster.end()
        found = rows(to)
        failed = [row for row in found if row.outcome.status == "failed"]
        if failed:
            bench(to, "--retry-failed").wait()
        same = rows(to) == expected
        print(
            f"{options.engine}: {kills} workers killed, exit code {run.returncode}, {len(found)} "
            f"of {len(expected)} rows, {len(failed)} of them failed and tried again, "
            f"{'the same' if same else 'OTHER'} rows as a serial run"
        )
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
