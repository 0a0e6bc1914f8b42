"""What the closed form costs over plain inference on networks for photographs of 224 by 224 pixels.

    python benchmarks/large_inference.py [--networks resnet50 mobilenet-v2] [--rounds 5]

The weights are random, which changes no time; the images have the spectrum of photographs and much
noise, so that the filter, of cosines, has work to do. Online, after some batches: what the first
batch of a stream costs more is said beside it.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import measuring
import ttapca
from common import natural_images
from measuring import Goal, Result, Spread, Table, ratio
from ttapca import networks
from ttapca.networks import describe_layers

SIDE, FITTED, SEEN = 224, 96, 8  # pixels, images of the fit, batches before the clock runs
# Over plain inference: batches of 50, and single images.
LIMITS = {"resnet50": {50: 1.05, 1: 1.10}, "mobilenet-v2": {50: 1.15}}


def noisy_images(n: int, seed: int) -> Tensor:
    images = natural_images(n, seed=seed, side=SIDE).float() / 255
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return (images + 0.2 * noise).clamp(0, 1)


def measured(network: nn.Module, fitted: ttapca.FittedFilter, batch: int, rounds: int) -> dict:
    """Seconds of every round, by method."""
    adapted = ttapca.adapt(copy.deepcopy(network), "wiener", filter=fitted, forgetting="online")
    samples = noisy_images(batch, seed=1)

    def plain() -> Tensor:
        with torch.no_grad():
            return network(samples)

    plain()
    first = measuring.timed(lambda: adapted(samples))[0]
    for number in range(SEEN):
        adapted(noisy_images(min(batch, 8), seed=2 + number))
    steps = {"plain": plain, "wiener": lambda: adapted(samples)}
    return {**measuring.interleaved(steps, rounds), "first": [first]}


def run(options: argparse.Namespace) -> Result:
    rows, goals, numbers = [], [], {}
    for name in options.networks:
        network = networks.build(name).eval().to(memory_format=torch.channels_last)
        layer = describe_layers(network, (3, SIDE, SIDE)).recommended
        source = natural_images(FITTED, seed=0, side=SIDE).float() / 255
        fitted = ttapca.fit(network, layer, torch.split(source, 16), route="dct")
        for batch in (50, 1):
            rounds = options.rounds if batch > 1 else 6 * options.rounds
            found = measured(network, fitted, batch, rounds)
            over = ratio(found["wiener"], found["plain"])
            start = found["first"][0] / Spread.of(found["plain"]).median
            milliseconds = Spread.of(found["plain"]).show(1000, 0)
            rows.append([name, str(batch), milliseconds, over.show(digits=3), f"{start:.2f}"])
            if batch in LIMITS.get(name, {}):
                what = f"{name}, 224 pixels, batch of {batch}: closed form over plain"
                goals.append(Goal(what, over.median, over.show(digits=3), LIMITS[name][batch]))
            numbers[f"{name} {batch}"] = found
            print(rows[-1], flush=True)
    columns = ["network", "batch", "plain, ms", "wiener over plain", "first batch over plain"]
    text = (
        f"Random weights, filter of cosines fitted on {FITTED} images, online, "
        f"{options.rounds} rounds (six times as many at batch 1), {torch.get_num_threads()} "
        f"threads, clock {measuring.CLOCK_NAME}; median and quartiles."
    )
    return Result(
        "Inference at 224 x 224", text, [Table("Large images", columns, rows)], goals, numbers
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(LIMITS))
    parser.add_argument("--rounds", type=int, default=5)
    measuring.command("large-inference", run, parser)


if __name__ == "__main__":
    main()
