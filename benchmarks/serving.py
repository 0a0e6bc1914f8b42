"""What a pool of streams costs over the bare network, without HTTP.

    python benchmarks/serving.py [--rounds 15] [--streams 10000]

Single images of 64 streams, gathered into one pass, and of one stream alone; the memory of a
stream; and many streams that are created, put to disk and come back. The weights are random, which
changes no time; the images have much noise, so that every filter has work to do.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import measuring
import ttapca
from common import natural_images
from measuring import Goal, Result, Spread, Table, ratio
from ttapca import networks
from ttapca.serving import PoolLimits, StreamPool, StreamStore
from ttapca.support.process import resident_memory

GATHERED = 64
SOURCE = 2000
RESIDENT = 500
LOOKED_AT = 200  # streams whose state is compared when they come back


def noisy_images(n: int) -> Tensor:
    images = natural_images(n, seed=1).float() / 255
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 0.2 * noise).clamp(0, 1)


def ask(pool: StreamPool, images: Tensor) -> None:
    """One image of each of many streams, all at once."""
    with pool._news:  # no pass begins before all have asked
        asked = [pool.submit(f"s{number}", each[None]) for number, each in enumerate(images)]
    for each in asked:
        each.result()


def times(network: nn.Module, fitted: ttapca.FittedFilter, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round. The bare network runs before: a pool holds on to it."""
    images = noisy_images(GATHERED)

    def bare(some: Tensor) -> None:
        with torch.inference_mode():
            network(some)

    with StreamPool(network, fitted) as pool:
        pool.warm_up()
        for _ in range(3):
            ask(pool, images)

        def untouched(some: Tensor) -> None:
            with pool._news, pool._network._adapter.disabled():
                bare(some)

        many = {"bare": lambda: untouched(images), "pool": lambda: ask(pool, images)}
        one = {
            "bare, one": lambda: untouched(images[:1]),
            "pool, one": lambda: pool.predict("s0", images[:1]),
        }
        return measuring.interleaved(many, rounds) | measuring.interleaved(one, 6 * rounds)


def many_streams(network: nn.Module, fitted: ttapca.FittedFilter, streams: int) -> dict[str, float]:
    """Create streams, each seen twice, and compare some states with what they were."""
    images = noisy_images(2)
    limits = PoolLimits(max_resident=RESIDENT)
    chosen = set(random.Random(0).sample(range(streams), min(LOOKED_AT, streams)))
    with (
        tempfile.TemporaryDirectory() as folder,
        StreamStore(Path(folder) / "streams.sqlite") as store,
        StreamPool(network, fitted, store=store, limits=limits) as pool,
    ):
        pool.warm_up()
        start = resident_memory()
        states, after = {}, {}
        for number in range(streams):
            pool.predict(f"s{number}", images[:1])
            if number in chosen:
                states[number] = pool.dump(f"s{number}")
            if number + 1 in (2 * RESIDENT, streams):
                after[number + 1] = resident_memory() - start
        same = sum(pool.dump(f"s{number}") == state for number, state in states.items())
        stream = max(len(state) for state in states.values())
    half, end = after[2 * RESIDENT], after[streams]
    return {
        "stream": stream / 1e6,
        "half": half / 1e6,
        "end": end / 1e6,
        "right": same / len(states),
    }


def run(options: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    network = networks.build("resnet20").eval()
    source = natural_images(SOURCE, seed=0).float() / 255
    fitted = ttapca.fit(network, "conv1", torch.split(source, 200), route="dct")
    found = times(network, fitted, options.rounds)
    kept = many_streams(network, fitted, options.streams)
    share = ratio(found["bare"], found["pool"])
    pairs = zip(found["pool, one"], found["bare, one"], strict=True)
    added = Spread.of([1000 * (ours - bare) for ours, bare in pairs])
    rows = [[name, Spread.of(seconds).show(1000, 2)] for name, seconds in found.items()]
    more = [
        ["a stream", f"{kept['stream']:.3f} MB"],
        [f"resident memory after {2 * RESIDENT:,} streams", f"{kept['half']:.1f} MB more"],
        [f"after {options.streams:,}", f"{kept['end']:.1f} MB more"],
        ["states that came back bit for bit", f"{100 * kept['right']:.1f} %"],
    ]
    growth = kept["end"] - kept["half"]
    return Result(
        title="Serving many streams",
        text=(
            f"resnet20, filter of cosines, {GATHERED} streams of single images, "
            f"{torch.get_num_threads()} threads, clock {measuring.CLOCK_NAME}, "
            f"{options.rounds} rounds; {RESIDENT} streams in memory at most."
        ),
        tables=[
            Table("Milliseconds", ["what", "ms"], rows),
            Table("States", ["what", "found"], more),
        ],
        goals=[
            Goal("pool: throughput over the bare network", share.median, share.show(), 0.7, True),
            Goal(
                "pool: added latency, one image", added.median, f"{added.show()} ms", 4, unit=" ms"
            ),
            Goal(
                "pool: memory a stream", kept["stream"], f"{kept['stream']:.3f} MB", 0.5, unit=" MB"
            ),
            Goal("pool: growth over many streams", growth, f"{growth:.1f} MB", 20, unit=" MB"),
            Goal("pool: states right on return", kept["right"], f"{kept['right']:.3f}", 1, True),
        ],
        numbers={"seconds": found, "states": kept},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=10_000)
    measuring.command("serving", run, parser)


if __name__ == "__main__":
    main()
