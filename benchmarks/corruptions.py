"""Seconds that each corruption takes for 10,000 images at severity 5, on one core.

    python benchmarks/corruptions.py [--images 10000] [--data FILE.npz] [--textures DIR]

The published generator's seconds were measured on another machine for the same work: the ratios say
how far apart the two are, not more.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is imported

import cv2
import numpy as np

import measuring
from measuring import Goal, Result, Table
from ttapca.corruptions import CORRUPTIONS, STANDARD, corrupt, load_textures

SEVERITY = 5
GOAL_SECONDS = 45.0
PUBLISHED_TOTAL = 914.0
PUBLISHED = {
    "glass_blur": 383.0,
    "zoom_blur": 183.0,
    "frost": 175.0,
    "snow": 72.0,
    "motion_blur": 27.0,
    "elastic_transform": 22.0,
    "fog": 16.0,
    "brightness": 14.0,
}


def synthetic(count: int, height: int, width: int) -> np.ndarray:
    """Smooth colour fields with some noise: neither flat nor white noise, like photographs."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (count, 5, 5, 3)).astype(np.float32)
    smooth = np.stack([cv2.resize(each, (width, height)) for each in coarse])
    noisy = smooth + generator.normal(0, 6, smooth.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


def one_core() -> None:
    cv2.setNumThreads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def run(options: argparse.Namespace) -> Result:
    one_core()
    images = np.load(options.data)["images"] if options.data else synthetic(options.images, 32, 32)
    images = images[: options.images]
    textures = (
        load_textures(options.textures) if options.textures else tuple(synthetic(6, 400, 600))
    )
    corrupt(images[:64], "snow", SEVERITY)  # load what is loaded on first use
    seconds = {}
    for name in STANDARD if options.standard else CORRUPTIONS:
        start = time.process_time()
        corrupt(images, name, SEVERITY, textures=textures)
        seconds[name] = (time.process_time() - start) * 10_000 / len(images)
    total = sum(seconds[name] for name in STANDARD)
    rows = [row(name, value, PUBLISHED.get(name)) for name, value in seconds.items()]
    rows.append(row("the fifteen", total, PUBLISHED_TOTAL))
    peak = measuring.peak_memory()
    return Result(
        title="Corruptions",
        text=(
            f"Seconds of one core for 10,000 images at severity {SEVERITY}, from {len(images):,}. "
            "The published generator's seconds were measured on another machine for the same work."
        ),
        tables=[Table("Corruptions", ["corruption", "seconds", "published", "ratio"], rows)],
        goals=[
            Goal("the fifteen", total, f"{total:.1f} s", GOAL_SECONDS, unit=" s"),
            Goal("peak memory", peak, f"{peak:.2f} GB", 1.0, unit=" GB"),
        ],
        numbers={"seconds": seconds},
    )


def row(name: str, seconds: float, published: float | None) -> list[str]:
    if published is None:
        return [name, f"{seconds:.2f}", "", ""]
    return [name, f"{seconds:.2f}", f"{published:.0f}", f"{published / seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--data", type=Path, help=".npz with `images`; synthetic ones by default")
    parser.add_argument("--textures", type=Path, help="frost's folder; synthetic by default")
    parser.add_argument("--standard", action="store_true", help="the fifteen, not all nineteen")
    measuring.command("corruptions", run, parser)


if __name__ == "__main__":
    main()
