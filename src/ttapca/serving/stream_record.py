"""The record that a pool keeps of one stream, its file, and the status that is told of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from ttapca._checks import Maybe, Number, OneOf, Record, Rule, Whole, conform, shown
from ttapca.adaptation.health import Health
from ttapca.errors import SavedStreamError, StreamNameError
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.state_files import SavedStream, read_saved
from ttapca.spectral.stream_state import StreamState

Mode = Literal["off", "shadow", "auto", "on"]
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]*"  # so that a name is never a path, nor needs an escape
LONGEST_NAME = 100  # letters

# Numbers that the page or a chart could not show would break the list of all streams.
COUNT = Whole(0, 2**53)  # browsers count no further
TIME = Maybe(Number(0, 1e11))  # seconds since 1970: until the year 5138


def check_name(name: object, longest: int = LONGEST_NAME) -> None:
    """Raise `StreamNameError` unless a stream may have this name, of `longest` letters at most."""
    if not isinstance(name, str) or len(name) > longest or not re.fullmatch(NAME_PATTERN, name):
        raise StreamNameError(
            f"The name of a stream must have 1 to {longest} letters of A-Z, a-z, 0-9, dot, hyphen "
            f"and underscore, and begin with a letter or a digit; found {shown(name)}."
        )


@dataclass(frozen=True, kw_only=True)
class StreamCounts:
    """What a status and a glance both tell of a stream.

    Attributes:
        mode: Whether its images are adapted to.
        requests: How many requests were answered.
        adapted_share: Share of all images that were answered with a filter that changed them.
        disagreement: Share of images in shadow and auto with another class when adapted, or None.
        shifted_since: When the present shift began, in seconds since 1970; None without.
        last_seen: When its last images came; None before any.
        adapting: Whether the adapted network answers, which is chosen in the mode `auto`.
        switches, harmful: Of that mode: changes of the choice; whether harm is suspected now.
        alarm_after: How many more images its alarm needs at least; None while it is on.
    """

    mode: Mode
    requests: int
    adapted_share: float
    disagreement: float | None
    shifted_since: float | None
    last_seen: float | None
    adapting: bool = False
    switches: int = 0
    harmful: bool = False
    alarm_after: int | None = None


@dataclass(frozen=True)
class StreamStatus(StreamCounts):
    """How a stream is, and how its requests were answered; see `StreamCounts`.

    Attributes:
        health: Of its images.
        gains: Scale of each band of components where images are adapted to, as in `health.bands`.
    """

    health: Health
    gains: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, text, lists and dicts, as JSON and logs want them."""
        return {**asdict(self), "health": self.health.to_dict(), "gains": list(self.gains)}


@dataclass(frozen=True)
class StreamGlance(StreamCounts):
    """The part of a stream's status that takes no computing, for answers and for long lists.

    Attributes:
        stream: Its name.
        images: How many came.
        skipped: How many requests changed nothing, since their numbers were not finite.
        shift: How surely it has shifted, from 0 to 1.
        shifted: Whether its alarm is on.
        mode, and the others: See `StreamCounts`.
    """

    stream: str
    images: int
    skipped: int
    shift: float
    shifted: bool


@dataclass(frozen=True, eq=False)
class StreamRecord:
    """The state of one stream, and counts of its requests; a pass makes a new record."""

    state: StreamState
    mode: Mode = "on"
    images: int = 0
    requests: int = 0
    skipped: int = 0  # requests that changed nothing, since their numbers were not finite
    adapted: int = 0  # images that were answered with a filter that changed them
    shadowed: int = 0  # images that both networks have predicted
    differed: int = 0  # images that have another class there
    shifted_since: float | None = None  # seconds since 1970
    last_seen: float | None = None

    @property
    def shifted(self) -> bool:
        """Whether the alarm is on."""
        return self.state.alarm.shifted

    @property
    def adapting(self) -> bool:
        """Whether the adapted network answers."""
        auto = self.state.auto
        return self.mode == "on" or (self.mode == "auto" and auto is not None and auto.adapting)

    @property
    def alarm_after(self) -> int | None:
        """How many more images the alarm needs at least: the rest of some blocks of images."""
        alarm = self.state.alarm
        blocks = CONSTANTS.blocks - alarm.run
        return None if alarm.shifted else max(1, blocks * CONSTANTS.block - alarm.images)

    def glance(self, name: str) -> StreamGlance:
        """Return the status of the stream of this name that takes no computing."""
        return StreamGlance(
            stream=name,
            images=self.images,
            skipped=self.skipped,
            shift=float(self.state.spectra[0].shift[self.state.latest]),  # of its last image
            shifted=self.shifted,
            **self.counts(),
        )

    def counts(self) -> dict[str, Any]:
        """Return what `StreamStatus` and `StreamGlance` both tell."""
        auto = self.state.auto
        return {
            "mode": self.mode,
            "adapting": self.adapting,
            "switches": 0 if auto is None else auto.switches,
            "harmful": auto is not None and auto.harmful,
            "requests": self.requests,
            "adapted_share": self.adapted / max(1, self.images),
            "disagreement": self.differed / self.shadowed if self.shadowed else None,
            "shifted_since": self.shifted_since,
            "last_seen": self.last_seen,
            "alarm_after": self.alarm_after,
        }

    def to_bytes(self, kind: str) -> bytes:
        """Return a file of `ttapca.spectral.state_files` for pools and adapters of this kind."""
        facts = {name: getattr(self, name) for name in FACTS}
        return SavedStream(kind, self.state, facts=facts).to_bytes()


FACTS: dict[str, Rule] = dict.fromkeys([f.name for f in fields(StreamRecord)[1:]], COUNT) | {
    "mode": OneOf(get_args(Mode)),
    "shifted_since": TIME,
    "last_seen": TIME,
}


def read_record(data: bytes, kind: str, like: StreamRecord) -> StreamRecord:
    """Return the record in a file of a pool or an adapter, of the kind of a new record `like`."""
    saved = read_saved(data, kind, like.state, "The file")
    if saved.state is None:
        raise SavedStreamError("The file is no saved stream: they hold no state.")
    facts = dict(saved.facts) or _facts_of_adapter(saved.other, like.mode)
    conform(facts, Record(FACTS), "The file is no saved stream", SavedStreamError)
    return StreamRecord(saved.state, **facts)


def _facts_of_adapter(other: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    values = other.get("values")
    values = values if isinstance(values, Mapping) else {}
    counts = {"images": "images", "requests": "batches", "skipped": "skipped"}
    found = {name: values.get(counts.get(name, ""), 0) for name in FACTS}
    return found | {"mode": mode, "shifted_since": None, "last_seen": None}
