"""All that a pool keeps of one stream, and how it is written to bytes.

A record is never written into: a pass makes new ones, which replace the old ones when the pass is
over. So whoever looks sees a whole record, and a pass that fails leaves no mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from ttapca.errors import SavedStreamError
from ttapca.serving.answers import Mode, StreamGlance
from ttapca.spectral.state_files import SavedStream, read_saved
from ttapca.spectral.stream_state import StreamState


@dataclass(frozen=True, eq=False)
class StreamRecord:
    """What was seen of one stream, and what was done with it.

    Attributes:
        state: What is known of it; the same as a stream of an adapter has.
        mode: Whether its images are adapted to.
        images, requests, skipped: How many came, and how many requests changed nothing.
        adapted, shadowed, differed: How many images were answered with a filter that changed them,
            were answered in shadow, and have another class there.
        shifted_since, last_seen: Seconds since 1970.
    """

    state: StreamState
    mode: Mode = "on"
    images: int = 0
    requests: int = 0
    skipped: int = 0
    adapted: int = 0
    shadowed: int = 0
    differed: int = 0
    shifted_since: float | None = None
    last_seen: float | None = None

    @property
    def shift(self) -> float:
        """How surely the condition of its last image is a shift, from 0 to 1."""
        return float(self.state.spectra[0].shift[self.state.latest])

    @property
    def shifted(self) -> bool:
        """What the alarm says."""
        return self.state.alarm.shifted

    @property
    def adapted_share(self) -> float:
        """Of all images, how many were answered with a filter that changed them."""
        return self.adapted / max(1, self.images)

    @property
    def disagreement(self) -> float | None:
        """Of all images in shadow, how many have another class when adapted; None before any."""
        return self.differed / self.shadowed if self.shadowed else None

    def glance(self, name: str) -> StreamGlance:
        """Return what it says about its stream, which has this name, without computing."""
        return StreamGlance(
            stream=name,
            mode=self.mode,
            images=self.images,
            requests=self.requests,
            skipped=self.skipped,
            shift=self.shift,
            shifted=self.shifted,
            adapted_share=self.adapted_share,
            disagreement=self.disagreement,
            shifted_since=self.shifted_since,
            last_seen=self.last_seen,
        )

    def to_bytes(self, kind: str) -> bytes:
        """Return the record as a file of `ttapca.spectral.state_files`.

        Args:
            kind: Which pools and adapters can read it.
        """
        facts = {each.name: getattr(self, each.name) for each in _FACTS}
        return SavedStream(kind, self.state, facts=facts).to_bytes()


_FACTS = [each for each in fields(StreamRecord) if each.name != "state"]
# By the type of a field: what a number can be, and its largest value. Whoever shows a number that
# cannot be would fail, and with it all that is said of other streams.
_KINDS: dict[str, tuple[Any, float]] = {
    "int": (int, 2**53),  # browsers count no further
    "float | None": ((int, float, type(None)), 1e11),  # seconds since 1970: until the year 5138
}


def read_record(data: bytes, kind: str, like: StreamRecord) -> StreamRecord:
    """Return the record that `StreamRecord.to_bytes` wrote, or one for a stream of an adapter.

    Args:
        data: From anybody: everything in it is checked.
        kind: Which pools and adapters can read it.
        like: A new record of such a pool.

    Raises:
        SavedStreamError: The bytes are something else, or were written by another kind of pool.
    """
    saved = read_saved(data, kind, like.state, "The file")
    if saved.state is None:
        raise SavedStreamError("The file is no saved stream: they hold no state.")
    facts = dict(saved.facts) or _facts_of_adapter(saved.other, like.mode)
    return StreamRecord(saved.state, **_checked(facts))


def _facts_of_adapter(other: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    """Return what a pool counts of a stream that an adapter has saved."""
    values = other.get("values")
    values = values if isinstance(values, Mapping) else {}
    known = {"mode": mode, "shifted_since": None, "last_seen": None}
    counts = {"images": "images", "requests": "batches", "skipped": "skipped"}
    found = {name: values.get(counts.get(name, ""), 0) for name in _kinds()}
    return found | known


def _kinds() -> dict[str, str]:
    return {each.name: str(each.type) for each in _FACTS}


def _checked(facts: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds()
    if facts.keys() != kinds.keys():
        raise SavedStreamError("The file is no saved stream: their numbers have other names.")
    for name, value in facts.items():
        if name == "mode":
            sound = value in get_args(Mode)
        else:
            kind, most = _KINDS[kinds[name]]
            sound = isinstance(value, kind) and not isinstance(value, bool)
            sound = sound and (value is None or 0 <= value <= most)
        if not sound:
            raise SavedStreamError(f"The file is no saved stream: `{name}` is {value!r}.")
    return facts
