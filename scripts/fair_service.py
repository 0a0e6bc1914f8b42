"""Three cameras beside a client that asks for too much: how many of their images are refused.

    python scripts/fair_service.py --seconds 30

Starts `ttapca serve` on a free port of this machine. Three cameras send two images a second each,
at their times, whatever becomes of those before; beside them

- `alone`: nothing;
- `heavy`: 20 clients send 64 images each, again and again, and come back a tenth of a second after
  a refusal;
- `pictures`: one client sends eight PNGs of 7000 x 7000 pixels at once, again and again;
- `slow bodies`: 300 connections send half of a body and keep the rest, and open again if they are
  closed;
- `large slow bodies`: 40 connections state 15 MB and send one of them.

A line for each has the images of the cameras, how many of them were refused, and the times to get
an answer. Exits with 1 if one was refused, or if a p99 is above `--slowest`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from http_load import Connection, predict_request

CAMERAS, RATE = 3, 2.0  # cameras, and images a second of each
CLIENTS, IMAGES = 20, 64
LARGE_PICTURES, SIDE = 8, 7000
HALVES, LARGE_HALVES = 300, 40
PAUSE = 0.1  # seconds after a refusal
NPY = "application/x-npy"
Address = tuple[str, int]


@dataclass
class Told:
    """What became of the requests of one kind of client."""

    statuses: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)

    async def ask(self, connection: Connection, request: bytes) -> bool:
        """Send a request, and return whether it was answered with predictions."""
        began = time.perf_counter()
        try:
            status, body = await connection.ask(request)
            word = "answered" if status == 200 else json.loads(body)["error"]["code"]
        except OSError:
            word = "broken off"
        self.statuses[word] += 1
        if word == "answered":
            self.waits.append(time.perf_counter() - began)
        return word == "answered"

    def line(self) -> str:
        """For a person."""
        counts = ", ".join(f"{count:,} {word}" for word, count in sorted(self.statuses.items()))
        if not self.waits:
            return counts
        p50, p99 = (1000 * float(np.quantile(self.waits, each)) for each in (0.5, 0.99))
        return f"{counts}; p50 {p50:.0f} ms, p99 {p99:.0f} ms"


def npy_request(stream: str, images: int, shape: Sequence[int], seed: int) -> bytes:
    """Return a request with random images."""
    channels, height, width = shape
    random = np.random.default_rng(seed)
    file = io.BytesIO()
    np.save(file, random.integers(0, 256, (images, height, width, channels), np.uint8))
    return predict_request(stream, NPY, file.getvalue())


async def cameras(address: Address, shape: Sequence[int], seconds: float) -> Told:
    """Send the images of all cameras at their times."""
    told, running = Told(), []

    async def one(request: bytes) -> None:
        connection = Connection(*address)
        await told.ask(connection, request)
        connection.close()

    requests = [npy_request(f"camera-{n}", 1, shape, n) for n in range(CAMERAS)]
    began = time.perf_counter()
    for number in range(round(seconds * RATE)):
        await asyncio.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        running += [asyncio.ensure_future(one(request)) for request in requests]
    await asyncio.gather(*running)
    return told


async def again_and_again(address: Address, request: bytes, told: Told) -> None:
    """Send a request as soon as the one before was answered."""
    connection = Connection(*address)
    try:
        while True:
            if not await told.ask(connection, request):
                await asyncio.sleep(PAUSE)
    finally:
        connection.close()


async def half(address: Address, stream: str, stated: int, sent: int, told: Told) -> None:
    """Send a part of a body, and wait until the service has had enough."""
    content = f"POST /v1/predict?stream={stream} HTTP/1.1\r\nHost: localhost\r\n"
    content += f"Content-Type: {NPY}\r\nContent-Length: {stated}\r\n\r\n"
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(content.encode() + bytes(sent))
                answer = await reader.read()  # until the service closes the connection
                code = answer.partition(b'"code":"')[2].partition(b'"')[0].decode()
                told.statuses[code or "closed"] += 1
            finally:
                writer.close()


def nothing(_address: Address, _shape: Sequence[int], _told: Told) -> list[Awaitable[None]]:
    """Return no clients."""
    return []


def heavy(address: Address, shape: Sequence[int], told: Told) -> list[Awaitable[None]]:
    """Return clients that send many images."""
    requests = [npy_request(f"heavy-{n}", IMAGES, shape, 100 + n) for n in range(CLIENTS)]
    return [again_and_again(address, request, told) for request in requests]


def pictures(address: Address, _shape: Sequence[int], told: Told) -> list[Awaitable[None]]:
    """Return a client that sends large pictures."""
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE)).save(file, "PNG")
    request = predict_request("pictures", "image/png", file.getvalue())
    return [again_and_again(address, request, told) for _ in range(LARGE_PICTURES)]


def slow_bodies(address: Address, _shape: Sequence[int], told: Told) -> list[Awaitable[None]]:
    """Return clients that send half a body."""
    return [half(address, f"slow-{n}", 10_000, 5_000, told) for n in range(HALVES)]


def large_slow_bodies(address: Address, _shape: Sequence[int], told: Told) -> list[Awaitable[None]]:
    """Return clients that state a large body and send a part of it."""
    return [half(address, f"slow-{n}", 15_000_000, 10**6, told) for n in range(LARGE_HALVES)]


BESIDE: dict[str, Callable[[Address, Sequence[int], Told], list[Awaitable[None]]]] = {
    "alone": nothing,
    "heavy": heavy,
    "pictures": pictures,
    "slow bodies": slow_bodies,
    "large slow bodies": large_slow_bodies,
}


@contextmanager
def served(model: str) -> Iterator[tuple[Address, Sequence[int], int]]:
    """Start the service; give address, shape of an image and process, and end it."""
    command = [sys.executable, "-m", "ttapca", "serve", model, "--port", "0"]
    with Path(os.devnull).open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = server.stdout.readline().split()[0] if server.stdout else ""
        with urllib.request.urlopen(f"{url}/v1/info", timeout=60) as answer:
            shape = json.load(answer)["input_shape"]
        parts = urlsplit(url)
        yield (parts.hostname or "", parts.port or 80), shape, server.pid
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()


def largest_memory(process: int) -> float:
    """Return the most memory that a process had so far, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


async def measured(
    kind: str, address: Address, shape: Sequence[int], seconds: float
) -> tuple[Told, Told]:
    """Let clients of a kind work beside the cameras, and return what became of both."""
    others = Told()
    await cameras(address, shape, 1)  # their streams begin
    beside = [asyncio.ensure_future(each) for each in BESIDE[kind](address, shape, others)]
    await asyncio.sleep(1)
    own = await cameras(address, shape, seconds)
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return own, others


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="cifar10-resnet20", help="a packaged network")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--only", choices=list(BESIDE), help="one part")
    parser.add_argument("--slowest", type=float, default=2.0, help="seconds that a p99 may be")
    options = parser.parse_args()
    bad = False
    for kind in [options.only] if options.only else BESIDE:
        with served(options.model) as (address, shape, process):
            own, others = asyncio.run(measured(kind, address, shape, options.seconds))
            memory = largest_memory(process)
        refused = own.statuses.total() - own.statuses["answered"]
        slow = not own.waits or np.quantile(own.waits, 0.99) > options.slowest
        bad |= bool(refused or slow)
        print(f"{kind:<18} cameras: {own.statuses.total()} images, {refused} refused; {own.line()}")
        print(f"{'':<18} others:  {others.line() or 'none'}; {memory:,.0f} MB at most", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
