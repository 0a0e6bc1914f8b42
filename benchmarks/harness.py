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
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ttapca
from common import Loader, natural_images, verdict
from ttapca.bench import ImageSource, Plan, Results, Subject, expand, protocol, run
from ttapca.data import Images
from ttapca.models import build

GOAL = 3.0
METHODS = ("source", "bn", "tent", "ttapca-relu")


def subject(images: int) -> Subject:
    network = build("resnet20").eval()
    fitted = ttapca.fit(network, "conv1", Loader(natural_images(4000)), 2000)
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
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default=",".join(METHODS))
    options = parser.parse_args()
    shared = subject(options.images)
    bare, whole = Clock(), Clock()
    protocol.adapt = bare.around(protocol.adapt)
    ttapca.Adapter.__call__ = bare.around(ttapca.Adapter.__call__)
    timed_run = whole.around(run)
    print(f"{options.images:,} images, batches of 200, median of {options.repeats}")
    with Results(Path(tempfile.mkdtemp()) / "results.sqlite") as results:
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
            report(method, pairs[1:])  # the first one warms up


def report(method: str, pairs: list[tuple[float, float]]) -> None:
    bare, added = (statistics.median(column) for column in zip(*pairs, strict=True))
    share = statistics.median(100 * over / under for under, over in pairs)
    print(
        f"  {method:12s} bare {bare:6.2f} s, harness adds {1000 * added:5.0f} ms: {share:4.1f} % "
        f"(goal {GOAL:.0f} %: {verdict(share < GOAL)})"
    )


if __name__ == "__main__":
    main()
