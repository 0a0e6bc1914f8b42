"""What the harness adds to the bare method, for one cell.

A CIFAR ResNet-20 of random weights, a filter of 2,000 components at `conv1`, random images with the
spectrum of photographs, batches of 200, online. The bare method is making the adapter and calling
it. The harness reads, shuffles, measures error, calibration and entropy, looks at the filter, and
commits a row to a file.

Both are timed in one and the same pass, so that other jobs on the machine slow both alike; two
passes in turns differed by more than the harness costs.

    python benchmarks/harness.py [--images 1000] [--repeats 5] [--methods bn,tent]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import measuring
import ttapca
from common import fitted_stem, natural_images
from measuring import Goal, Result, Spread, Table
from ttapca.benchmark import ImageSource, Plan, Results, Subject, expand, measurement
from ttapca.benchmark import run as run_units
from ttapca.datasets import Images
from ttapca.networks import build

GOAL = 3.0
METHODS = ("source", "bn", "tent", "ttapca-relu")


def subject(images: int) -> Subject:
    network = build("resnet20").eval()
    fitted = fitted_stem(network, 2000)
    pixels = natural_images(images, seed=1).permute(0, 2, 3, 1).numpy()
    labels = np.random.default_rng(0).integers(0, 10, images)
    data = Images(pixels, labels, tuple(str(number) for number in range(10)))
    return Subject("resnet20", network, "natural", ImageSource(data), fitted)


class Clock:
    """Seconds inside of some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = measuring.CLOCK()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += measuring.CLOCK() - start

        return timed


def run(options: argparse.Namespace) -> Result:
    shared = subject(options.images)
    bare, whole = Clock(), Clock()
    measurement.adapt = bare.around(measurement.adapt)
    ttapca.Adapter.__call__ = bare.around(ttapca.Adapter.__call__)
    timed_run = whole.around(run_units)
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Results(Path(folder) / "r.sqlite") as results:
        for method in options.methods.split(","):
            plan = Plan(
                methods=(method,),
                corruptions=("clean",),
                settings=("online",),
                seeds=range(options.repeats + 1),
            )
            pairs = []
            for unit in expand(plan, shared):
                shared.spectrum = None  # methods in a row would share it
                bare.seconds = whole.seconds = 0.0
                timed_run([unit], shared, results)
                pairs.append((bare.seconds, whole.seconds - bare.seconds))
            seconds[method] = pairs[1:]  # the first one warms up
    return result(seconds, options)


def result(seconds: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> Result:
    rows, goals = [], []
    for method, pairs in seconds.items():
        bare, added = (Spread.of(column) for column in zip(*pairs, strict=True))
        share = Spread.of([100 * over / under for under, over in pairs])
        rows.append([method, bare.show(), added.show(1000, 0), f"{share.show(digits=1)} %"])
        what = f"harness over {method}"
        goals.append(Goal(what, share.median, f"{share.show(digits=1)} %", GOAL, unit=" %"))
    return Result(
        title="The harness",
        text=(
            f"One cell of {options.images:,} images in batches of 200: a CIFAR ResNet-20 of random "
            "weights, 2,000 components at `conv1`, online, both timed in one pass. Reading, "
            "shuffling, measuring and saving the row count as harness."
        ),
        tables=[Table("One cell", ["method", "bare, s", "added, ms", "share"], rows)],
        goals=goals,
        numbers={"seconds": seconds},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default=",".join(METHODS))
    measuring.command("harness", run, parser)


if __name__ == "__main__":
    main()
