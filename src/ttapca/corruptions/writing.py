"""Write a corrupted data set in the layout of CIFAR-10-C and CIFAR-100-C.

One `.npy` a corruption: uint8, the blocks of all severities one after another; and `labels.npy`,
the labels repeated as often. A run that was killed goes on where it stopped, file by file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions import files
from ttapca.corruptions.apply import check_images, corrupt
from ttapca.corruptions.manifest import MANIFEST, Manifest, digest
from ttapca.corruptions.pixels import Pixels
from ttapca.corruptions.registry import CORRUPTIONS, find
from ttapca.corruptions.table import CIFAR_C, SEVERITIES, load_table
from ttapca.corruptions.textures import load_textures
from ttapca.corruptions.workers import completed
from ttapca.errors import ShapeError, StorageError
from ttapca.support.disk import locked, make_folder, writing

LABELS = "labels.npy"
_IMAGES_A_TASK = 1000  # about a third of a second of work: often enough to show progress

Progress = Callable[[str, int, int], None]
"""Called with a corruption's name, its images done, and its images in all."""


@dataclass(frozen=True)
class Task:
    """A stretch of one block of one file: images `first` to `last` - 1 at one severity."""

    corruption: str
    severity: int
    block: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)  # arrays have no single answer to ==
class Export:
    """A data set to write: what, how, and where to.

    Attributes:
        images: Clean, uint8, (n, height, width, 3).
        labels: (n,), from 0 to 255.
        to: The folder.
        corruptions: Names, one file each.
        severities: Blocks of each file, ascending.
        seed: Of the random numbers.
        table: Name or path of the table of severities.
        textures: The folder of frost's photographs.

    Example:
        >>> import tempfile
        >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export = Export(images, np.array([0, 1]), Path(folder), ("contrast",))
        ...     export.run()
        ...     np.load(Path(folder) / "contrast.npy").shape
        (10, 32, 32, 3)
    """

    images: Pixels
    labels: NDArray[np.integer[Any]]
    to: Path
    corruptions: tuple[str, ...] = CORRUPTIONS
    severities: tuple[int, ...] = SEVERITIES
    seed: int = 0
    table: str | Path = CIFAR_C
    textures: Path | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each file."""
        return (len(self.severities) * len(self.images), *self.images.shape[1:])

    def path(self, corruption: str) -> Path:
        """The file of one corruption."""
        return self.to / f"{corruption}.npy"

    def missing(self) -> tuple[str, ...]:
        """The corruptions whose files are not there, or not whole."""
        return tuple(
            name for name in self.corruptions if not files.is_whole(self.path(name), self.shape)
        )

    def bytes_needed(self) -> int:
        """How much disk the missing files and the labels will take."""
        sizes = [files.npy_size(self.shape)] * len(self.missing())
        if not files.is_whole(self.to / LABELS, self.shape[:1]):
            sizes.append(files.npy_size(self.shape[:1]))
        return sum(sizes)

    def bytes_free(self) -> int:
        """How much disk there is, once a killed run's leavings are gone."""
        existing = next(each for each in (self.to, *self.to.absolute().parents) if each.exists())
        left = sum(each.stat().st_size for each in self.to.glob(".*.partial"))
        return shutil.disk_usage(existing).free + left

    def check(self) -> None:
        """Find everything that can be wrong before the first byte is written.

        Raises:
            PixelTypeError: The images are not uint8.
            ShapeError: Images or labels have another shape than the rule demands.
            OptionError: No such corruption, severity or table; or the folder holds another run.
            DataNotFoundError: Frost is asked for and has no photographs.
        """
        check_images(self.images)
        if not len(self.images):
            raise ShapeError("A data set must hold at least one image; found none.")
        if self.labels.shape != (len(self.images),):
            raise ShapeError(
                f"Labels must be one an image, ({len(self.images)},); found {self.labels.shape}."
            )
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() <= 255:
            raise ShapeError(
                "The layout stores labels as uint8, from 0 to 255; found "
                f"{self.labels.min()} to {self.labels.max()}."
            )
        for name in self.corruptions:  # an empty batch goes through every check of `corrupt`
            for severity in self.severities:
                corrupt(self.images[:0], name, severity, self.seed, table=self.table, textures=())
        if any(find(name).needs_textures for name in self.missing()):
            load_textures(self.textures)
        if self.to.is_dir():
            self.manifest().check(self.to)

    def check_space(self) -> None:
        """Compare the disk that is needed with the disk that there is.

        Raises:
            StorageError: There is less.
        """
        needed, free = self.bytes_needed(), self.bytes_free()
        if needed > free:
            raise StorageError(
                f"{self.to} needs {needed:,} bytes of disk; {free:,} are free. Free some, choose "
                "another folder, or ask for fewer corruptions or severities."
            )

    def manifest(self) -> Manifest:
        """What decides the bytes of the files."""
        table = load_table(self.table)
        return Manifest(
            images=len(self.images),
            images_sha256=digest(self.images),
            labels_sha256=digest(self.labels.astype(np.uint8)),
            severities=self.severities,
            seed=int(self.seed),
            table=table.name,
            table_sha256=table.digest,
        )

    def run(self, jobs: int = 1, progress: Progress | None = None) -> None:
        """Write every file that is not there yet.

        Whatever ends the run, each file that has its own name is whole, and the others are gone;
        after `kill -9`, the next run clears them away.

        Args:
            jobs: How many processes share the work; the bytes do not depend on it.
            progress: Called after each stretch of work.

        Raises:
            StorageError: There is too little disk, or the folder cannot be written or is in use.
                Also all errors of `check`.
        """
        self.check()
        self.check_space()
        make_folder(self.to)
        with writing(self.to), locked(self.to):
            files.remove_partials(self.to)
            try:
                self._write(jobs, progress or (lambda _name, _done, _total: None))
            finally:
                files.remove_partials(self.to)

    def _write(self, jobs: int, progress: Progress) -> None:
        if not (self.to / MANIFEST).exists():
            files.write_whole(self.to / MANIFEST, self.manifest().dumps())
        labels = np.tile(self.labels.astype(np.uint8), len(self.severities))
        if not files.is_whole(self.to / LABELS, labels.shape):
            files.write_whole(self.to / LABELS, files.npy_header(labels.shape) + labels.tobytes())
        done = dict.fromkeys(self.missing(), 0)
        # Closed at once when something goes wrong, so that no process writes on meanwhile.
        with closing(completed(self.write_task, self._tasks(tuple(done)), jobs)) as tasks:
            for task in tasks:
                done[task.corruption] += task.last - task.first
                if done[task.corruption] == self.shape[0]:
                    files.finish(self.path(task.corruption))
                progress(task.corruption, done[task.corruption], self.shape[0])

    def _tasks(self, names: Sequence[str]) -> Iterator[Task]:
        """Tasks in order; each file is begun just before its first one is handed out."""
        count = len(self.images)
        for name in names:
            files.reserve(self.path(name), self.shape)
            for block, severity in enumerate(self.severities):
                for first in range(0, count, _IMAGES_A_TASK):
                    yield Task(name, severity, block, first, min(first + _IMAGES_A_TASK, count))

    def write_task(self, task: Task) -> None:
        """Do one stretch of work; in whatever process."""
        rows = corrupt(
            self.images[task.first : task.last],
            task.corruption,
            task.severity,
            self.seed,
            start=task.first,
            table=self.table,
            textures=self.textures,
        )
        first = task.block * len(self.images) + task.first
        files.write_rows(self.path(task.corruption), self.shape, first, rows)
