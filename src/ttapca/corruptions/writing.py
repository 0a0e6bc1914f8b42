"""Write a corrupted data set in the layout of CIFAR-10-C and CIFAR-100-C.

Each corruption has one `.npy` file: uint8, with the images of all severities one after another.
`labels.npy` repeats the labels as often, in uint8, or in uint16 if one is above 255.
`corruptions.json` records what the files were made from, so that two runs never mix in a folder. A
file is written under a hidden name and renamed when it is whole, so a run that was killed goes on
with the files that are missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ttapca import __version__
from ttapca._checks import ListOf, Record, Text, Whole, conform, shown
from ttapca.corruptions.apply import check_images, corrupt
from ttapca.corruptions.catalogue import (
    CORRUPTIONS,
    SEVERITIES,
    SeverityTable,
    default_table,
    load_table,
)
from ttapca.corruptions.pixels import Pixels
from ttapca.datasets.cifar import LABELS_FILE, MANIFEST_FILE
from ttapca.engines import Lost, engine_of
from ttapca.errors import DataFormatError, OptionError, ShapeError, StorageError, TtapcaError
from ttapca.support.disk import STAGING_MARK, flush, locked, make_folder, replace_file, writing
from ttapca.support.parsing import parse_json, read_bounded

_PIXELS_PER_TASK = 1000 * 32 * 32  # about a third of a second: often enough to show progress
_LARGEST_LABEL = 2**16 - 1
_HEADER_BYTES = 128  # that numpy writes before an array of images or labels
_MANIFEST_RULE = Record(
    {
        "images": Whole(0),
        "images_sha256": Text(64),
        "labels_sha256": Text(64),
        "severities": ListOf(Whole(1, 5), 1, 5),
        "seed": Whole(0),
        "table": Text(),
        "table_sha256": Text(64),
        "version": Text(100),
    }
)

FileProgress = Callable[[str, int, int], None]
"""Called with a corruption's name, how many of its images are done, and how many there are."""


class _Task(NamedTuple):
    """A few images to corrupt, and their place in a file."""

    corruption: str
    images: int  # how many
    make: Callable[[], Pixels]
    file: Path
    offset: int  # bytes

    def run(self) -> None:
        """Corrupt the images, and write them to their place."""
        content = self.make().tobytes()
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            file.write(content)


@dataclass(frozen=True, eq=False)  # == has no single answer for arrays
class Export:
    """A data set to write; seed, table and textures are as for `corrupt`.

    Example:
        >>> import tempfile
        >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export = Export(images, np.array([0, 1]), Path(folder), ("contrast",))
        ...     export.run()
        ...     np.load(Path(folder) / "contrast.npy").shape
        (10, 32, 32, 3)
    """

    images: Pixels  # clean ones, (n, height, width, 3)
    labels: NDArray[np.integer[Any]]  # (n,), from 0 to 65,535
    to: Path
    corruptions: tuple[str, ...] = CORRUPTIONS
    severities: tuple[int, ...] = SEVERITIES  # ascending
    seed: int = 0
    table: str | Path | None = None
    textures: Path | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each file."""
        return (len(self.severities) * len(self.images), *self.images.shape[1:])

    @property
    def severity_table(self) -> SeverityTable:
        """The table that is used: the one asked for, or that of the images' size."""
        return load_table(self.table or default_table(*self.images.shape[1:3]))

    @property
    def stored_labels(self) -> NDArray[np.uint8 | np.uint16]:
        """The labels of one severity, as they are stored."""
        return self.labels.astype(np.uint8 if self.labels.max() <= 255 else np.uint16)

    def path(self, corruption: str) -> Path:
        """Return the file of a corruption."""
        return self.to / f"{corruption}.npy"

    def missing(self) -> tuple[str, ...]:
        """Return the corruptions whose files are not there, or not whole."""
        return tuple(name for name in self.corruptions if not _whole(self.path(name), self.shape))

    def bytes_needed(self) -> int:
        """Return how much disk the missing files and the labels will take."""
        needed = len(self.missing()) * _npy_size(self.shape)
        labels = self.stored_labels.dtype
        whole = _whole(self.to / LABELS_FILE, self.shape[:1], labels)
        return needed if whole else needed + _npy_size(self.shape[:1], labels)

    def bytes_free(self) -> int:
        """Return how much disk is free, counting the unfinished files of a killed run."""
        existing = next(each for each in (self.to, *self.to.absolute().parents) if each.exists())
        left = sum(each.stat().st_size for each in _unfinished(self.to))
        return shutil.disk_usage(existing).free + left

    def check(self) -> None:
        """Raise whatever can be wrong before the first byte is written."""
        check_images(self.images)
        if not len(self.images):
            raise ShapeError("A data set must hold at least one image; found none.")
        if self.labels.shape != (len(self.images),):
            raise ShapeError(
                f"There must be one label for each image, ({len(self.images)},); found "
                f"{self.labels.shape}."
            )
        if not 0 <= self.labels.min() <= self.labels.max() <= _LARGEST_LABEL:
            raise ShapeError(
                f"The layout stores labels from 0 to {_LARGEST_LABEL:,}; found "
                f"{self.labels.min()} to {self.labels.max()}."
            )
        none, missing = self.images[:0], self.missing()
        for name in self.corruptions:  # an empty batch goes through every check of `corrupt`
            textures = self.textures if name in missing else ()
            for severity in self.severities:
                corrupt(none, name, severity, self.seed, table=self.table, textures=textures)
        if self.to.is_dir():
            check_manifest(self.to, self.manifest())

    def manifest(self) -> dict[str, Any]:
        """Return everything that decides the bytes of a file, except its corruption."""
        table = self.severity_table
        return {
            "images": len(self.images),
            "images_sha256": _digest(self.images),
            "labels_sha256": _digest(self.stored_labels),
            "severities": list(self.severities),
            "seed": int(self.seed),
            "table": table.name,
            "table_sha256": table.digest,
            "version": __version__,
        }

    def run(self, jobs: int = 1, progress: FileProgress | None = None) -> None:
        """Write every file that is missing, by this many processes.

        Whatever ends the run, each file under its final name is whole and the others are removed;
        after `kill -9` the next run removes them. `progress` is called after each part of the work.
        """
        self.check()
        needed, free = self.bytes_needed(), self.bytes_free()
        if needed > free:
            raise StorageError(
                f"{self.to} needs {needed:,} bytes of disk; {free:,} are free. Free some, choose "
                "another folder, or ask for fewer corruptions or severities."
            )
        make_folder(self.to)
        with writing(self.to), locked(self.to):
            _remove_unfinished(self.to)
            try:
                self._write(jobs, progress or (lambda _name, _done, _total: None))
            finally:
                _remove_unfinished(self.to)

    def _write(self, jobs: int, progress: FileProgress) -> None:
        if not (self.to / MANIFEST_FILE).exists():
            manifest = json.dumps(self.manifest(), indent=2) + "\n"
            replace_file(self.to / MANIFEST_FILE, manifest.encode())
        labels = np.tile(self.stored_labels, len(self.severities))
        if not _whole(self.to / LABELS_FILE, labels.shape, labels.dtype):
            content = BytesIO()
            np.save(content, labels)
            replace_file(self.to / LABELS_FILE, content.getvalue())
        done = dict.fromkeys(self.missing(), 0)
        engine = engine_of(f"joblib:{jobs}" if jobs > 1 else None)
        # Closed at once when something goes wrong, so that no process goes on writing.
        with closing(engine.run(self._tasks(tuple(done)), _Task.run)) as endings:
            for ending in endings:
                if isinstance(ending, Lost):
                    raise TtapcaError(
                        f"Every process must live until its work is done; {ending.reason}. "
                        "Finished files are kept: run the same command again, with fewer jobs if "
                        "it happens again."
                    )
                name = ending.task.corruption
                done[name] += ending.task.images
                if done[name] == self.shape[0]:
                    path = self.path(name)
                    flush(_staging(path))
                    _staging(path).replace(path)
                    flush(self.to)
                progress(name, done[name], self.shape[0])

    def _tasks(self, names: Sequence[str]) -> Iterator[_Task]:
        """Yield the tasks in order; each file is started just before its first task."""
        count, (height, width) = len(self.images), self.images.shape[1:3]
        each = max(1, _PIXELS_PER_TASK // (height * width))
        for name in names:
            file = _staging(self.path(name))
            offset = _start(file, self.shape)
            for severity in self.severities:
                for first in range(0, count, each):
                    images = self.images[first : first + each]
                    make = partial(
                        corrupt,
                        images,
                        name,
                        severity,
                        self.seed,
                        start=first,
                        table=self.table,
                        textures=self.textures,
                    )
                    yield _Task(name, len(images), make, file, offset)
                    offset += images.nbytes


def check_manifest(folder: Path, now: dict[str, Any]) -> None:
    """Raise an error unless a folder is empty or its files were made from the same things."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        strangers = sorted(each.name for each in folder.glob("*.npy"))
        if strangers:
            raise OptionError(
                f"Corrupted images need a folder without other `.npy` files; {folder} has no "
                f"{MANIFEST_FILE} and holds {strangers[0]} from elsewhere. Choose another folder."
            )
        return
    where = f"{MANIFEST_FILE} must be the one that a run wrote; {path}"
    before = parse_json(read_bounded(path, DataFormatError), where, DataFormatError)
    conform(before, _MANIFEST_RULE, where, DataFormatError)
    for name, value in now.items():
        if before[name] != value:
            raise OptionError(
                f"A folder holds files of one run only; {folder} was begun with "
                f"{name} = {shown(before[name])}, and now it is {shown(value)}. Choose "
                "another folder, or delete this one."
            )


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _staging(path: Path) -> Path:
    """Return the hidden name of a file that is not whole; readers look for `.npy`."""
    return path.with_name(f".{path.name}{STAGING_MARK}")


def _unfinished(folder: Path) -> list[Path]:
    return list(folder.glob(f".*{STAGING_MARK}"))


def _remove_unfinished(folder: Path) -> None:
    for path in _unfinished(folder):
        path.unlink()


def _npy_size(shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> int:
    return _HEADER_BYTES + int(np.prod(shape)) * np.dtype(dtype).itemsize


def _whole(path: Path, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> bool:
    """Tell whether an `.npy` file has this shape and type, and every byte of it."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError):  # not there, empty, or cut short
        return False
    return bool(found.shape == shape and found.dtype == dtype)


def _start(path: Path, shape: tuple[int, ...]) -> int:
    """Start an `.npy` file, and return the place of its first image."""
    offset: int = np.lib.format.open_memmap(path, "w+", np.uint8, shape).offset
    return offset
