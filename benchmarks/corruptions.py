"""Seconds that each corruption takes for 10,000 images at severity 5, on one core.

    python benchmarks/corruptions.py [--images 10000] [--data FILE.npz] [--textures DIR] [--all]

The published generator's seconds were measured on another machine for the same work: the ratios say
how far apart the two are, not more.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is imported

import cv2
import numpy as np

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--data", type=Path, help=".npz with `images`; synthetic ones by default")
    parser.add_argument("--textures", type=Path, help="frost's folder; synthetic by default")
    parser.add_argument("--all", action="store_true", help="all nineteen, not fifteen")
    options = parser.parse_args()
    one_core()
    images = np.load(options.data)["images"] if options.data else synthetic(options.images, 32, 32)
    images = images[: options.images]
    textures = (
        load_textures(options.textures) if options.textures else tuple(synthetic(6, 400, 600))
    )
    corrupt(images[:64], "snow", SEVERITY)  # load what is loaded on first use
    total = 0.0
    print(f"{'corruption':<18} {'seconds':>8} {'published':>10} {'ratio':>7}")
    for name in CORRUPTIONS if options.all else STANDARD:
        start = time.process_time()
        corrupt(images, name, SEVERITY, textures=textures)
        seconds = (time.process_time() - start) * 10_000 / len(images)
        total += seconds if name in STANDARD else 0.0
        published = PUBLISHED.get(name)
        compared = f"{published:10.0f} {published / seconds:6.0f}x" if published else ""
        print(f"{name:<18} {seconds:8.2f} {compared}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{'the fifteen':<18} {total:8.2f} {PUBLISHED_TOTAL:10.0f} {PUBLISHED_TOTAL / total:6.0f}x"
    )
    print(f"goal: at most {GOAL_SECONDS:.0f} s; peak memory {peak:.0f} MB (goal: at most 1,000 MB)")


if __name__ == "__main__":
    main()
