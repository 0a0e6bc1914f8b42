"""Many streams over one model: one is in place, the others are parked, and any can be saved."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttapca._checks import shown
from ttapca.adaptation.health import Health, health_of
from ttapca.errors import SavedStreamError
from ttapca.spectral.state_files import SavedStream, read_saved
from ttapca.spectral.stream import STATE, Stream, map_tensors, shift_of
from ttapca.support.disk import replace_file
from ttapca.support.modules import device_and_dtype

if TYPE_CHECKING:
    from ttapca.adaptation.adapter import Adapter

DEFAULT_STREAM = "default"
# The counts that every stream keeps, and their names in the file of a service.
COUNTS = {"samples": "images", "batches": "requests", "images": "images", "skipped": "skipped"}


class Streams:
    """All streams of one adapter, which threads use in turn."""

    def __init__(self, memory: float) -> None:
        self.stream = Stream(memory)  # the current one, which surfaces and predictor use
        self.current: str | None = DEFAULT_STREAM  # its name; None after an interrupted switch
        self.parked: dict[str, dict[str, Any]] = {}  # the contents of all others, by name
        # Held by the thread whose turn it is. It is used by `with` directly: a context manager
        # written in Python could be interrupted after it took the lock.
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock out: copies and pickles do not share it."""
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a new lock."""
        vars(self).update(state, lock=threading.RLock())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all streams, the adapter's default stream first."""
        current = () if self.current is None else (self.current,)
        return tuple(dict.fromkeys((DEFAULT_STREAM, *self.parked, *current)))

    def switch_to(self, name: str) -> None:
        """Park the current stream and put another in place; a new one starts from the source."""
        if name == self.current:
            return
        # An interrupt may come at any line. Until the new stream is in place nothing is current,
        # and both are parked: the next switch begins again, and loses neither.
        with torch.inference_mode(False):
            if self.current is not None:
                self.parked[self.current] = self.stream.contents()
                self.current = None
            if name in self.parked:
                self.stream.put(self.parked[name])
            else:
                self.stream.reset()
            self.current = name
            self.parked.pop(name, None)

    def start_over(self, name: str, contents: dict[str, Any] | None = None) -> None:
        """Let a stream begin anew, or continue with other contents."""
        # It is taken out of its place first: an interrupt leaves it as before, or parked with the
        # other contents, and the next switch puts it in place.
        self.switch_to(name)
        self.parked.pop(name, None)
        if contents is not None:
            self.parked[name] = contents
        self.current = None
        self.switch_to(name)

    def values_of(self, name: str) -> dict[str, Any]:
        """Return the values of a stream, without creating it or switching to it."""
        if name == self.current:
            return self.stream.values
        if name in self.parked:
            return dict(self.parked[name]["values"])
        start = self.stream.start
        return self.stream.starts if start is None else {**self.stream.starts, STATE: start}

    def contents(self) -> dict[str, dict[str, Any]]:
        """Return the contents of all streams by name, not copied."""
        self.switch_to(self.current or DEFAULT_STREAM)
        return {**self.parked, str(self.current): self.stream.contents()}

    def put(self, contents: Mapping[str, dict[str, Any]], current: str) -> None:
        """Continue with these streams instead."""
        self.current, self.parked = None, dict(contents)
        self.switch_to(current)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert all tensors, when the adapter is moved or cast."""
        self.stream.apply(fn)
        self.parked = map_tensors(self.parked, fn)

    def to_tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the files of all streams by name, as bytes; `put_tensors` reads them."""
        return {
            name: torch.frombuffer(bytearray(_to_bytes(contents, kind)), dtype=torch.uint8)
            for name, contents in self.contents().items()
        }

    def put_tensors(
        self, files: Mapping[str, Tensor], current: str, kind: str, device: torch.device
    ) -> None:
        """Continue with the streams that `to_tensors` returned."""
        streams = {
            name: self.of_bytes(data.cpu().numpy().tobytes(), kind, f"stream {name}", device)
            for name, data in files.items()
        }
        self.put(streams, current)

    def of_bytes(self, data: bytes, kind: str, name: str, device: torch.device) -> dict[str, Any]:
        """Return the contents of a stream in a file of `_to_bytes` or a service, if they fit."""
        stream = self.stream
        saved = read_saved(data, kind, stream.start, name)
        like = stream.contents()
        like["values"].pop(STATE, None)
        found = dict(saved.other)
        if not found:  # of a service, which keeps nothing else of a method
            found = stream.started()
            found["values"] |= _counts(saved.facts, name)
        _compare(found, like, stream.growing, name)
        if saved.state is not None:
            found["values"] = {**found["values"], STATE: saved.state}
        moved: dict[str, Any] = map_tensors(found, lambda tensor: tensor.to(device))
        return moved


class NamedStream:
    """One of the streams of an adapter, which take turns; calling it predicts and adapts."""

    def __init__(self, adapter: Adapter, streams: Streams, name: str) -> None:
        self._adapter, self._streams, self.name = adapter, streams, name

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """Predict, and adapt this stream; see `Adapter.forward`."""
        return self._adapter.predict_for(self.name, inputs, options)

    def __repr__(self) -> str:
        """Return one line for a person."""
        seen = f"{self.samples:,} samples in {self.batches:,} batches"
        return f"NamedStream({self.name!r}, {seen}, shift {self.shift:.2f})"

    @property
    def samples(self) -> int:
        """How many samples it has seen since it started."""
        return int(self._values()["samples"])

    @property
    def batches(self) -> int:
        """How many batches it has seen since it started."""
        return int(self._values()["batches"])

    @property
    def shift(self) -> float:
        """How surely its data have shifted, from 0 to 1; 1 if the method cannot tell."""
        return shift_of(self._values().get(STATE))

    @property
    def health(self) -> Health:
        """The health of the stream, computed now; see `Health`."""
        return health_of(self._adapter, self.name)

    def _values(self) -> dict[str, Any]:
        with self._streams.lock:
            return self._streams.values_of(self.name)

    def reset(self) -> None:
        """Start it anew."""
        with self._streams.lock:
            self._streams.start_over(self.name)

    def start_condition(self) -> None:
        """Say that its data change from here on; see `Adapter.start_condition`."""
        if self._adapter.forgetting != "continual":
            self.reset()

    def drop(self) -> None:
        """Forget the stream and its name; the adapter's default stream starts anew instead."""
        with self._streams.lock:
            self._streams.switch_to(DEFAULT_STREAM)
            if self.name == DEFAULT_STREAM:
                self.reset()
            self._streams.parked.pop(self.name, None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole stream to a file, or replace one; it is never half written."""
        with self._streams.lock:
            data = _to_bytes(self._contents(), self._adapter.kind)
        replace_file(Path(path), data)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue, bit for bit, where `save` of the same kind of adapter wrote this file."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise SavedStreamError(f"{path} cannot be read: {error}.") from error
        device, _ = device_and_dtype(self._adapter.model, self._adapter.model)
        with self._streams.lock:
            found = self._streams.of_bytes(data, self._adapter.kind, str(path), device)
            before = self._contents()
            try:
                self._streams.start_over(self.name, found)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                self._streams.parked[self.name] = before
                self._streams.switch_to(self.name)
                raise SavedStreamError(f"{path} is no saved stream: {error!r}.") from error

    def _contents(self) -> dict[str, Any]:
        with self._streams.lock, torch.inference_mode(False):
            self._streams.switch_to(self.name)
            return self._streams.stream.contents()


def _to_bytes(contents: Mapping[str, Any], kind: str) -> bytes:
    """Return the contents of a stream of this kind of adapter as the content of a file."""
    values = dict(contents["values"])
    state = values.pop(STATE, None)
    return SavedStream(kind, state, {"values": values, "parts": contents["parts"]}).to_bytes()


def _counts(facts: Mapping[str, Any], path: str) -> dict[str, int]:
    found = {each: facts.get(name, 0) for each, name in COUNTS.items()}
    for each, count in found.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 2**53:
            raise SavedStreamError(f"{path} is no saved stream: `{each}` is {shown(count)}.")
    return found


def _compare(found: Any, like: Mapping[str, Any], growing: Collection[str], path: str) -> None:
    """Refuse other names or shapes: the file may come from anywhere."""
    for group in ("values", "parts"):
        here, known = found.get(group), like[group]
        if not isinstance(here, Mapping) or here.keys() != known.keys():
            raise SavedStreamError(f"{path} is no saved stream: its {group} have other names.")
        for name, value in here.items():
            if not _fits(value, known[name], grows=name in growing):
                raise SavedStreamError(
                    f"{path} is no saved stream: `{name}` has another shape than in this adapter."
                )


def _fits(found: Any, like: Any, *, grows: bool = False) -> bool:
    """Return whether one may replace the other; None may become a tensor later."""
    if found is None or like is None:
        return True
    if isinstance(like, Tensor):
        rows = 1 if grows else 0  # how many dimensions may differ
        same = isinstance(found, Tensor) and found.dim() == like.dim()
        return same and found.shape[rows:] == like.shape[rows:]
    if isinstance(like, Mapping):
        if not isinstance(found, Mapping):
            return False
        return all(_fits(found[name], like[name]) for name in found.keys() & like.keys())
    if isinstance(like, tuple | list):  # which may grow, as the window of a guard does
        return type(found) is type(like) and all(map(partial(_fits, grows=grows), found, like))
    return isinstance(found, int | float)
