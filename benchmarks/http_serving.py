"""What `ttapca serve` costs over the bare network behind the same HTTP.

    python benchmarks/http_serving.py [--rounds 20] [--each 10]

Two servers, each in a process of its own, and a client in a third one: `ttapca serve`'s, with all
streams on, and the bare one of `bare_service.py`. They are asked in turns. 64 cameras send single
images at once, each the next one when it has its answer, as `.npy` (which is decoded in no time,
so that the network and the filter are all there is to see) and as JPEG; then one camera alone.

On a machine that others use, the processor time of the servers says more than the clock on the
wall; both are shown. The images have much noise, so that the filter has work to do.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import measuring
import ttapca
from bare_service import bare_server
from common import natural_images
from http_load import Connection, predict_request
from measuring import Goal, Result, Spread, Table, ratio
from serving import GATHERED, SOURCE, noisy_images
from ttapca import networks
from ttapca.serving import StreamPool
from ttapca.serving.http_server import DrainingServer, listen, logging_to
from ttapca.serving.metrics import Metrics
from ttapca.serving.service import Service, ServiceFacts

NETWORK = "cifar10-resnet20"
SHAPE = (3, 32, 32)
SERVERS = ("bare", "service")
NPY, JPEG = "application/x-npy", "image/jpeg"
ONE = "one camera, npy"
EACH = 5  # images that a camera sends in turn


def run_server(which: str, folder: Path, pipe: Pipe) -> None:
    """Serve, and tell how much processor time was used whenever somebody asks."""
    network = networks.load(NETWORK).eval()
    listening = listen("127.0.0.1", 0)
    if which == "bare":
        server = bare_server(network, SHAPE)
    else:
        measured = Metrics(NETWORK)
        pool = StreamPool(network, ttapca.load(folder), observer=measured)
        pool.warm_up()
        server = DrainingServer(Service(pool, ServiceFacts(NETWORK, "conv1"), metrics=measured))

    def tell() -> None:
        while pipe.recv() == "processor time":
            pipe.send(time.process_time())
        os._exit(0)  # nothing is to be kept

    threading.Thread(target=tell, daemon=True).start()
    pipe.send(listening.getsockname()[:2])
    with Path(os.devnull).open("w") as nowhere, logging_to(nowhere, as_json=True):
        server.run([listening])


@dataclass(frozen=True)
class Asked:
    """A server that was started, and the connections of its cameras."""

    pipe: Pipe
    cameras: list[Connection]

    def processor_time(self) -> float:
        """Seconds that the server has computed so far."""
        self.pipe.send("processor time")
        return float(self.pipe.recv())


@contextmanager
def started(folder: Path) -> Iterator[dict[str, Asked]]:
    """Both servers, each in a fresh process, until the block ends."""
    spawn = multiprocessing.get_context("spawn")
    servers = {}
    for which in SERVERS:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=run_server, args=(which, folder, theirs), daemon=True).start()
        address = ours.recv()
        servers[which] = Asked(ours, [Connection(*address) for _ in range(GATHERED)])
    try:
        yield servers
    finally:
        for server in servers.values():
            server.pipe.send("end")


def requests_of(kind: str) -> list[list[bytes]]:
    """Some images of each camera, as they are sent again and again."""
    images = (noisy_images(GATHERED * EACH) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    files = [_file(image, kind) for image in images]
    return [
        [predict_request(f"s{number}", kind, file) for file in files[number::GATHERED]]
        for number in range(GATHERED)
    ]


def _file(image: np.ndarray[Any, Any], kind: str) -> bytes:
    file = io.BytesIO()
    if kind == NPY:
        np.save(file, image[None])
    else:
        Image.fromarray(image).save(file, "JPEG", quality=90)
    return file.getvalue()


@dataclass
class Times:
    """Seconds of every round, by server."""

    wall: dict[str, list[float]]
    processor: dict[str, list[float]]


async def send(camera: Connection, requests: list[bytes], count: int) -> None:
    """Send so many images, each when the one before it was answered."""
    for request in islice(cycle(requests), count):
        status, answer = await camera.ask(request)
        if status != 200:
            raise RuntimeError(f"an image was answered with {status}: {answer[:300]!r}")


async def measure(
    servers: dict[str, Asked], requests: list[list[bytes]], rounds: int, count: int
) -> Times:
    """Let some cameras send so many images in every round, to one server after the other."""
    times = Times({name: [] for name in servers}, {name: [] for name in servers})
    for number in range(rounds + 1):
        for name, server in servers.items():
            used, began = server.processor_time(), time.perf_counter()
            cameras = zip(server.cameras, requests, strict=False)
            await asyncio.gather(*(send(*camera, count) for camera in cameras))
            ended = time.perf_counter()
            if number:  # the first one opens connections and begins streams
                images = count * len(requests)
                times.wall[name].append((ended - began) / images)
                times.processor[name].append((server.processor_time() - used) / images)
    return times


async def measure_all(servers: dict[str, Asked], rounds: int, each: int) -> dict[str, Times]:
    requests = {name: requests_of(kind) for name, kind in (("npy", NPY), ("jpeg", JPEG))}
    found = {
        f"{GATHERED} cameras, {name}": await measure(servers, some, rounds, each)
        for name, some in requests.items()
    }
    # In turns of single requests: a busy moment then falls on both.
    found[ONE] = await measure(servers, requests["npy"][:1], 20 * rounds, 1)
    for camera, some in zip(servers["service"].cameras, requests["jpeg"], strict=True):
        _, answer = await camera.ask(some[0])
        if not json.loads(answer)["adapted"]:
            raise RuntimeError("a stream was not adapted to: there was nothing to measure")
    return found


def run(options: argparse.Namespace) -> Result:
    network = networks.load(NETWORK).eval()
    source = natural_images(SOURCE, seed=0).float() / 255
    fitted = ttapca.fit(network, "conv1", torch.split(source, 200), route="dct")
    with tempfile.TemporaryDirectory() as folder:
        fitted.save(Path(folder) / "filter")
        with started(Path(folder) / "filter") as servers:
            found = asyncio.run(measure_all(servers, options.rounds, options.each))
    rows, shares = [], {}
    for name, times in found.items():
        clocks = {"wall": times.wall, "processor": times.processor}
        for clock, seconds in clocks.items():
            share = shares[name, clock] = ratio(seconds["bare"], seconds["service"])
            spreads = [Spread.of(seconds[which]).show(1000, 2) for which in SERVERS]
            rows.append([name, clock, *spreads, share.show()])
    one = found[ONE]
    added = {
        clock: Spread.of(
            [1000 * (b - a) for a, b in zip(times["bare"], times["service"], strict=True)]
        )
        for clock, times in (("wall", one.wall), ("processor", one.processor))
    }
    return Result(
        title="Serving over HTTP",
        text=(
            f"{NETWORK}, filter of cosines, {GATHERED} streams of single images, all on, over the "
            f"bare network behind the same HTTP; {torch.get_num_threads()} threads, "
            f"{options.rounds} rounds of {options.each} images a stream, one server after the "
            "other; milliseconds an image, and bare over service."
        ),
        tables=[
            Table("Milliseconds an image", ["what", "clock", *SERVERS, "share"], rows),
        ],
        goals=[
            *(
                Goal(
                    f"HTTP: throughput over the bare network, {name}",
                    share.median,
                    share.show(),
                    0.7,
                    at_least=True,
                )
                for (name, clock), share in shares.items()
                if clock == "processor" and name != ONE
            ),
            *(
                Goal(
                    f"HTTP: added latency, one image, {clock}",
                    spread.median,
                    f"{spread.show()} ms",
                    4,
                    unit=" ms",
                )
                for clock, spread in added.items()
            ),
        ],
        numbers={name: {"wall": t.wall, "processor": t.processor} for name, t in found.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--each", type=int, default=10, help="images of a stream in a round")
    measuring.command("http-serving", run, parser)


if __name__ == "__main__":
    main()
