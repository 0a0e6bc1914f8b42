"""What several processes bring, and what engines cost.

    python benchmarks/engines.py [--rounds 3] [--cells 30]

240 cells of digits by `ttapca bench`, in batches of 10, one after the other and with `--jobs 2`:
whole commands, with loading, fitting and starting the processes. Tasks that only sleep, in the bare
loop and on engines of one worker, from the first that ends to the last. And the memory of two
processes that hold the same images: what is shared counts half in each (PSS).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import measuring
from measuring import Goal, Result, Spread, Table, ratio
from ttapca.engines import Engine, SerialEngine
from ttapca.engines.artifacts import Artifact, forget, write_artifact
from ttapca.engines.cluster import DaskEngine
from ttapca.engines.processes import JoblibEngine

NAP = 0.5  # seconds
IMAGES = 100_000  # of 32 x 32, 307 MB
PLAN = ["bench", "--preset", "demo-digits", "--corruptions", "standard", "--batch-sizes", "10"]


def cells(folder: Path, words: list[str], threads: int | None) -> tuple[float, float]:
    """Seconds of a command, and of processors."""
    environment = dict(os.environ)
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    to = tempfile.mkdtemp(dir=folder)
    before, start = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "ttapca", *PLAN, "--to", f"{to}/r.sqlite", *words],
        check=True,
        capture_output=True,
        env=environment,
    )
    seconds, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system
    return seconds, used - before.children_user - before.children_system


def nap(_task: int) -> None:
    time.sleep(NAP)


def seconds_a_cell(engine: Engine, count: int) -> float:
    """Seconds from the first task that ends to the last, for each after the first."""
    ends = [time.perf_counter() for _ in engine.run(range(count), nap)]
    return (ends[-1] - ends[0]) / (count - 1)


@contextmanager
def cluster() -> Iterator[str]:
    """A scheduler and one worker, each in a process of its own."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as made:
        yield made.scheduler_address


def memory(artifact: Artifact[Any]) -> dict[str, float]:
    """MB of this process before it has opened the images, and when it has looked at all of them."""
    before = rolled_up()
    total = int(artifact.open()["images"].sum(dtype=np.int64))
    time.sleep(5)  # until the other process has, too
    return {"before": before, "after": rolled_up(), "total": total}


def memory_of_a_copy(artifact: Artifact[Any]) -> dict[str, float]:
    """The same if the process reads a copy of its own."""
    before = rolled_up()
    images = np.array(artifact.open()["images"])
    forget(artifact)
    total = int(images.sum(dtype=np.int64))
    time.sleep(5)
    return {"before": before, "after": rolled_up(), "total": total}


def rolled_up() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return int(found) / 1000


def added(folder: Path, work: Callable[[Artifact[Any]], dict[str, float]]) -> list[float]:
    """MB that images add to each of two processes."""
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, 32, 32, 3), np.uint8)
    artifact = write_artifact({"images": pixels}, folder, "images")
    results = [ending.result for ending in JoblibEngine(2).run([artifact] * 2, work)]  # type: ignore[union-attr]
    return [each["after"] - each["before"] for each in results]


def run(options: argparse.Namespace) -> Result:
    commands: dict[str, tuple[list[str], int | None]] = {
        "one process, two threads": ([], None),
        "one process, one thread": ([], 1),
        "`--jobs 2`": (["--jobs", "2"], None),
    }
    walls: dict[str, list[float]] = {name: [] for name in commands}
    used: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as name, cluster() as address:
        folder = Path(name)
        shared, copied = added(folder, memory), added(folder, memory_of_a_copy)
        engines: dict[str, Callable[[], Engine]] = {
            "bare loop": SerialEngine,
            "joblib": lambda: JoblibEngine(1),
            "dask": lambda: DaskEngine(address),
        }
        naps: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for kind, make in engines.items():
                naps[kind].append(seconds_a_cell(make(), options.cells))
            for kind, (words, threads) in commands.items():
                seconds, processors = cells(folder, words, threads)
                walls[kind].append(seconds)
                used[kind].append(processors)
                print(f"  {kind}: {seconds:.1f} s, {processors:.1f} s of processors", flush=True)
    faster = ratio(walls["one process, two threads"], walls["`--jobs 2`"])
    over = {
        kind: Spread.of([100 * (one / bare - 1) for one, bare in pairs])
        for kind in ("joblib", "dask")
        if (pairs := list(zip(naps[kind], naps["bare loop"], strict=True)))
    }
    size = IMAGES * 32 * 32 * 3 / 1e6
    share = sum(shared) / size, f"{sum(shared) / size:.2f}"
    return Result(
        title="Many processes",
        text=(
            f"240 cells of digits by `ttapca bench`, batches of 10, {options.rounds} rounds; "
            f"{options.cells} tasks that sleep for {NAP} s on engines of one worker; two processes "
            f"that look at the same {size:.0f} MB of images. Two idle cores would take half of "
            "the seconds of processors."
        ),
        tables=[
            Table(
                "240 cells of digits",
                ["what", "seconds", "seconds of processors"],
                [
                    [kind, Spread.of(walls[kind]).show(1, 1), Spread.of(used[kind]).show(1, 1)]
                    for kind in commands
                ],
            ),
            Table(
                f"Milliseconds over {1000 * NAP:.0f}, a task",
                ["what", "ms"],
                [
                    [kind, Spread.of([one - NAP for one in each]).show(1000, 1)]
                    for kind, each in naps.items()
                ],
            ),
            Table(
                f"PSS that {size:.0f} MB of images add to each of two processes, MB",
                ["what", "first", "second"],
                [
                    ["mapped from one file", *(f"{each:.0f}" for each in shared)],
                    ["a copy each", *(f"{each:.0f}" for each in copied)],
                ],
            ),
        ],
        goals=[
            Goal("`--jobs 2` over one process", faster.median, faster.show(), 1.7, True),
            *(
                Goal(f"{kind} over the bare loop", each.median, f"{each.show()} %", most)
                for (kind, each), most in zip(over.items(), (5, 10), strict=True)
            ),
            Goal("images of two processes, over one copy", *share, 1.1),
        ],
        numbers={"seconds": walls, "processors": used, "naps": naps, "shared": shared},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=30)
    measuring.command("engines", run, parser)


if __name__ == "__main__":
    main()
