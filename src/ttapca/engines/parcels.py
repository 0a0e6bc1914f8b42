"""`Parcel`: something large that workers need, in a file that is named by its content.

A task names its parcels, and a worker opens each of them once. Weights, filters and images are
mapped into memory, not read: processes of one machine share them.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ttapca.errors import EngineError, TtapcaError
from ttapca.support.disk import writing

Content = TypeVar("Content")

MAPPED_FROM = 1 << 16  # bytes of an array, from which on it is mapped
MOST_OPEN = 8  # parcels a process; a cluster's workers outlive many runs
READ_AT_ONCE = 1 << 20

_open: OrderedDict[str, Any] = OrderedDict()
_opening = RLock()  # a parcel may be part of another
_worker_folders: list[Path] = []  # of this process, if it is the worker of a cluster


@dataclass(frozen=True)
class Parcel(Generic[Content]):
    """What was packed, for whoever gets this: it is small, and can be pickled.

    Attributes:
        what: The content in a few words, for messages.
        digest: The SHA-256 of the file, which is its name as well.
        size: Of the file, in bytes.
        folder: Where the file is.
        otherwise: Gives the content to a worker that does not see the file, from what it has.
    """

    what: str
    digest: str
    size: int
    folder: str
    otherwise: Callable[[], Content] | None = None

    @property
    def path(self) -> Path:
        """The file, as whoever packed it sees it."""
        return Path(self.folder) / self.digest

    def open(self) -> Content:
        """Return the content, the same object each time in one process.

        Raises:
            EngineError: This process sees no file with it, and cannot get it otherwise.
        """
        with _opening:
            if self.digest not in _open:
                _open[self.digest] = self._opened()
            _open.move_to_end(self.digest)
            content = _open[self.digest]
            while len(_open) > MOST_OPEN:
                _open.popitem(last=False)
        return cast(Content, content)

    def file(self) -> Path | None:
        """Return the file, if this process sees it: where it was packed, or among what it was sent.

        A file of this name and size is taken for it, without reading it all.
        """
        for folder in (Path(self.folder), *_worker_folders):
            path = folder / self.digest
            if path.is_file() and path.stat().st_size == self.size:
                return path
        return None

    def _opened(self) -> Content:
        found = self.file()
        if found is not None:
            content: Content = torch.load(found, mmap=True, weights_only=False)
            return content
        reason = ""
        if self.otherwise is not None:
            try:
                return self.otherwise()
            except TtapcaError as error:
                reason = f", and: {error}"
        raise EngineError(
            f"Every worker must see {self.what}; this one does not see {self.path}{reason or '.'} "
            "Put the results into a folder that all workers share."
        )


def pack(
    content: Content,
    folder: Path,
    what: str,
    *,
    parts: Mapping[int, Parcel[Any]] | None = None,
    otherwise: Callable[[], Content] | None = None,
) -> Parcel[Content]:
    """Write something to a file, for workers to open.

    Args:
        content: Anything that can be pickled; its arrays and tensors are mapped when it is opened.
        folder: An existing folder, best one that all workers see.
        what: The content in a few words, for messages.
        parts: Parcels of objects within it, by their `id`: only their names are written. Lists,
            dicts and the like cannot be parts.
        otherwise: Gives the content to a worker that does not see the file.

    Raises:
        EngineError: It cannot be pickled.
        StorageError: The operating system refuses to write.

    Example:
        >>> import tempfile
        >>> parcel = pack({"numbers": np.arange(3)}, Path(tempfile.mkdtemp()), "some numbers")
        >>> parcel.open()
        {'numbers': array([0, 1, 2])}
        >>> parcel.open() is parcel.open()
        True
    """
    unfinished = folder / "unfinished"
    with writing(folder):
        try:
            with unfinished.open("wb") as file:  # torch would write the name of a path into it
                torch.save(content, file, _pickling(parts or {}), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise EngineError(
                f"Workers get {what} as a pickle, which cannot be made: {error}. Work in this "
                "process instead."
            ) from error
        digest = hashlib.sha256()
        with unfinished.open("rb") as file:
            while part := file.read(READ_AT_ONCE):
                digest.update(part)
        size = unfinished.stat().st_size
        unfinished.replace(folder / digest.hexdigest())
    return Parcel(what, digest.hexdigest(), size, str(folder.absolute()), otherwise)


def keep_files_in(folder: Path) -> None:
    """Make this process a worker of a cluster, which keeps its files in a folder of its own."""
    _worker_folders[:] = [folder]


def folder_beside(parcel: Parcel[Any]) -> Path:
    """Return a folder for files that a worker makes of a parcel, as long as there is work for it.

    On a cluster each worker has one of its own; processes of one machine share one.
    """
    return _files_in(_worker_folders[0] if _worker_folders else Path(parcel.folder), parcel)


def _files_in(folder: Path, parcel: Parcel[Any]) -> Path:
    return folder / f"{parcel.digest}-files"


def forget(parcel: Parcel[Any]) -> None:
    """Close a parcel, and remove what this worker of a cluster was sent or has made of it."""
    with _opening:
        _open.pop(parcel.digest, None)
    for folder in _worker_folders:
        (folder / parcel.digest).unlink(missing_ok=True)
        shutil.rmtree(_files_in(folder, parcel), ignore_errors=True)


def _pickling(parts: Mapping[int, Parcel[Any]]) -> types.ModuleType:
    """Return what `torch.save` takes as its pickle module.

    It writes arrays as tensors, which torch maps; and functions and classes that a worker cannot
    import, such as those of a script or a notebook, as they are.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, found: Any) -> Any:
            if id(found) in parts:
                return parts[id(found)].open, ()
            if isinstance(found, np.ndarray) and found.nbytes >= MAPPED_FROM and _plain(found):
                return _array, (_tensor(found),)
            return super().reducer_override(found)

    module = types.ModuleType("mapped_pickle")
    vars(module).update(Pickler=Pickler)
    return module


def _plain(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "buif" and array.dtype.isnative and array.dtype.itemsize <= 8


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():  # of arrays that cannot be written to: nobody will
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.ascontiguousarray(array))


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.numpy()
