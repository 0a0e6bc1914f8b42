"""Play a data set against a server, as cameras whose images get worse and better again."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Number, Whole, check_option
from ttapca.corruptions import load_textures
from ttapca.corruptions.apply import corrupt_any_size, needs_photographs
from ttapca.corruptions.catalogue import SEVERITIES, find
from ttapca.datasets import Images, Order, choose
from ttapca.errors import FeedError, OptionError

STOPPING = 2.0  # seconds that a request may take to end when feeding stops
LATE = 1.0  # seconds behind its time from which a stream does not catch up

CLEAN = "clean"
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
LONGEST = 1_000_000_000  # images or seconds of one condition
NUMBER = r"(\d+(?:\.\d+)?)"
STEP = re.compile(rf"(\w+)(?::(\w+))?\s+{NUMBER}\s*(s|m|h|images?)")
DURATION = re.compile(rf"\s*{NUMBER}\s*([smh]?)\s*", re.ASCII)


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
    """Return the steps of a schedule, such as `clean 20s, snow:3 1.5m, fog 50 images`."""
    return tuple(_step(word.strip(), text) for word in text.split(","))


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of a duration such as `5s`, `1.5m` or `2h`; `s` may be left out."""
    found = re.fullmatch(DURATION, text)
    if not found:
        raise OptionError(f"{option} takes a duration such as 5s, 1.5m or 1h; found `{text}`.")
    return float(found[1]) * SECONDS[found[2]]


def _step(word: str, text: str) -> Step:
    found = re.fullmatch(STEP, word)
    if not found:
        raise OptionError(
            "A schedule has conditions and how long they last, such as `clean 20s, fog:5 20s` or "
            f"`clean 300 images`; found `{word or text}`."
        )
    corruption, digits, number, unit = found.groups()
    if corruption == CLEAN:
        severity = 0
        if digits:
            raise OptionError(f"Clean images have no severity; found `{word}`.")
    else:
        corruption, severities = find(corruption).name, {str(each): each for each in SEVERITIES}
        severity = severities.get(digits or str(SEVERITIES[-1]), 0)
        if not severity:
            raise OptionError(
                f"A severity is from {SEVERITIES[0]} to {SEVERITIES[-1]}; found `{word}`."
            )
    amount = float(number) * SECONDS.get(unit, 1)
    if not 0 < amount <= LONGEST:
        raise OptionError(f"A condition lasts longer than nothing, not for ever; found `{word}`.")
    return Step(corruption, severity, amount, "seconds" if unit in SECONDS else "images")


@dataclass(frozen=True)
class StreamPlan:
    """The images of one stream."""

    name: str
    schedule: tuple[Step, ...]
    seed: int = 0  # for the order of its images
    delay: float = 0.0  # seconds until it begins


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
    """Feeds streams, each in a thread, `batch` images a request and `rate` images a second."""

    def __init__(
        self,
        images: Images,
        plans: Sequence[StreamPlan],
        client: ServerClient,
        *,
        rate: float = 10.0,
        batch: int = 1,
        order: Order = "shuffled",
        loop: bool = False,
        textures: Path | None = None,
    ) -> None:
        check_option("rate", rate, Number(above=0))
        check_option("batch", batch, Whole(1))
        if len({plan.name for plan in plans}) < len(plans):
            raise OptionError("Every stream needs a name of its own; found one name twice.")
        steps = [step for plan in plans for step in plan.schedule if step.corruption != CLEAN]
        if any(needs_photographs(images.images, step.corruption) for step in steps):
            load_textures(textures)  # an error now is better than one amid a schedule
        self._images, self._textures = images, textures
        self._rate, self._batch, self._order, self._loop = rate, batch, order, loop
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
            client = ServerClient(known.url, known.token, known.patience, self._stop)
            self._play(stream, client)
            stream.finished = not self._stop.is_set()
        except Exception as error:  # the thread that shows the streams raises it
            if not self._stop.is_set():
                stream.failure = error

    def _play(self, stream: FedStream, client: ServerClient) -> None:
        plan = stream.plan
        if self._stop.wait(plan.delay):
            return
        # One round through all images after another, for ever.
        rounds = (
            choose(self._images.labels, order=self._order, seed=plan.seed + number).rows
            for number in itertools.count()
        )
        rows, due = itertools.chain.from_iterable(rounds), time.monotonic()
        for step in itertools.cycle(plan.schedule) if self._loop else plan.schedule:
            stream.current = Tally(step)
            left = step.images(self._rate)
            while left > 0:
                chosen = np.array(list(itertools.islice(rows, min(left, self._batch))))
                pixels = np.ascontiguousarray(self._images.images[chosen])
                if step.corruption != CLEAN:
                    kind, textures = step.corruption, self._textures
                    pixels = corrupt_any_size(
                        pixels, kind, step.severity, indices=chosen, textures=textures
                    )
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return
                stream.count(step, self._images.labels[chosen], client.predict(plan.name, pixels))
                left -= len(chosen)
                due += len(chosen) / self._rate
                behind = time.monotonic() - due
                if behind > LATE:  # no burst of missed images
                    stream.late += behind
                    due += behind
                stream.retries = client.retries


def check_fits(info: dict[str, Any], images: Images) -> None:
    """Raise unless the network in an answer to `/v1/info` takes images of this size."""
    height, width, channels = images.images.shape[1:]
    wanted, found = list(info.get("input_shape", [])), [channels, height, width]
    if wanted and wanted != found:
        needed, given = ("x".join(map(str, shape)) for shape in (wanted, found))
        raise OptionError(
            f"The server's network takes images of {needed}; these are {given}. Name data that it "
            "takes; pictures are resized with `size=`."
        )


# Answers after which the same request may succeed; a proxy says 502 or 504 for a missing server.
RETRIED = (429, 502, 503, 504)
TIMEOUT = 60.0  # seconds without an answer
LONGEST_MESSAGE = 500  # letters of a refusal that are shown
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0  # seconds between attempts at a server that is not there
OPENER = build_opener(ProxyHandler({}))  # the server is near


@dataclass
class ServerClient:
    """Talks to one server, from one thread; tries again while it is busy or out of reach."""

    url: str  # `http://` may be left out
    token: str | None = field(default=None, repr=False)
    patience: float = 10.0  # seconds for which a request is tried again
    stopped: threading.Event = field(default_factory=threading.Event)  # ends waiting
    clock: Callable[[], float] = time.monotonic
    retries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check address and token."""
        self._address = _checked_address(self.url)
        if self.token and not self.token.isprintable():
            raise OptionError(
                "A token is one line of text to be printed; this one is not. Copy it again."
            )

    def info(self) -> dict[str, Any]:
        """Return the answer to `/v1/info`."""
        return self._ask("/v1/info")

    def predict(self, stream: str, images: NDArray[np.uint8]) -> dict[str, Any]:
        """Send images of a stream, uint8 (n, height, width, channels), and return the answer."""
        body = io.BytesIO()
        np.save(body, images, allow_pickle=False)
        return self._ask(f"/v1/predict?stream={quote(stream, safe='')}", body.getvalue())

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = Request(self._address + path, body, {"Accept": "application/json"})  # noqa: S310
        if body is not None:
            request.add_header("Content-Type", "application/x-npy")
        if self.token:  # in the bytes that the server hashes
            request.add_header("Authorization", f"Bearer {self.token}".encode().decode("latin-1"))
        began, pause = self.clock(), FIRST_WAIT
        while True:
            wait = None
            try:
                with OPENER.open(request, timeout=TIMEOUT) as response:
                    answer = response.read()
            except HTTPError as error:
                trouble = _refusal(error, self.url, bool(self.token))
                if error.code not in RETRIED:
                    raise FeedError(trouble) from None
                stated = error.headers["Retry-After"] or ""
                wait = float(stated) if stated.isdecimal() else None  # it may be a date
            except (OSError, http.client.HTTPException) as error:
                trouble = _unreachable(self.url, getattr(error, "reason", error))
            else:
                return _parsed(answer, self.url)
            if wait is None:
                wait, pause = pause, min(2 * pause, LONGEST_WAIT)
            if self.clock() - began + wait > self.patience or self.stopped.wait(wait):
                raise FeedError(trouble)
            self.retries += 1


def _checked_address(url: str) -> str:
    try:
        full = url if "://" in url else f"http://{url}"
        parts = urlsplit(full)
        more = parts.query or parts.fragment or parts.username
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not more:
            return full.rstrip("/")
    except ValueError:  # a port that is no number, or one bracket without the other
        pass
    raise OptionError(f"A server has an address such as http://127.0.0.1:8000; found `{url}`.")


def _parsed(answer: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FeedError(
            f"A server of ttapca answers in JSON; {url} answers with something else. Name the "
            "address that `ttapca serve` prints."
        )
    return found


def _refusal(error: HTTPError, url: str, token: bool) -> str:
    with error:
        answer = error.read()
    if error.code == 401:
        found = "refuses this token" if token else "asks for a token"
        return f"{url} {found}. Give one with --token, or in the variable TTAPCA_TOKEN."
    try:
        message = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = http.client.responses.get(error.code, "an error without a name")
    return f"{url} refuses with {error.code}: {message[:LONGEST_MESSAGE]}"


def _unreachable(url: str, error: object) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = f"no answer within {TIMEOUT:.0f} s"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror.lower()
    return f"{url} cannot be reached: {reason}. Start a server there, or name another address."
