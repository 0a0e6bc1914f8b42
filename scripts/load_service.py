"""Load a service for long, overload it, and say how it bore that.

    python scripts/load_service.py --minutes 30 --overload 3

Starts `ttapca serve` on a free port of this machine, or takes one that runs there without tokens
(`--url`). First at capacity: each stream sends an image as soon as its last one was answered. Then
overload: images come at three times the rate that was reached, whatever becomes of them. At last
the streams of the beginning again.

A line for each minute has predictions a second, the times to get them, the memory of the server and
all statuses. Exits with 1 if there was another status than 200, 429 and 503, or a connection that
broke off; if memory has grown by more than `--growth` after a third of the time at capacity, when
all that is remembered of streams is there; if a p99 is above `--slowest`; or if the server that was
started here does not end as it should.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from http_load import Connection, predict_request

CAPACITY = "at capacity"
ALLOWED = (200, 429, 503)
BROKEN = 0  # in place of a status where there was no answer
FACTOR = 3  # of the capacity, in overload
MOST_CONNECTIONS = 1000  # in overload; the service takes 1,024, and works on 256 requests at once
TICK = 0.01  # seconds between looks at how many images are due
PAUSE = 0.1  # seconds after a connection that broke off


@dataclass
class Minute:
    """What happened in one minute, or in another stretch of time.

    Attributes:
        phase: `at capacity`, `overload` or `after`.
        seconds: How long it was.
        memory: Of the server at its end, in MB.
        statuses: How often each status came.
        waits: Seconds until each prediction.
        unsent: How many images were due when every connection was waiting for an answer.
    """

    phase: str
    seconds: float = 0.0
    memory: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    unsent: int = 0

    @property
    def rate(self) -> float:
        """Predictions a second."""
        return self.statuses[200] / self.seconds

    @property
    def sent(self) -> float:
        """Requests a second."""
        return sum(self.statuses.values()) / self.seconds

    def within(self, share: float) -> float:
        """Seconds within which such a share of the predictions came."""
        return float(np.quantile(self.waits, share)) if self.waits else 0.0

    def line(self) -> str:
        """For a person."""
        counts = [f"{_name(status)} {count:,}" for status, count in sorted(self.statuses.items())]
        counts += [f"unsent {self.unsent:,}"] if self.unsent else []
        p50, p99 = (1000 * self.within(share) for share in (0.5, 0.99))
        return (
            f"{self.phase:<11} {self.seconds:5.1f} s  {self.rate:7.1f} /s  p50 {p50:6.0f} ms  "
            f"p99 {p99:6.0f} ms  {self.memory:7.1f} MB  {', '.join(counts)}"
        )


def _name(status: int) -> str:
    return "broken off" if status == BROKEN else str(status)


class Watch:
    """Counts the answers of a phase minute by minute, and tells about them.

    Args:
        phase: Its name.
    """

    def __init__(self, phase: str) -> None:
        self.over = False
        self.now = Minute(phase)
        self._began = time.perf_counter()

    async def ask(self, connection: Connection, request: bytes) -> None:
        """Send a request, and count what comes of it."""
        began = time.perf_counter()
        try:
            status, _ = await connection.ask(request)
        except OSError:
            status = BROKEN
            await asyncio.sleep(PAUSE)
        self.now.statuses[status] += 1
        if status == 200:
            self.now.waits.append(time.perf_counter() - began)

    async def wait(self, seconds: float) -> None:
        """Wait for the end of a minute; a terminal shows how it goes on."""
        end = self._began + seconds
        while (left := end - time.perf_counter()) > 0:
            if sys.stderr.isatty():
                answers = f"{sum(self.now.statuses.values()):,} answers, {left:.0f} s left"
                print(f"{self.now.phase}: {answers:<60}", end="\r", file=sys.stderr, flush=True)
            await asyncio.sleep(min(1.0, left))

    def ended(self, memory: float) -> Minute:
        """End a minute, and begin another one."""
        minute, now = self.now, time.perf_counter()
        minute.seconds, minute.memory = now - self._began, memory
        self.now, self._began = Minute(minute.phase), now
        print(minute.line(), flush=True)
        return minute


Sender = Callable[[Watch], Coroutine[None, None, None]]


@dataclass(frozen=True)
class Cameras:
    """Streams that send the same image again and again.

    Attributes:
        address: Host and port of the service.
        requests: One for each stream.
        interval: Seconds of a `Minute`.
    """

    address: tuple[str, int]
    requests: Sequence[bytes]
    interval: float

    async def phase(self, name: str, minutes: float, send: Sender) -> list[Minute]:
        """Send images for so long."""
        watch, found = Watch(name), []
        sending = asyncio.ensure_future(send(watch))
        count = max(1, round(60 * minutes / self.interval))
        for number in range(count):
            await watch.wait(self.interval)
            if number == count - 1:
                watch.over = True
                await sending  # the answers that are still to come belong to the last minute
            found.append(watch.ended(await self._memory()))
        return found

    async def _memory(self) -> float:
        """Resident memory of the server in MB, as it says itself."""
        connection = Connection(*self.address)
        _, text = await connection.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.close()
        _, _, value = text.decode().partition("\nttapca_resident_bytes ")
        return float(value.split()[0]) / 1e6

    async def at_capacity(self, watch: Watch) -> None:
        """Let each stream send an image as soon as its last one was answered."""

        async def camera(request: bytes) -> None:
            connection = Connection(*self.address)
            while not watch.over:
                await watch.ask(connection, request)
            connection.close()

        await asyncio.gather(*map(camera, self.requests))

    def at_rate(self, rate: float) -> Sender:
        """Return what sends so many images a second, whatever becomes of those before."""

        async def send(watch: Watch) -> None:
            free = [Connection(*self.address) for _ in range(MOST_CONNECTIONS)]
            running: set[asyncio.Task[None]] = set()

            async def one(connection: Connection, request: bytes) -> None:
                await watch.ask(connection, request)
                free.append(connection)

            began, sent = time.perf_counter(), 0
            while not watch.over:
                due = int((time.perf_counter() - began) * rate)
                for number in range(sent, due):
                    if not free:
                        watch.now.unsent += 1
                        continue
                    request = self.requests[number % len(self.requests)]
                    task = asyncio.ensure_future(one(free.pop(), request))
                    running.add(task)
                    task.add_done_callback(running.discard)
                sent = due
                await asyncio.sleep(TICK)
            await asyncio.gather(*running)
            for connection in free:
                connection.close()

        return send


async def load(cameras: Cameras, minutes: float, overload: float, after: float) -> list[Minute]:
    """Load a service in three phases, for so many minutes each."""
    found = await cameras.phase(CAPACITY, minutes, cameras.at_capacity)
    rate = statistics.median(minute.rate for minute in found)
    if overload:
        sender = cameras.at_rate(FACTOR * rate)
        found += await cameras.phase("overload", overload, sender)
        found += await cameras.phase("after", after, cameras.at_capacity)
    return found


def faults(minutes: Sequence[Minute], growth: float, slowest: float) -> list[str]:
    """Return what a service must not do, and has done."""
    found = []
    statuses: Counter[int] = sum((minute.statuses for minute in minutes), Counter())
    for status, count in sorted(statuses.items()):
        if status not in ALLOWED:
            found.append(f"{count:,} requests were answered with {_name(status)}")
    if not all(minute.statuses[200] for minute in minutes):
        found.append("there was a minute without a prediction")
    grown = growth_of(minutes)
    if grown > growth:
        found.append(f"memory has grown by {grown:.1f} MB; at most {growth:g} are allowed")
    worst = max(minute.within(0.99) for minute in minutes)
    if worst > slowest:
        found.append(f"a p99 is {worst:.1f} s; at most {slowest:g} are allowed")
    return found


def growth_of(minutes: Sequence[Minute]) -> float:
    """Return by how many MB memory has grown after the first third of the time at capacity."""
    memory = [minute.memory for minute in minutes]
    first = max(1, sum(minute.phase == CAPACITY for minute in minutes) // 3)
    return max(memory) - max(memory[:first])


def summary(minutes: Sequence[Minute]) -> str:
    """Return a line for each phase."""
    lines = []
    for phase in dict.fromkeys(minute.phase for minute in minutes):
        some = [minute for minute in minutes if minute.phase == phase]
        rates = [minute.rate for minute in some]
        p99 = [1000 * minute.within(0.99) for minute in some]
        memory = [minute.memory for minute in some]
        sent = statistics.median(minute.sent for minute in some)
        lines.append(
            f"{phase:<11} {len(some)} lines, {statistics.median(rates):.1f} predictions a second "
            f"({min(rates):.1f} to {max(rates):.1f}) of {sent:.1f} requests; p99 "
            f"{min(p99):.0f} to {max(p99):.0f} ms; memory {min(memory):.1f} to {max(memory):.1f} MB"
        )
    lines.append(f"memory      grew by {growth_of(minutes):.1f} MB after a third of the time")
    return "\n".join(lines)


def predict_requests(url: str, streams: int) -> list[bytes]:
    """Return a request with a picture for each stream, in the size that the service wants."""
    with urllib.request.urlopen(f"{url}/v1/info", timeout=60) as answer:
        channels, height, width = json.load(answer)["input_shape"]
    random = np.random.default_rng(0)
    found = []
    for number in range(streams):
        pixels = random.integers(0, 256, (height, width, channels), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(file, "PNG")
        found.append(predict_request(f"camera-{number}", "image/png", file.getvalue()))
    return found


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """Start `ttapca serve`, and give its address; it must end well when it is told to."""
    command = [sys.executable, "-m", "ttapca", "serve", options.model, "--port", "0"]
    command += ["--filter", str(options.filter)] if options.filter else []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        state = Path(folder) / "streams.sqlite"
        command += ["--state", str(state), "--log-json"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        greeting = server.stdout.readline() if server.stdout else ""
        if not greeting.startswith("http://"):
            server.wait()
            log.seek(0)
            raise SystemExit(log.read())
        try:
            yield greeting.split()[0]
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
        size = state.stat().st_size / 1e6
        print(f"server      ended with {code}, and left {size:.1f} MB of streams on disk")
        if code:
            raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.url:
        return loaded(options, options.url)
    with served(options) as url:
        return loaded(options, url)


def loaded(options: argparse.Namespace, url: str) -> int:
    """Load a service, tell the verdict, and return the exit code."""
    parts = urlsplit(url)
    requests = predict_requests(url, options.streams)
    cameras = Cameras((parts.hostname or "", parts.port or 80), requests, options.interval)
    print(f"{url}  {options.streams} streams of PNG pictures", flush=True)
    minutes = asyncio.run(load(cameras, options.minutes, options.overload, options.after))
    print(summary(minutes))
    wrong = faults(minutes, options.growth, options.slowest)
    print("verdict     " + ("; ".join(wrong) if wrong else "good"))
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="of a service that runs, without tokens")
    parser.add_argument("--model", default="digits", help="what to serve")
    parser.add_argument("--filter", type=Path, help="its filter")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=30, help="at capacity")
    parser.add_argument("--overload", type=float, default=3, help="minutes of overload")
    parser.add_argument("--after", type=float, default=1, help="minutes after it")
    parser.add_argument("--interval", type=float, default=60, help="seconds of a line")
    # In overload a thousand connections are open, and as many images wait.
    parser.add_argument("--growth", type=float, default=100, help="MB that memory may grow by")
    # The time after which a service gives up a request, if nothing else is said.
    parser.add_argument("--slowest", type=float, default=30, help="seconds that a p99 may be")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
