"""The states of all streams of a pool: those that were used last in memory, the others on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ttapca.errors import TooManyStreamsError, UnknownStreamError
from ttapca.serving.pool_limits import PoolLimits, check_name
from ttapca.serving.stream_state import StreamState, read_state
from ttapca.serving.stream_store import StreamStore

EVICTED = 0.1  # share of the streams in memory that is put to disk at once
MOST_CLASSES = 1_000_000


class StreamShelf:
    """States by the names of their streams; any thread may call it.

    Args:
        limits: How many streams there may be.
        kind: Which pools can read the states.
        new_state: Returns the state of a stream that has shown nothing.
        store: Where states are kept; without, there is no other place than memory.
    """

    def __init__(
        self,
        limits: PoolLimits,
        kind: str,
        new_state: Callable[[], StreamState],
        store: StreamStore | None,
    ) -> None:
        self._limits, self._kind, self._new_state, self._store = limits, kind, new_state, store
        self._lock = threading.RLock()
        self._saving = threading.Lock()
        self._states: dict[str, StreamState] = {}  # the last used is the last
        self._sizes: dict[str, int] = {}  # of the states in memory, in bytes
        self._memory = 0  # their sum
        self._changed: set[str] = set()  # since they were written to the store
        self._known = set(() if store is None else store.names())

    def __len__(self) -> int:
        """Return how many streams are in memory."""
        return len(self._states)

    def names(self) -> list[str]:
        """Return the names of all streams, in memory or on disk, sorted."""
        with self._lock:
            return sorted(self._known)

    def admit(self, name: str) -> None:
        """Make a stream known, or raise `TooManyStreamsError`."""
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
            self._known.add(name)

    def check_known(self, name: str) -> None:
        """Raise `StreamNameError` or `UnknownStreamError` unless there is such a stream."""
        check_name(name)
        if name not in self._known:
            raise UnknownStreamError(
                f"There is no stream `{name}`; it begins with its first image."
            )

    def known(self, name: str) -> StreamState:
        """Return the state of a stream that is known, or raise as `check_known` does."""
        with self._lock:
            self.check_known(name)
            return self.get(name)

    def get(self, name: str) -> StreamState:
        """Return the state of a stream, from memory, from disk, or a new one."""
        with self._lock:
            state = self._states.get(name)
            if state is None:
                data = None if self._store is None else self._store.read(name)
                state = self._new_state() if data is None else self.read(data)
            return state

    def read(self, data: bytes) -> StreamState:
        """Return the state that `StreamShelf.dump` wrote, or raise `SavedStreamError`."""
        return read_state(data, self._kind, self._new_state(), MOST_CLASSES)

    def dump(self, name: str) -> bytes:
        """Return the whole state of a stream that is known, as a safetensors file."""
        return self.known(name).to_bytes(self._kind)

    def put(self, name: str, state: StreamState) -> None:
        """Replace the state of a stream; of one that was dropped meanwhile, nothing is kept."""
        with self._lock:
            if name in self._known:
                self._forget(name)
                self._states[name] = state  # as the last one
                self._sizes[name] = state.size
                self._memory += self._sizes[name]
                self._changed.add(name)

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
            self._forget(name)
            self._changed.discard(name)
            self._known.discard(name)
            if self._store is not None:
                self._store.drop([name])

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
        with self._lock:
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
                    self._store.write(data)
            except BaseException:
                with self._lock:
                    self._changed.update(states)
                raise
