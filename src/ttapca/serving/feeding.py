"""Play a data set against a server, as cameras whose images get worse and better again.

Each stream has a thread and a connection of its own. Its images depend on the data, the schedule
and the seed alone, also if the server is too slow to take them in time.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Number, Whole, check_option
from ttapca.corruptions import load_textures
from ttapca.corruptions.apply import corrupt_any_size, needs_photographs
from ttapca.corruptions.catalogue import SEVERITIES, find
from ttapca.datasets import Images, Order, choose
from ttapca.errors import FeedError, OptionError
from ttapca.serving.server_client import ServerClient

STOPPING = 2.0  # seconds that a request may take to end when feeding stops
LATE = 1.0  # seconds behind its time from which a stream does not catch up

# Schedules ---------------------------------------------------------------------------------------

CLEAN = "clean"
SECONDS = {"s": 1, "m": 60, "h": 3600}
LONGEST = 1_000_000_000  # images or seconds of one condition
STEP = re.compile(
    r"(?P<corruption>\w+)(?::(?P<severity>\w+))?\s+(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)"
)


@dataclass(frozen=True)
class Step:
    """One condition of a schedule, and how long it lasts."""

    corruption: str  # or `clean`
    severity: int  # 0 for clean images
    amount: float
    unit: Literal["seconds", "images"]

    @property
    def title(self) -> str:
        """The condition as the schedule writes it, such as `fog:5`."""
        return f"{self.corruption}:{self.severity}" if self.severity else self.corruption

    def images(self, rate: float) -> int:
        """Return how many images it has at a rate a second; at least one."""
        count = self.amount if self.unit == "images" else self.amount * rate
        return max(1, round(count))


def parse_schedule(text: str) -> tuple[Step, ...]:
    """Return the steps of a schedule: `CONDITION DURATION`, separated by commas.

    A condition is `clean`, or a corruption with its severity (5 if none is given). A duration is a
    number with `s`, `m` or `h`, or a number of `images`.

    Example:
        >>> steps = parse_schedule("clean 20s, snow:3 1.5m, fog 50 images")
        >>> [step.title for step in steps]
        ['clean', 'snow:3', 'fog:5']
    """
    return tuple(_step(word.strip(), text) for word in text.split(","))


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of a duration such as `5s`, `1.5m` or `2h`; `s` may be left out."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text, re.ASCII)
    if not found:
        raise OptionError(f"{option} takes a duration such as 5s, 1.5m or 1h; found `{text}`.")
    return float(found[1]) * SECONDS[found[2] or "s"]


def _step(word: str, text: str) -> Step:
    found = re.fullmatch(STEP, word)
    if not found or found["unit"] not in (*SECONDS, "image", "images"):
        raise OptionError(
            "A schedule has conditions and how long they last, such as `clean 20s, fog:5 20s` or "
            f"`clean 300 images`; found `{word or text}`."
        )
    corruption, severity = CLEAN, 0
    if found["corruption"] != CLEAN:
        corruption = find(found["corruption"]).name
        digits = found["severity"] or str(SEVERITIES[-1])
        if digits not in map(str, SEVERITIES):
            raise OptionError(
                f"A severity is from {SEVERITIES[0]} to {SEVERITIES[-1]}, as in `fog:3 20s`; found "
                f"`{word}`."
            )
        severity = int(digits)
    elif found["severity"]:
        raise OptionError(f"Clean images have no severity; found `{word}`.")
    amount = float(found["amount"]) * SECONDS.get(found["unit"], 1)
    if not 0 < amount <= LONGEST:
        raise OptionError(f"A condition lasts longer than nothing, not for ever; found `{word}`.")
    return Step(corruption, severity, amount, "seconds" if found["unit"] in SECONDS else "images")


# Feeding -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamPlan:
    """The images of one stream."""

    name: str
    schedule: tuple[Step, ...]
    seed: int = 0  # for the order of its images
    delay: float = 0.0  # seconds until it begins


@dataclass(frozen=True)
class Pace:
    """How fast images are sent, and in which order."""

    rate: float = 10.0  # images a second, in each stream
    batch: int = 1  # images a request
    order: Order = "shuffled"  # each round through the images has its own seed
    loop: bool = False  # whether a schedule begins again when it is over

    def __post_init__(self) -> None:
        """Check the values."""
        check_option("rate", self.rate, Number(above=0))
        check_option("batch", self.batch, Whole(1))


@dataclass
class Tally:
    """Counts of the images that were sent under one condition and answered in one mode."""

    step: Step
    mode: str = ""  # before the first answer
    images: int = 0
    right: int = 0
    adapted: int = 0

    @property
    def accuracy(self) -> float | None:
        """Right answers in percent; None before the first."""
        return 100 * self.right / self.images if self.images else None


@dataclass
class FedStream:
    """The progress of one stream; its thread writes, other threads read."""

    plan: StreamPlan
    current: Tally | None = None  # since the condition or the mode changed
    totals: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by condition and mode
    health: dict[str, Any] = field(default_factory=dict)  # in the last answer
    retries: int = 0  # requests that had to be sent again
    late: float = 0.0  # seconds that it has lost, if the server was slower than the images
    finished: bool = False
    failure: Exception | None = None  # why it ended early

    @property
    def sent(self) -> int:
        """Images that were answered, over all conditions."""
        return sum(tally.images for tally in list(self.totals.values()))

    def count(self, step: Step, labels: NDArray[np.int64], answer: dict[str, Any]) -> None:
        """Count an answer under a condition; raise `FeedError` if it is not one of ttapca."""
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
        current = self.current
        if current is None or (current.images and current.mode != mode):  # it was switched
            current = self.current = Tally(step)
        current.mode = mode
        total = self.totals.get((step.title, mode)) or Tally(step, mode)
        for tally in (current, total):
            tally.images += len(labels)
            tally.right += right
            tally.adapted += adapted
        self.totals[step.title, mode] = total  # at last: a reader finds no empty one


class Feeder:
    """Feeds streams from the moment it is entered until all schedules are over or it is left."""

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
            load_textures(textures)  # an error now is better than one amid a schedule
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
        """Stop all streams; a running request is not waited for long."""
        self._stop.set()
        self._join(STOPPING)

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def running(self, seconds: float) -> bool:
        """Wait this long, or until all is over; return whether any stream still sends, or raise."""
        self._join(seconds)
        # Threads first: a stream that fails meanwhile raises now, or at the next call.
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
            stream.current = Tally(step)
            left = step.images(self.pace.rate)
            while left > 0:
                chosen = np.array(list(itertools.islice(rows, min(left, self.pace.batch))))
                pixels = np.ascontiguousarray(self.images.images[chosen])
                if step.corruption != CLEAN:
                    kind, textures = step.corruption, self.textures
                    pixels = corrupt_any_size(
                        pixels, kind, step.severity, indices=chosen, textures=textures
                    )
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return
                stream.count(step, self.images.labels[chosen], client.predict(plan.name, pixels))
                left -= len(chosen)
                due += len(chosen) / self.pace.rate
                behind = time.monotonic() - due
                if behind > LATE:  # no burst of missed images
                    stream.late += behind
                    due += behind
                stream.retries = client.retries

    def _rows(self, seed: int) -> Iterator[int]:
        """Yield rows of the images for ever, one round through all of them after another."""
        for number in itertools.count():
            order = self.pace.order
            yield from choose(self.images.labels, order=order, seed=seed + number).rows.tolist()


def check_fits(info: dict[str, Any], images: Images) -> list[str]:
    """Compare the network in an answer to `/v1/info` with a data set; return remarks for people."""
    height, width, channels = images.images.shape[1:]
    wanted, found = list(info.get("input_shape", [])), [channels, height, width]
    if wanted and wanted != found:
        needed, given = ("x".join(map(str, shape)) for shape in (wanted, found))
        raise OptionError(
            f"The server's network takes images of {needed}; these are {given}. Name data that it "
            "takes; pictures are resized with `size=`."
        )
    classes = [str(name) for name in info.get("classes") or []]
    if classes and classes != list(images.class_names):
        return [
            "the server's classes have other names than those of the data; an answer counts as "
            "right if the number of its class is that of the label"
        ]
    return []
