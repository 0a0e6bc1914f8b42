"""An LRU cache of stream records over a store: the streams used last are in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TypeAlias

from ttapca import errors
from ttapca.serving.batched_network import FilteredImage
from ttapca.serving.limits import PoolLimits
from ttapca.serving.stream_record import StreamRecord, check_name, read_record
from ttapca.serving.stream_store import StreamStore

# Is called with the names of all streams before a new one begins; an error refuses it.
Admission: TypeAlias = Callable[[Collection[str]], None]
EVICTED = 0.1  # share of the streams in memory that is evicted at once
IMAGES = 32  # streams whose last image is kept to be shown
LOOKED_AT = 200  # streams on disk that are read before a store is taken for one of another kind


class StreamCache:
    """Records by the names of their streams; any thread may call it."""

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
        self._records: dict[str, StreamRecord] = {}  # the last used is the last
        self._sizes: dict[str, int] = {}  # of the records in memory, in bytes
        self._memory = 0  # their sum
        self._changed: set[str] = set()  # since they were written to the store
        self._images: OrderedDict[str, FilteredImage] = OrderedDict()  # the last used is the last
        # Requests for streams without a record, which are known as long as one of these may come.
        self._reservations: dict[str, set[object]] = {}
        self._known = set(() if store is None else store.names())
        self._shifted = set(() if store is None else store.shifted())
        if store is not None and self._known:
            self._check_kind(store)

    def _check_kind(self, store: StreamStore) -> None:
        """Read streams until one is whole: a damaged one must not keep the others from going on."""
        names = sorted(self._known)  # some of everywhere: damage lies side by side
        for name in names[:: 1 + len(names) // LOOKED_AT]:
            try:
                self._stored(name, store)
                return
            except errors.DamagedStreamError as error:
                found = error
        raise errors.SavedStreamError(
            f"A pool goes on with streams of its own network and filter; {store.path} keeps "
            f"others. {found.__cause__} Use its own network and filter, or another file."
        ) from found

    def __len__(self) -> int:
        """Return how many streams are in memory."""
        return len(self._records)

    def names(self, shifted: bool | None = None) -> list[str]:
        """Return the names of streams, sorted: all, the shifted ones, or the others."""
        with self._lock:
            if shifted is None:
                return sorted(self._known)
            return sorted(self._shifted if shifted else self._known - self._shifted)

    def reserve(self, name: str, request: object, admit: Admission | None = None) -> None:
        """Make a stream known for a request, or raise; call `put` or `release` then."""
        most = self._limits.max_streams
        if self._store is None:
            most = min(most, self._limits.max_resident)
        with self._lock:
            new = name not in self._known
            if new and len(self._known) >= most:
                raise errors.TooManyStreamsError(
                    f"There may be at most {most:,} streams; `{name}` is one more. Drop some."
                )
            if new and self._store is None and self._memory >= self._limits.max_memory:
                raise errors.TooManyStreamsError(
                    f"All streams may take {self._limits.max_memory:,} bytes, and they do; "
                    f"`{name}` would be one more. Drop some, or keep them in a `StreamStore`."
                )
            self.check_admission(name, admit)
            if new or name in self._reservations:
                self._reservations.setdefault(name, set()).add(request)
            self._known.add(name)

    def check_admission(self, name: str, admit: Admission | None) -> None:
        """Raise the error with which `admit` refuses the stream, if it is new."""
        with self._lock:
            if name not in self._known and admit is not None:
                admit(self._known)

    def release(self, name: str, request: object) -> None:
        """Give up a request; a stream that has neither a record nor another one is unknown."""
        with self._lock:
            others = self._reservations.get(name, set())
            if request in others:
                others.remove(request)
                if not others:
                    del self._reservations[name]
                    self._known.discard(name)

    def check_known(self, name: str) -> None:
        """Raise `StreamNameError` or `UnknownStreamError` unless there is such a stream."""
        check_name(name)
        if name not in self._known:
            raise errors.UnknownStreamError(
                f"There is no stream `{name}`; it begins with its first image."
            )

    def known(self, name: str) -> StreamRecord:
        """Return the record of a stream that is known, or raise as `check_known` does."""
        with self._lock:
            self.check_known(name)
            return self.get(name)

    def get(self, name: str) -> StreamRecord:
        """Return the record of a stream, from memory, from disk, or a new one."""
        with self._lock:
            record = self._records.get(name)
            if record is None and self._store is not None:
                record = self._stored(name, self._store)
            return self._new_record() if record is None else record

    def _stored(self, name: str, store: StreamStore) -> StreamRecord | None:
        try:
            data = store.read(name)
            return None if data is None else self.parse(data)
        except errors.SavedStreamError as error:  # a caller's fault, but these bytes are ours
            raise errors.DamagedStreamError(
                f"The stream `{name}` in {store.path} is damaged: {error} Drop it to begin anew."
            ) from error

    def parse(self, data: bytes) -> StreamRecord:
        """Return the record in a file, or raise `SavedStreamError`."""
        return read_record(data, self._kind, self._new_record())

    def put(self, name: str, record: StreamRecord, image: FilteredImage | None = None) -> None:
        """Replace record and last image of a stream, unless it was dropped meanwhile."""
        with self._lock:
            if name not in self._known:
                return
            self._evict(name)
            self._records[name] = record  # as the last one
            self._sizes[name] = record.state.nbytes
            self._memory += self._sizes[name]
            self._changed.add(name)
            (self._shifted.add if record.shifted else self._shifted.discard)(name)
            self._reservations.pop(name, None)
            if image is not None:
                self._images[name] = image
                self._images.move_to_end(name)
                if len(self._images) > IMAGES:
                    self._images.popitem(last=False)

    def last_image(self, name: str) -> FilteredImage | None:
        """Return the last image of a stream that is known, if it is kept."""
        with self._lock:
            self.check_known(name)
            return self._images.get(name)

    def _evict(self, name: str) -> None:
        self._records.pop(name, None)
        self._memory -= self._sizes.pop(name, 0)

    def drop(self, name: str) -> None:
        """Forget a stream that is known, also on disk."""
        with self._saving, self._lock:
            self.check_known(name)
            if self._store is not None:
                self._store.drop([name])  # first: if this fails, the stream stays
            self._evict(name)
            for names in (self._changed, self._known, self._shifted):
                names.discard(name)
            self._reservations.pop(name, None)
            self._images.pop(name, None)

    def make_room(self, coming: int, save: Callable[[], None]) -> None:
        """Evict the streams that were not used for longest, if `coming` more would be too many."""
        most = self._limits.max_resident
        full = len(self._records) + coming > most or self._memory >= self._limits.max_memory
        if self._store is None or not full:
            return
        keep = max(0, int(most * (1 - EVICTED)) - coming)
        memory = self._limits.max_memory * (1 - EVICTED)
        idle: list[str] = []
        with self._lock:
            left, used = len(self._records), self._memory
            for name in self._records:  # the longest unused comes first
                if left <= keep and used <= memory:
                    break
                idle.append(name)
                left, used = left - 1, used - self._sizes[name]
        save()  # without raising: an unsaved record stays in memory
        # While another thread saves, its records count as unchanged and are not on disk yet.
        with self._saving, self._lock:
            for name in idle:
                if name not in self._changed:
                    self._evict(name)

    def save(self) -> None:
        """Write all records that have changed to the store, in one transaction."""
        if self._store is None:
            return
        with self._saving:
            with self._lock:
                records = {name: self._records[name] for name in self._changed}
                self._changed.clear()
            try:
                if records:
                    data = {name: record.to_bytes(self._kind) for name, record in records.items()}
                    shifted = [name for name, record in records.items() if record.shifted]
                    self._store.write(data, shifted)
            except BaseException:
                with self._lock:
                    self._changed.update(records)
                raise
