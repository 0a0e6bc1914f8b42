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
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ttapca import __version__
from ttapca._checks import ListOf, Record, Text, Whole, check_option, conform, shown
from ttapca.corruptions.apply import check_images, corrupt
from ttapca.corruptions.catalogue import SEVERITIES, SeverityTable, default_table, load_table
from ttapca.corruptions.pixels import Pixels
from ttapca.datasets.cifar import LABELS_FILE, MANIFEST_FILE
from ttapca.engines import Lost, engine_of
from ttapca.errors import DataFormatError, OptionError, ShapeError, TtapcaError
from ttapca.support.disk import (
    STAGING_MARK,
    check_space,
    flush,
    locked,
    make_folder,
    replace_file,
    writing,
)
from ttapca.support.parsing import parse_json, read_bounded

_PIXELS_PER_TASK = 1000 * 32 * 32  # about a third of a second: often enough to show progress
_LARGEST_LABEL = 2**16 - 1
_SEVERITIES_RULE = ListOf(Whole(1, 5), 1, 5)
_MANIFEST_RULE = Record(
    {
        "images": Whole(0),
        "images_sha256": Text(64),
        "labels_sha256": Text(64),
        "severities": _SEVERITIES_RULE,
        "seed": Whole(0),
        "table": Text(),
        "table_sha256": Text(64),
        "version": Text(100),
    }
)

# Called with a corruption's name, how many of its images are done, and how many there are.
FileProgress = Callable[[str, int, int], object]


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
    """A data set to write; seed, table and textures are as for `corrupt`."""

    images: Pixels  # clean ones, (n, height, width, 3)
    labels: NDArray[np.integer[Any]]  # (n,), from 0 to 65,535
    to: Path
    corruptions: tuple[str, ...]
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

    def path(self, corruption: str) -> Path:
        """Return the file of a corruption."""
        return self.to / f"{corruption}.npy"

    def missing(self) -> tuple[str, ...]:
        """Return the corruptions whose files are not there, or not whole."""
        return tuple(name for name in self.corruptions if not _whole(self.path(name), self.shape))

    def run(
        self, jobs: int = 1, progress: FileProgress = lambda _name, _done, _total: None
    ) -> None:
        """Write every file that is missing, by this many processes.

        Whatever ends the run, each file under its final name is whole and the others are removed;
        after `kill -9` the next run removes them. `progress` is called after each part of the work.
        """
        manifest = self._check()
        make_folder(self.to)
        with writing(self.to), locked(self.to):
            self._remove_unfinished()
            try:
                check_space(self.to, len(self.missing()) * int(np.prod(self.shape)))
                self._write(jobs, progress, manifest)
            finally:
                self._remove_unfinished()

    def _check(self) -> dict[str, Any]:
        """Raise whatever can be wrong before the first byte is written; return the manifest."""
        check_images(self.images)
        check_option("corruptions", list(self.corruptions), ListOf(Text(), 1))
        check_option("severities", list(self.severities), _SEVERITIES_RULE)
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
        manifest = self._manifest()
        if self.to.is_dir():
            check_manifest(self.to, manifest)
        return manifest

    def _manifest(self) -> dict[str, Any]:
        """Return everything that decides the bytes of a file, except its corruption."""
        table = self.severity_table
        return {
            "images": len(self.images),
            "images_sha256": _digest(self.images),
            "labels_sha256": _digest(self._stored_labels()),
            "severities": list(self.severities),
            "seed": int(self.seed),
            "table": table.name,
            "table_sha256": table.digest,
            "version": __version__,
        }

    def _stored_labels(self) -> NDArray[np.uint8 | np.uint16]:
        """Return the labels of one severity, as they are stored."""
        return self.labels.astype(np.uint8 if self.labels.max() <= 255 else np.uint16)

    def _write(self, jobs: int, progress: FileProgress, manifest: dict[str, Any]) -> None:
        if not (self.to / MANIFEST_FILE).exists():
            replace_file(self.to / MANIFEST_FILE, (json.dumps(manifest, indent=2) + "\n").encode())
        labels = np.tile(self._stored_labels(), len(self.severities))
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
                    flush(ending.task.file)
                    ending.task.file.replace(self.path(name))
                    flush(self.to)
                progress(name, done[name], self.shape[0])

    def _tasks(self, names: tuple[str, ...]) -> Iterator[_Task]:
        """Yield the tasks in order; each file is started just before its first task."""
        count, (height, width) = len(self.images), self.images.shape[1:3]
        each = max(1, _PIXELS_PER_TASK // (height * width))
        options: dict[str, Any] = {"table": self.table, "textures": self.textures}
        for name in names:
            file = self.to / f".{name}.npy{STAGING_MARK}"  # hidden: readers look for `.npy`
            offset = np.lib.format.open_memmap(file, "w+", np.uint8, self.shape).offset
            for severity in self.severities:
                for first in range(0, count, each):
                    images = self.images[first : first + each]
                    make = partial(
                        corrupt, images, name, severity, self.seed, start=first, **options
                    )
                    yield _Task(name, len(images), make, file, offset)
                    offset += images.nbytes

    def _remove_unfinished(self) -> None:
        for path in self.to.glob(f".*{STAGING_MARK}"):
            path.unlink()


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


def _whole(path: Path, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> bool:
    """Tell whether an `.npy` file has this shape and type, and every byte of it."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError):  # not there, empty, or cut short
        return False
    return bool(found.shape == shape and found.dtype == dtype)
