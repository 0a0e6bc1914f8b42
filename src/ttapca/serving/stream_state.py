"""All that a pool keeps of one stream, and how it is written to bytes.

A state is never written into: a pass makes new ones, which replace the old ones when the pass is
over. So whoever looks sees a whole state, and a pass that fails leaves no mark.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ttapca.errors import SavedStreamError
from ttapca.serving.answers import Mode, StreamGlance
from ttapca.spectral.closed_form_rule import Shown
from ttapca.spectral.conditions import MOST_STATES, RECENT, KnownConditions
from ttapca.spectral.many_streams import Seen
from ttapca.support.parsing import parse_json

FORMAT = "ttapca pool stream 2"
# Before the names of tensors.
SHOWN = "shown."
CONDITIONS = "conditions."
COUNTS, BLOCK = "counts", "block"
ABOUT = "ttapca"
# Of what conditions look like, in deviations of the source: logarithms over 1e-6 are less; and of
# counts of classes. Squares of more, and sums of these, would be infinite.
LARGEST = 1e12


@dataclass(frozen=True, eq=False)
class StreamState:
    """What was seen of one stream, and what was done with it.

    Attributes:
        seen: What was seen of the components of its images.
        counts: How often each class was predicted of late, shape (classes,); None before that.
        block: Sums of band energies of the images that the alarm judges next, shape (bands,).
        mode: Whether its images are adapted to.
        images, requests, skipped: How many came, and how many requests changed nothing.
        adapted, shadowed, differed: How many images were answered with a filter that changed them,
            were answered in shadow, and have another class there.
        shift: How surely the condition of its last image is a shift, from 0 to 1.
        skew: How surely its classes were not those of the source when nothing had shifted.
        block_images: How many images `block` is of.
        shifted, run: What the alarm says, and for how many blocks it has spoken against that.
        shifted_since, last_seen: Seconds since 1970.
    """

    seen: Seen
    counts: Tensor | None = None
    block: Tensor | None = None
    mode: Mode = "on"
    images: int = 0
    requests: int = 0
    skipped: int = 0
    adapted: int = 0
    shadowed: int = 0
    differed: int = 0
    shift: float = 0.0
    skew: float = 1.0
    block_images: int = 0
    shifted: bool = False
    run: int = 0
    shifted_since: float | None = None
    last_seen: float | None = None

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

    @property
    def latest(self) -> Shown:
        """What images of the condition of the last one have shown, with one row."""
        return self.seen.shown[self.seen.latest]

    @property
    def size(self) -> int:
        """How many bytes it takes in memory, but for a few numbers."""
        shown = sum(each.nbytes for one in self.seen.shown for each in one.tensors().values())
        return shown + (0 if self.seen.conditions is None else self.seen.conditions.nbytes)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        shown, known = Shown.of_each(self.seen.shown), self.seen.conditions
        found = {SHOWN + name: each for name, each in shown.tensors().items()}
        if known is not None:
            found |= {CONDITIONS + name: each for name, each in _tensors(known).items()}
        if self.counts is not None:
            found[COUNTS] = self.counts
        if self.block is not None:
            found[BLOCK] = self.block
        return found

    def to_bytes(self, kind: str) -> bytes:
        """Return the state as a safetensors file; numbers are in its metadata.

        Args:
            kind: Which pools can read it.
        """
        numbers = {each.name: getattr(self, each.name) for each in _NUMBERS}
        conditions = self.seen.conditions
        numbers["latest"] = self.seen.latest
        numbers["unsearched"] = 0 if conditions is None else len(conditions.unsearched)
        # One entry, since safetensors writes several in any order: the same state, the same bytes.
        about = {ABOUT: json.dumps({"format": FORMAT, "kind": kind, "numbers": numbers})}
        return save({name: each.contiguous() for name, each in self.tensors().items()}, about)


_OF_CONDITIONS = ("centres", "weights", "recent")
_NUMBERS = [each for each in fields(StreamState) if each.name not in ("seen", COUNTS, BLOCK)]
_SEEN_NUMBERS = {"latest": "int", "unsearched": "int"}
# By the type of a field: what a number can be, and its largest value. Whoever shows a number that
# cannot be would fail, and with it all that is said of other streams.
_KINDS: dict[str, tuple[Any, float]] = {
    "int": (int, 2**53),  # browsers count no further
    "float": ((int, float), 1),  # how sure something is
    "bool": (bool, True),
    "float | None": ((int, float, type(None)), 1e11),  # seconds since 1970: until the year 5138
}


def read_state(
    data: bytes, kind: str, like: StreamState, bands: int, most_counts: int
) -> StreamState:
    """Return the state that `StreamState.to_bytes` wrote.

    Args:
        data: From anybody: everything in it is checked.
        kind: Which pools can read it.
        like: A new state of such a pool.
        bands: How many bands its filter has.
        most_counts: How many classes there can be.

    Raises:
        SavedStreamError: The bytes are something else, or were written by another kind of pool.
    """
    about = _metadata(data)
    if about.get("format") != FORMAT:
        raise SavedStreamError(f"A saved stream must be of the format `{FORMAT}`; found another.")
    if about.get("kind") != kind:
        raise SavedStreamError(
            "A stream can be restored where the same network and filter are served with the same "
            "options as when it was saved; found a stream of others."
        )
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise SavedStreamError(f"These bytes are no saved stream: {error}.") from error
    numbers = _checked(about.get("numbers"))
    seen = _seen(tensors, numbers, like.seen)
    counts = block = None  # as long as there are none
    some = torch.empty(0, dtype=torch.float64)
    if COUNTS in tensors:
        counts = _taken(tensors, COUNTS, some, range(1, most_counts + 1))
    if BLOCK in tensors:
        block = _taken(tensors, BLOCK, some, (bands,))
    if tensors:
        raise SavedStreamError(f"These bytes are no saved stream: they hold `{min(tensors)}`.")
    return StreamState(seen, counts, block, **numbers)


def _seen(tensors: dict[str, Tensor], numbers: dict[str, Any], like: Seen) -> Seen:
    """Take what was seen out of tensors and numbers."""
    latest, unsearched = numbers.pop("latest"), numbers.pop("unsearched")
    rows = range(1, MOST_STATES + 1)
    tensors_of = {}
    for name, each in like.shown[0].tensors().items():
        tensors_of[name] = _taken(tensors, SHOWN + name, each, rows)
        rows = range(len(tensors_of[name]), len(tensors_of[name]) + 1)  # all have as many
    if latest not in range(rows.start):
        raise SavedStreamError(f"These bytes are no saved stream: `latest` is {latest}.")
    together = Shown(**tensors_of)
    shown = tuple(together.of_stream(row) for row in range(rows.start))
    if like.conditions is None:
        return Seen(shown, None, latest)
    # A stream that was never used has shown nothing, in one row, and has no state.
    states = range(rows.start if bool(together.samples.any()) else 0, MOST_STATES + 1)
    known = {}
    for name, each in _tensors(like.conditions).items():
        lengths = range(RECENT + 1) if name == "recent" else states
        known[name] = _taken(tensors, CONDITIONS + name, each, lengths).numpy()
    if len(known["centres"]) != len(known["weights"]):
        raise SavedStreamError("These bytes are no saved stream: their conditions do not match.")
    return Seen(shown, KnownConditions.of(**known, unsearched=unsearched), latest)


def _tensors(known: KnownConditions) -> dict[str, Tensor]:
    return {name: torch.from_numpy(getattr(known, name)) for name in _OF_CONDITIONS}


def _metadata(data: bytes) -> dict[str, Any]:
    """Return what is said about the tensors; the library of safetensors tells it of files only."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise SavedStreamError("These bytes are no saved stream: they end too early.")
    header = parse_json(data[8 : 8 + length], "a saved stream", SavedStreamError)
    about = header.get("__metadata__") if isinstance(header, dict) else None
    text = about.get(ABOUT) if isinstance(about, dict) else None
    found = parse_json(text, "a saved stream", SavedStreamError) if isinstance(text, str) else None
    return found if isinstance(found, dict) else {}


def _taken(tensors: dict[str, Tensor], name: str, like: Tensor, rows: Container[int]) -> Tensor:
    """Take a tensor out of others; raise unless it is like one, but for so many rows."""
    found = tensors.pop(name, None)
    same = found is not None and found.dtype == like.dtype and found.dim() == like.dim()
    if found is None or not same or found.shape[1:] != like.shape[1:] or len(found) not in rows:
        raise SavedStreamError(f"These bytes are no saved stream: `{name}` has another shape.")
    signed = name.endswith(("mean", "centres", "recent"))
    finite = bool(torch.isfinite(found).all())
    bounded = not name.startswith((CONDITIONS, COUNTS)) or bool((found.abs() <= LARGEST).all())
    if not finite or not bounded or (not signed and bool((found < 0).any())):
        raise SavedStreamError(f"These bytes are no saved stream: `{name}` cannot be like that.")
    return found


def _checked(numbers: Any) -> dict[str, Any]:
    kinds = {each.name: str(each.type) for each in _NUMBERS} | _SEEN_NUMBERS
    if not isinstance(numbers, dict) or numbers.keys() != kinds.keys():
        raise SavedStreamError("These bytes are no saved stream: their numbers have other names.")
    for name, value in numbers.items():
        if name == "mode":
            sound = value in get_args(Mode)
        else:
            kind, most = _KINDS[kinds[name]]
            sound = isinstance(value, kind) and (isinstance(value, bool) == (kind is bool))
            sound = sound and (value is None or 0 <= value <= most)
        if not sound:
            raise SavedStreamError(f"These bytes are no saved stream: `{name}` is {value!r}.")
    return numbers
