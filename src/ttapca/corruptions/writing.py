"""Write a corrupted data set in the layout of CIFAR-10-C and CIFAR-100-C.

One `.npy` for each corruption: uint8, the blocks of all severities one after another; and
`labels.npy`, the labels repeated as often. `corruptions.json` beside them says what they were made
from, so that two runs never mix in a folder. A file grows under a hidden name and gets its own when
it is whole: a run that was killed goes on where it stopped, file by file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca import __version__
from ttapca._checks import ListOf, Record, Text, Whole, conform, shown
from ttapca.corruptions.apply import check_images, corrupt
from ttapca.corruptions.catalogue import CIFAR_C, CORRUPTIONS, SEVERITIES, find, load_table
from ttapca.corruptions.pixels import Pixels
from ttapca.corruptions.weather import load_textures
from ttapca.corruptions.workers import completed
from ttapca.errors import DataFormatError, OptionError, ShapeError, StorageError
from ttapca.support.disk import STAGING_MARK, flush, locked, make_folder, replace_file, writing
from ttapca.support.parsing import parse_json, read_bounded

LABELS = "labels.npy"
MANIFEST = "corruptions.json"
_IMAGES_A_TASK = 1000  # about a third of a second of work: often enough to show progress
_SHA256 = Text(64)
_MANIFEST_RULE = Record(
    {
        "images": Whole(0),
        "images_sha256": _SHA256,
        "labels_sha256": _SHA256,
        "severities": ListOf(Whole(1, 5), 1, 5),
        "seed": Whole(0),
        "table": Text(),
        "table_sha256": _SHA256,
        "version": Text(100),
    }
)

FileProgress = Callable[[str, int, int], None]
"""Called with a corruption's name, its images done, and its images in all."""


@dataclass(frozen=True)
class _Task:
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

    The others are as for `corrupt`.

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
        return tuple(name for name in self.corruptions if not _whole(self.path(name), self.shape))

    def bytes_needed(self) -> int:
        """How much disk the missing files and the labels will take."""
        sizes = [_npy_size(self.shape)] * len(self.missing())
        if not _whole(self.to / LABELS, self.shape[:1]):
            sizes.append(_npy_size(self.shape[:1]))
        return sum(sizes)

    def bytes_free(self) -> int:
        """How much disk there is, once the unfinished files of a killed run are gone."""
        existing = next(each for each in (self.to, *self.to.absolute().parents) if each.exists())
        left = sum(each.stat().st_size for each in _unfinished(self.to))
        return shutil.disk_usage(existing).free + left

    def check(self) -> None:
        """Find everything that can be wrong before the first byte is written.

        Raises:
            PixelTypeError: The images are not uint8.
            ShapeError: Images or labels have another shape than the rule demands.
            OptionError: No such corruption, severity or table; or the folder holds another run.
            DataNotFoundError: Frost is asked for and has no photographs.
            DataFormatError: What the folder says about its files cannot be read.
        """
        check_images(self.images)
        if not len(self.images):
            raise ShapeError("A data set must hold at least one image; found none.")
        if self.labels.shape != (len(self.images),):
            raise ShapeError(
                f"There must be one label for each image, ({len(self.images)},); found "
                f"{self.labels.shape}."
            )
        if not 0 <= self.labels.min() <= self.labels.max() <= 255:
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
            check_manifest(self.to, self.manifest())

    def manifest(self) -> dict[str, Any]:
        """Everything that decides the bytes of the files, except which corruptions there are."""
        table = load_table(self.table)
        return {
            "images": len(self.images),
            "images_sha256": _digest(self.images),
            "labels_sha256": _digest(self.labels.astype(np.uint8)),
            "severities": list(self.severities),
            "seed": int(self.seed),
            "table": table.name,
            "table_sha256": table.digest,
            "version": __version__,
        }

    def run(self, jobs: int = 1, progress: FileProgress | None = None) -> None:
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
        if not (self.to / MANIFEST).exists():
            manifest = json.dumps(self.manifest(), indent=2) + "\n"
            replace_file(self.to / MANIFEST, manifest.encode())
        labels = np.tile(self.labels.astype(np.uint8), len(self.severities))
        if not _whole(self.to / LABELS, labels.shape):
            replace_file(self.to / LABELS, _npy_header(labels.shape) + labels.tobytes())
        done = dict.fromkeys(self.missing(), 0)
        # Closed at once when something goes wrong, so that no process writes on meanwhile.
        with closing(completed(self._do, self._tasks(tuple(done)), jobs)) as tasks:
            for task in tasks:
                done[task.corruption] += task.last - task.first
                if done[task.corruption] == self.shape[0]:
                    _finish(self.path(task.corruption))
                progress(task.corruption, done[task.corruption], self.shape[0])

    def _tasks(self, names: Sequence[str]) -> Iterator[_Task]:
        """Tasks in order; each file is begun just before its first one is handed out."""
        count = len(self.images)
        for name in names:
            _reserve(self.path(name), self.shape)
            for block, severity in enumerate(self.severities):
                for first in range(0, count, _IMAGES_A_TASK):
                    yield _Task(name, severity, block, first, min(first + _IMAGES_A_TASK, count))

    def _do(self, task: _Task) -> None:
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
        row = task.block * len(self.images) + task.first
        with _growing(self.path(task.corruption)).open("r+b") as file:
            file.seek(len(_npy_header(self.shape)) + row * int(np.prod(self.shape[1:])))
            file.write(rows.tobytes())


def check_manifest(folder: Path, now: dict[str, Any]) -> None:
    """Compare what files shall be made from with what the folder was begun with.

    Raises:
        OptionError: The folder was begun with other options, or not by this library.
        DataFormatError: Its manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.exists():
        strangers = sorted(each.name for each in folder.glob("*.npy"))
        if strangers:
            raise OptionError(
                f"Corrupted images go to a folder of their own; {folder} has no {MANIFEST} and "
                f"holds {strangers[0]} from elsewhere. Choose another folder."
            )
        return
    where = f"{MANIFEST} must be the one that a run wrote; {path}"
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


def _growing(path: Path) -> Path:
    """Where a file grows until it is whole; hidden, and no `.npy` for a reader to find."""
    return path.with_name(f".{path.name}{STAGING_MARK}")


def _unfinished(folder: Path) -> list[Path]:
    return list(folder.glob(f".*{STAGING_MARK}"))


def _remove_unfinished(folder: Path) -> None:
    for path in _unfinished(folder):
        path.unlink(missing_ok=True)


def _npy_header(shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    description = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def _npy_size(shape: tuple[int, ...]) -> int:
    return len(_npy_header(shape)) + int(np.prod(shape))


def _whole(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether an `.npy` file of uint8 has this shape and every byte of it."""
    header = _npy_header(shape)
    if not path.is_file() or path.stat().st_size != _npy_size(shape):
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _reserve(path: Path, shape: tuple[int, ...]) -> None:
    """Begin an `.npy` file and claim its space, so that a full disk shows now and not halfway."""
    size = _npy_size(shape)
    with _growing(path).open("wb") as file:
        file.write(_npy_header(shape))
        file.flush()
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # not on every system
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # nor every file system
                    raise


def _finish(path: Path) -> None:
    """Give a file its own name, once its bytes are on the disk."""
    growing = _growing(path)
    flush(growing)
    growing.replace(path)
    flush(path.parent)
