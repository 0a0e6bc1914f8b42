"""Play a data set against a server, as cameras whose images get worse and better again.

Each stream has a thread and a connection of its own. What it sends depends on the data, the
schedule and the seed alone: a condition of 20 s at 10 images a second has 200 images, also where
the server is too slow to take them in 20 s.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Number, Whole, check_option
from ttapca.corruptions import load_textures
from ttapca.corruptions.apply import corrupt_any_size, needs_photographs
from ttapca.datasets import Images, Order, choose
from ttapca.errors import FeedError, OptionError
from ttapca.serving.feed_schedule import CLEAN, Step
from ttapca.serving.server_client import ServerClient

STOPPING = 2.0  # seconds that a request may take to end when feeding stops
LATE = 1.0  # seconds behind its time from which a stream does not catch up


@dataclass
class Tally:
    """What was sent under one condition and answered in one mode.

    Example:
        >>> tally = Tally(Step("fog", 5, 20, "seconds"), "on", images=8, right=6)
        >>> tally.accuracy
        75.0
    """

    step: Step
    mode: str = ""  # before the first answer
    images: int = 0
    right: int = 0
    adapted: int = 0

    @property
    def accuracy(self) -> float | None:
        """Right answers in percent; None before the first."""
        return 100 * self.right / self.images if self.images else None

    def add(self, images: int, right: int, adapted: int) -> None:
        """Count an answer."""
        self.images += images
        self.right += right
        self.adapted += adapted


@dataclass(frozen=True)
class StreamPlan:
    """What one stream sends.

    Attributes:
        name: Of the stream.
        schedule: Its conditions, one after another.
        seed: For the order of its images.
        delay: Seconds until it begins.
    """

    name: str
    schedule: tuple[Step, ...]
    seed: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Pace:
    """How fast images are sent, and in which order.

    Attributes:
        rate: Images a second, in each stream.
        batch: Images a request.
        order: As `ttapca.datasets.choose` has it; each round through the images has its own seed.
        loop: Whether a schedule begins again when it is over.

    Raises:
        OptionError: A value cannot be.
    """

    rate: float = 10.0
    batch: int = 1
    order: Order = "shuffled"
    loop: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_option("rate", self.rate, Number(above=0))
        check_option("batch", self.batch, Whole(1))


@dataclass
class FedStream:
    """How it goes with one stream; its thread writes, anybody may read.

    Attributes:
        plan: What it sends.
        current: Since the condition or the mode changed; None before the first condition.
        totals: By condition and mode, over all rounds of the schedule.
        health: What the server said last about the stream; empty before.
        retries: How often a request had to be sent again.
        late: Seconds that it has lost in all, where the server was slower than the images.
        finished: Whether the schedule is over.
        failure: Why it ended early.
    """

    plan: StreamPlan
    current: Tally | None = None
    totals: dict[tuple[str, str], Tally] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    late: float = 0.0
    finished: bool = False
    failure: Exception | None = None

    @property
    def sent(self) -> int:
        """Images that were answered, over all conditions."""
        return sum(tally.images for tally in list(self.totals.values()))

    def begin(self, step: Step) -> None:
        """Begin a condition."""
        self.current = Tally(step)

    def count(self, labels: NDArray[np.int64], answer: dict[str, Any]) -> None:
        """Count an answer of the server.

        Raises:
            FeedError: It is not what a server of ttapca answers.
        """
        assert self.current is not None  # noqa: S101 - `begin` comes first
        try:
            classes = [each["class"] for each in answer["predictions"]]
            pairs = zip(classes, labels.tolist(), strict=True)
            right = sum(found == label for found, label in pairs)
            adapted = len(labels) if answer["adapted"] else 0
            mode, self.health = str(answer["mode"]), dict(answer["health"])
        except (KeyError, TypeError, ValueError) as error:
            raise FeedError(
                "A server of ttapca answers with a class for each image and with the health of the "
                f"stream; this one did not ({error!r}). It may be of another version."
            ) from error
        step = self.current.step
        if not self.current.images:  # the first answer says in which mode the stream is
            self.current.mode = mode
        elif self.current.mode != mode:  # somebody has switched it: counted by itself from here on
            self.current = Tally(step, mode)
        total = self.totals.get((step.title, mode)) or Tally(step, mode)
        for tally in (self.current, total):
            tally.add(len(labels), right, adapted)
        self.totals[step.title, mode] = total  # at last: whoever looks finds no empty one


class Feeder:
    """Feeds streams from the moment it is entered until all schedules are over or it is left.

    Args:
        images: What the cameras see.
        plans: One for each stream.
        client: How to reach the server; every stream gets a copy of it.
        pace: How fast, and in which order.
        textures: The folder with the photographs of frost, for large images.

    Raises:
        OptionError: Two streams have one name.
        DataNotFoundError: A schedule has frost, and there are no photographs for it.
    """

    def __init__(
        self,
        images: Images,
        plans: Sequence[StreamPlan],
        client: ServerClient,
        pace: Pace,
        textures: Path | None = None,
    ) -> None:
        if len({plan.name for plan in plans}) < len(plans):
            raise OptionError("Every stream needs a name of its own; found one name twice.")
        steps = [step for plan in plans for step in plan.schedule if step.corruption != CLEAN]
        if any(needs_photographs(images.images, step.corruption) for step in steps):
            load_textures(textures)  # now: nobody wants to be told in the middle of a schedule
        self.images, self.pace, self.textures = images, pace, textures
        self.streams = [FedStream(plan) for plan in plans]
        self._client, self._stop = client, threading.Event()
        self._threads = [
            threading.Thread(target=self._feed, args=(stream,), daemon=True)
            for stream in self.streams
        ]

    def __enter__(self) -> Self:
        """Begin to feed."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all streams; a request that is under way is not waited for long."""
        self._stop.set()
        until = time.monotonic() + STOPPING
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def running(self, seconds: float) -> bool:
        """Wait so long, or until all is over; return whether any stream still sends.

        Raises:
            FeedError: A stream could not go on.
        """
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        # First who is alive: a stream that fails meanwhile is raised now, or at the next call.
        alive = any(thread.is_alive() for thread in self._threads)
        for stream in self.streams:
            if stream.failure is not None:
                raise stream.failure
        return alive

    def _feed(self, stream: FedStream) -> None:
        """Play a schedule; the life of a thread."""
        known = self._client
        try:
            with ServerClient(known.url, known.token, known.patience, self._stop) as client:
                self._play(stream, client)
            stream.finished = not self._stop.is_set()
        except Exception as error:  # the thread that shows the streams raises it
            if not self._stop.is_set():
                stream.failure = error

    def _play(self, stream: FedStream, client: ServerClient) -> None:
        plan = stream.plan
        if self._stop.wait(plan.delay):
            return
        rows, due = self._rows(plan.seed), time.monotonic()
        for step in itertools.cycle(plan.schedule) if self.pace.loop else plan.schedule:
            stream.begin(step)
            left = step.images(self.pace.rate)
            while left > 0:
                chosen = np.array(list(itertools.islice(rows, min(left, self.pace.batch))))
                pixels = self._corrupted(chosen, step)
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return
                stream.count(self.images.labels[chosen], client.predict(plan.name, pixels))
                left -= len(chosen)
                due += len(chosen) / self.pace.rate
                behind = time.monotonic() - due
                if behind > LATE:  # a burst of everything that was missed helps nobody
                    stream.late += behind
                    due += behind
                stream.retries = client.retries

    def _rows(self, seed: int) -> Iterator[int]:
        """Yield rows of the images for ever, one round through all of them after another."""
        for number in itertools.count():
            order = self.pace.order
            yield from choose(self.images.labels, order=order, seed=seed + number).rows.tolist()

    def _corrupted(self, rows: NDArray[np.int64], step: Step) -> NDArray[np.uint8]:
        pixels = np.ascontiguousarray(self.images.images[rows])
        if step.corruption == CLEAN:
            return pixels
        return corrupt_any_size(
            pixels, step.corruption, step.severity, indices=rows, textures=self.textures
        )


def check_fits(info: dict[str, Any], images: Images) -> list[str]:
    """Compare what a server takes with a data set; return what looks odd, in sentences.

    Args:
        info: What `GET /v1/info` answers.
        images: What will be sent.

    Raises:
        OptionError: Its network takes images of another size.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> names = [str(number) for number in range(10)]
        >>> check_fits({"input_shape": [1, 8, 8], "classes": names}, read_digits())
        []
    """
    height, width, channels = images.images.shape[1:]
    wanted = list(info.get("input_shape", []))
    if wanted and wanted != [channels, height, width]:
        raise OptionError(
            f"The server's network takes images of {_size(wanted)}; these are "
            f"{_size([channels, height, width])}. Name data that it takes; pictures are resized "
            "with `size=`."
        )
    classes = [str(name) for name in info.get("classes") or []]
    if classes and classes != list(images.class_names):
        return [
            "the server's classes have other names than those of the data; an answer counts as "
            "right where the number of its class is that of the label"
        ]
    return []


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
