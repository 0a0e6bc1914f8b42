"""Images of 224 by 224 pixels that one core corrupts in a second, with ImageNet-C's severities.

    python benchmarks/large_corruptions.py [--images 20] [--photos DIR] [--textures DIR]

The rate over several corruptions is that of making the same number of images with each of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is imported

import numpy as np
from PIL import Image

import measuring
from corruptions import one_core, synthetic
from measuring import Goal, Result, Table
from ttapca.corruptions import CORRUPTIONS, IMAGENET_C, SEVERITIES, STANDARD, corrupt, load_textures

SIDE = 224
GOAL_RATE = 100.0


def photographs(folder: Path, count: int) -> np.ndarray:
    """The middle of the first photographs of a folder."""
    found = []
    for path in sorted(folder.glob("*.jpg"))[:count]:
        with Image.open(path) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        top, left = (pixels.shape[0] - SIDE) // 2, (pixels.shape[1] - SIDE) // 2
        found.append(pixels[top : top + SIDE, left : left + SIDE])
    return np.stack(found)


def run(options: argparse.Namespace) -> Result:
    one_core()
    images = (
        photographs(options.photos, options.images)
        if options.photos
        else synthetic(options.images, SIDE, SIDE)
    )
    textures = (
        load_textures(options.textures) if options.textures else tuple(synthetic(6, 400, 600))
    )
    milliseconds: dict[str, list[float]] = {}
    for name in CORRUPTIONS:
        milliseconds[name] = []
        corrupt(images[:1], name, 1, table=IMAGENET_C, textures=textures)  # load what it needs
        for severity in SEVERITIES:
            rounds = []
            for _ in range(options.rounds):
                start = time.process_time()
                corrupt(images, name, severity, table=IMAGENET_C, textures=textures)
                rounds.append(1000 * (time.process_time() - start) / len(images))
            milliseconds[name].append(statistics.median(rounds))
    rows = [row(name, values) for name, values in milliseconds.items()]
    standard = np.mean([milliseconds[name] for name in STANDARD], axis=0)
    rows.append(row("mean of the fifteen", standard.tolist()))
    rate, peak = 1000 / standard.mean(), measuring.peak_memory()
    severities = [f"severity {severity}" for severity in SEVERITIES]
    kind = "photographs" if options.photos else "synthetic images"
    return Result(
        title="Corruptions of large images",
        text=(
            f"Milliseconds of one core for an image of {SIDE} x {SIDE} pixels with the severities "
            f"of ImageNet-C, from {len(images)} {kind}; the median of {options.rounds} rounds."
        ),
        tables=[Table("Corruptions", ["corruption", *severities, "mean", "images a second"], rows)],
        goals=[
            Goal(
                f"the fifteen at {SIDE} x {SIDE}, one core",
                rate,
                f"{rate:.0f} images/s",
                GOAL_RATE,
                at_least=True,
                unit=" images/s",
            ),
            Goal("peak memory, large images", peak, f"{peak:.2f} GB", 1.0, unit=" GB"),
        ],
        numbers={"milliseconds": milliseconds},
    )


def row(name: str, milliseconds: list[float]) -> list[str]:
    mean = float(np.mean(milliseconds))
    return [name, *(f"{value:.1f}" for value in milliseconds), f"{mean:.1f}", f"{1000 / mean:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=Path, help="folder of JPEG files; synthetic by default")
    parser.add_argument("--textures", type=Path, help="frost's folder; synthetic by default")
    measuring.command("large-corruptions", run, parser)


if __name__ == "__main__":
    main()
