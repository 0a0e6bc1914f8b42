"""The answers of a pool, and the status of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from ttapca.adaptation.health import Health
from ttapca.support.outputs import OutputKind

Mode = Literal["off", "shadow", "on"]


@dataclass(frozen=True)
class StreamStatus:
    """How a stream is, and how its requests were answered.

    Attributes:
        health: Of its images.
        mode: Whether its images are adapted to.
        gains: Scale of each band of components in the mode `on`, as in `health.bands`.
        requests: How many requests were answered.
        adapted_share: Share of all images that were answered with a filter that changed them.
        disagreement: Share of all images in shadow that have another class when adapted; None
            before any.
        shifted_since: When the present shift began, in seconds since 1970; None without.
        last_seen: When its last images came; None before any.
    """

    health: Health
    mode: Mode
    gains: tuple[float, ...]
    requests: int
    adapted_share: float
    disagreement: float | None
    shifted_since: float | None
    last_seen: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, text, lists and dicts, as JSON and logs want them."""
        return {**asdict(self), "health": self.health.to_dict(), "gains": list(self.gains)}


@dataclass(frozen=True)
class StreamGlance:
    """The part of a stream's status that takes no computing, for answers and for long lists.

    Attributes:
        stream: Its name.
        mode: Whether its images are adapted to.
        images: How many came.
        requests: How many requests were answered.
        skipped: How many requests changed nothing, since their numbers were not finite.
        shift: How surely it has shifted, from 0 to 1.
        shifted: Whether its alarm is on.
        adapted_share, disagreement, shifted_since, last_seen: As in `StreamStatus`.
    """

    stream: str
    mode: Mode
    images: int
    requests: int
    skipped: int
    shift: float
    shifted: bool
    adapted_share: float
    disagreement: float | None
    shifted_since: float | None
    last_seen: float | None


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one request.

    Attributes:
        logits: A row for each image, as the network returns them; those of the untouched network
            unless the mode is `on`.
        outputs: Their meaning: `multiclass`, `binary` or `multilabel`.
        adapted: Whether a filter changed the images that are answered for.
        differ: In shadow, how many images have another class when adapted; None in other modes, and
            if the adapted network has no finite numbers: then the request is skipped.
        glance: How the stream is after this request, in short.
    """

    logits: Tensor
    outputs: OutputKind
    adapted: bool
    differ: int | None
    glance: StreamGlance
    _status: Callable[[], StreamStatus] = field(repr=False)

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self.glance.stream

    @property
    def mode(self) -> Mode:
        """The mode of the stream."""
        return self.glance.mode

    @property
    def shift(self) -> float:
        """How surely the stream has shifted by now, from 0 to 1."""
        return self.glance.shift

    @property
    def shifted(self) -> bool:
        """Whether the alarm of the stream is on."""
        return self.glance.shifted

    @cached_property
    def status(self) -> StreamStatus:
        """The status of the stream after this request; computed when it is asked for."""
        return self._status()


class PoolObserver:
    """Hears of the work of a pool, in the thread that does it; by default it does nothing.

    If it raises an `Exception`, the pool gives a `CallbackWarning` and goes on.
    """

    def passed(self, images: int, streams: int, seconds: float) -> None:
        """Take note of a forward pass."""

    def answered(self, answer: Answer, waited: float) -> None:
        """Take note of an answer before it is given, and of the seconds since its images came."""

    def refused(self, reason: str) -> None:
        """Take note of the error of a refused request, or of states that cannot be saved."""
