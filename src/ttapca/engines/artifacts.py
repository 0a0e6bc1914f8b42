"""`Artifact`: a large object that workers need, in a file that is named by its content."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar, cast
from warnings import catch_warnings

import numpy as np
import torch

from ttapca.errors import EngineError
from ttapca.support.disk import writing

Content = TypeVar("Content")

MAPPED_FROM = 1 << 16  # bytes from which on an array is mapped into memory, which processes share
MOST_OPEN = 8  # artifacts of a process: the workers of a cluster outlive many runs

_opening = RLock()  # an artifact may be part of another
_worker_folders: list[Path] = []  # of this process, if it is the worker of a cluster


@dataclass(frozen=True)
class Artifact(Generic[Content]):
    """Names a written object; it is small, and can be pickled."""

    label: str = field(compare=False)  # in a few words
    digest: str  # the SHA-256 of the file, which is its name as well
    size: int
    folder: Path = field(compare=False)  # of the machine that wrote it

    def open(self) -> Content:
        """Return the content, the same object each time in one process, or raise `EngineError`."""
        with _opening:
            return cast(Content, _content(self))

    def file(self) -> Path | None:
        """Return the file if this process sees one of this name and size."""
        for folder in (self.folder, *_worker_folders):
            path = folder / self.digest
            if path.is_file() and path.stat().st_size == self.size:
                return path
        return None


@lru_cache(MOST_OPEN)
def _content(artifact: Artifact[Any]) -> Any:
    found = artifact.file()
    if found is None:
        raise EngineError(
            f"Every worker must see {artifact.label}; this one does not see "
            f"{artifact.folder / artifact.digest}. Put the results into a folder that all workers "
            "share."
        )
    with found.open("rb") as file:  # it is about to be unpickled, which may run anything
        if hashlib.file_digest(file, "sha256").hexdigest() != artifact.digest:
            raise EngineError(
                f"{found} must be the file that was written: its SHA-256 is its name; this one "
                "is another. Somebody else can write to that folder; choose one of your own."
            )
    return torch.load(found, mmap=True, weights_only=False)


def write_artifact(
    content: Content,
    folder: Path,
    label: str,
    *,
    parts: Mapping[int, Artifact[Any]] | None = None,  # of objects within it, by their `id`
) -> Artifact[Content]:
    """Write an object to an existing folder, best one that all workers see."""
    unfinished = folder / "unfinished"
    with writing(folder):
        try:
            with unfinished.open("wb") as file:  # torch would write the name of a path into it
                torch.save(content, file, _pickling(parts or {}), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise EngineError(
                f"Workers get {label} as a pickle, which cannot be made: {error}. Work in this "
                "process instead."
            ) from error
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = unfinished.stat().st_size
        unfinished.replace(folder / digest)
    return Artifact(label, digest, size, folder.absolute())


def keep_files_in(folder: Path) -> None:
    """Make this process a worker of a cluster, which keeps its files in a folder of its own."""
    _worker_folders[:] = [folder]


def folder_beside(artifact: Artifact[Any]) -> Path:
    """Return a folder for files that workers make of an artifact, shared on one machine."""
    return (*_worker_folders, artifact.folder)[0] / f"{artifact.digest}-files"


def forget(artifact: Artifact[Any]) -> None:
    """Close artifacts, and remove the files that this worker of a cluster has of this one."""
    with _opening:
        _content.cache_clear()  # it has no way to drop one only; others are mapped again
    if _worker_folders:
        (_worker_folders[0] / artifact.digest).unlink(missing_ok=True)
        shutil.rmtree(folder_beside(artifact), ignore_errors=True)


def _pickling(parts: Mapping[int, Artifact[Any]]) -> types.ModuleType:
    """Return a pickle module that writes arrays as tensors, which torch maps, and code by value."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, found: Any) -> Any:
            if id(found) in parts:
                return parts[id(found)].open, ()
            if isinstance(found, np.ndarray) and found.nbytes >= MAPPED_FROM:
                # torch lacks some types of arrays, and warns of arrays that cannot be written to.
                with suppress(TypeError, ValueError), catch_warnings(action="ignore"):
                    return np.asarray, (torch.from_numpy(np.ascontiguousarray(found)),)
            return super().reducer_override(found)

    module = types.ModuleType("mapped_pickle")
    vars(module).update(Pickler=Pickler)
    return module
