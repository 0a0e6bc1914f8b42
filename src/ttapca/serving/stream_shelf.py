"""The states of all streams of a pool: those that were used last in memory, the others on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ttapca.errors import (
    DamagedStreamError,
    SavedStreamError,
    TooManyStreamsError,
    UnknownStreamError,
)
from ttapca.serving.pool_limits import PoolLimits
from ttapca.serving.stream_names import check_name
from ttapca.serving.stream_record import StreamRecord, read_record
from ttapca.serving.stream_store import StreamStore

EVICTED = 0.1  # share of the streams in memory that is put to disk at once
LOOKED_AT = 20  # streams on disk that are read before a store is taken for one of another kind


class Place:
    """What a request holds of a stream that it may begin."""


class StreamShelf:
    """States by the names of their streams; any thread may call it.

    Args:
        limits: How many streams there may be.
        kind: Which pools can read the states.
        new_record: Returns the state of a stream that has shown nothing.
        store: Where states are kept; without, there is no other place than memory.

    Raises:
        SavedStreamError: The store keeps streams of another network or filter.
    """

    def __init__(
        self,
        limits: PoolLimits,
        kind: str,
        new_record: Callable[[], StreamRecord],
        store: StreamStore | None,
    ) -> None:
        self._limits, self._kind = limits, kind
        self._new_record, self._store = new_record, store
        self._lock = threading.RLock()
        self._saving = threading.Lock()
        self._states: dict[str, StreamRecord] = {}  # the last used is the last
        self._sizes: dict[str, int] = {}  # of the states in memory, in bytes
        self._memory = 0  # their sum
        self._changed: set[str] = set()  # since they were written to the store
        # Streams that have no state yet, and the places of the requests that may give them one.
        self._coming: dict[str, set[Place]] = {}
        self._known = set(() if store is None else store.names())
        self._shifted = set(() if store is None else store.shifted())
        if store is not None and self._known:
            self._check_kind(store)

    def _check_kind(self, store: StreamStore) -> None:
        """Look for a stream on disk that can be read: all were written by pools of one kind.

        One that is damaged must not keep all others from going on.
        """
        for name in sorted(self._known)[:LOOKED_AT]:
            try:
                self._stored(name, store)
                return
            except DamagedStreamError as error:
                found = error
        raise SavedStreamError(
            f"A pool goes on with streams of its own network and filter; {store.path} keeps "
            f"others. {found.__cause__} Use the network and filter that it was begun with, or "
            "another file."
        ) from found

    def __len__(self) -> int:
        """Return how many streams are in memory."""
        return len(self._states)

    def names(self, shifted: bool | None = None) -> list[str]:
        """Return the names of streams, in memory or on disk, sorted.

        Args:
            shifted: Only those that have shifted, or only those that have not; None for all.
        """
        with self._lock:
            if shifted is None:
                return sorted(self._known)
            return sorted(self._shifted if shifted else self._known - self._shifted)

    def admit(self, name: str) -> Place:
        """Make a stream known, or raise `TooManyStreamsError`.

        It stays known once `put` was called. Whoever will not call that gives the place back.
        """
        most = self._limits.max_streams
        if self._store is None:
            most = min(most, self._limits.max_resident)
        with self._lock:
            if name not in self._known and len(self._known) >= most:
                raise TooManyStreamsError(
                    f"There may be at most {most:,} streams, and there are; `{name}` would be one "
                    "more. Drop some that are over."
                )
            if name not in self._known and self._store is None and self._is_full():
                raise TooManyStreamsError(
                    f"All streams may take {self._limits.max_memory:,} bytes, and they do; "
                    f"`{name}` would be one more. Drop some that are over, or keep them in a "
                    "`StreamStore`."
                )
            place = Place()
            if name in self._coming or name not in self._known:
                self._coming.setdefault(name, set()).add(place)
            self._known.add(name)
            return place

    def withdraw(self, name: str, place: Place) -> None:
        """Give back the place of a request that came to nothing, and forget a stream of no other.

        Args:
            name: Of the stream.
            place: From `admit`.
        """
        with self._lock:
            waiting = self._coming.get(name, set())
            if place in waiting:
                waiting.remove(place)
                if not waiting:
                    del self._coming[name]
                    self._known.discard(name)

    def check_known(self, name: str) -> None:
        """Raise `StreamNameError` or `UnknownStreamError` unless there is such a stream."""
        check_name(name)
        if name not in self._known:
            raise UnknownStreamError(
                f"There is no stream `{name}`; it begins with its first image."
            )

    def known(self, name: str) -> StreamRecord:
        """Return the state of a stream that is known, or raise as `check_known` does."""
        with self._lock:
            self.check_known(name)
            return self.get(name)

    def get(self, name: str) -> StreamRecord:
        """Return the state of a stream, from memory, from disk, or a new one.

        Raises:
            StorageError: The disk cannot be read.
            DamagedStreamError: What it holds of the stream is damaged.
        """
        with self._lock:
            state = self._states.get(name)
            if state is None and self._store is not None:
                state = self._stored(name, self._store)
            return self._new_record() if state is None else state

    def _stored(self, name: str, store: StreamStore) -> StreamRecord | None:
        data = store.read(name)
        try:
            return None if data is None else self.read(data)
        except SavedStreamError as error:  # of whoever sends bytes; these are ours
            raise DamagedStreamError(
                f"The stream `{name}` in {store.path} is damaged: {error} Drop it to begin anew."
            ) from error

    def read(self, data: bytes) -> StreamRecord:
        """Return the state that `StreamShelf.dump` wrote, or raise `SavedStreamError`."""
        return read_record(data, self._kind, self._new_record())

    def dump(self, name: str) -> bytes:
        """Return the whole state of a stream that is known, as a safetensors file."""
        return self.known(name).to_bytes(self._kind)

    def put(self, name: str, state: StreamRecord) -> bool:
        """Replace the state of a stream; return False if it was dropped meanwhile, and is not kept.

        What else is known of such a stream must not be kept either.
        """
        with self._lock:
            if name not in self._known:
                return False
            self._forget(name)
            self._states[name] = state  # as the last one
            self._sizes[name] = state.state.nbytes
            self._memory += self._sizes[name]
            self._changed.add(name)
            (self._shifted.add if state.shifted else self._shifted.discard)(name)
            self._coming.pop(name, None)
            return True

    def _forget(self, name: str) -> None:
        """Let go of a state in memory, if it is there."""
        self._states.pop(name, None)
        self._memory -= self._sizes.pop(name, 0)

    def _is_full(self) -> bool:
        return self._memory >= self._limits.max_memory

    def drop(self, name: str) -> None:
        """Forget a stream that is known, also on disk."""
        with self._saving, self._lock:
            self.check_known(name)
            if self._store is not None:
                self._store.drop([name])  # first: where this fails, the stream stays
            self._forget(name)
            self._changed.discard(name)
            self._known.discard(name)
            self._shifted.discard(name)
            self._coming.pop(name, None)

    def make_room(self, coming: int, save: Callable[[], None]) -> None:
        """Put the streams to disk that were not used for longest, where there would be too many.

        Args:
            coming: How many streams are about to be used.
            save: Calls `save`, and takes care of its errors: what could not be saved stays.
        """
        most = self._limits.max_resident
        fits = len(self._states) + coming <= most and not self._is_full()
        if self._store is None or fits:
            return
        keep = max(0, int(most * (1 - EVICTED)) - coming)
        memory = self._limits.max_memory * (1 - EVICTED)
        idle: list[str] = []
        with self._lock:
            left, used = len(self._states), self._memory
            for name in self._states:  # those that were not used for longest come first
                if left <= keep and used <= memory:
                    break
                idle.append(name)
                left, used = left - 1, used - self._sizes[name]
        save()
        # Nobody else may be saving: what is being written counts as unchanged, and is not on disk.
        with self._saving, self._lock:
            for name in idle:
                if name not in self._changed:
                    self._forget(name)

    def save(self) -> None:
        """Write all states that have changed to the store, in one transaction."""
        if self._store is None:
            return
        with self._saving:
            with self._lock:
                states = {name: self._states[name] for name in self._changed}
                self._changed.clear()
            try:
                if states:
                    data = {name: state.to_bytes(self._kind) for name, state in states.items()}
                    shifted = [name for name, state in states.items() if state.shifted]
                    self._store.write(data, shifted)
            except BaseException:
                with self._lock:
                    self._changed.update(states)
                raise
