"""`ImageShelf`: images that one process makes, and that others map into their memory."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.support.disk import queued

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImageShelf:
    """A folder of arrays of pixels.

    Whoever wants an array first makes it; whoever wants it meanwhile waits. An array that was
    removed to make room stays in the memory of those who use it, and is made again if need be.

    Args:
        folder: It is made where there is none.
        most: How many arrays are kept at most.
    """

    folder: Path
    most: int

    def get(self, name: str, count: int, make: Callable[[], Iterable[Pixels]]) -> Pixels:
        """Return the array of a name, which may be read-only.

        Args:
            name: Says everything that the pixels depend on.
            count: How many images it has.
            make: Gives the images, some at a time, if nobody has made them.
        """
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()}.npy"
        try:
            with contextlib.suppress(FileNotFoundError):
                return _mapped(path)
            self.folder.mkdir(parents=True, exist_ok=True)
            with queued(path.with_suffix(".lock")):
                with contextlib.suppress(FileNotFoundError):
                    return _mapped(path)
                unfinished = path.with_suffix(".unfinished")
                try:
                    _write(unfinished, count, make())
                    unfinished.replace(path)
                finally:  # a disk that is full now has to hold the results as well
                    unfinished.unlink(missing_ok=True)
                self._make_room()
                return _mapped(path)
        except OSError:  # no room on the disk, perhaps: there may be some in memory
            return np.concatenate(list(make()))

    def _make_room(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process makes room as well
            arrays = sorted(self.folder.glob("*.npy"), key=lambda path: path.stat().st_mtime)
            for path in arrays[: -self.most]:
                path.unlink(missing_ok=True)


def _write(path: Path, count: int, parts: Iterable[Pixels]) -> None:
    # Not through a memory map, which ends the process if the disk is full.
    with path.open("wb") as file:
        for number, part in enumerate(parts):
            if number == 0:
                header = {"descr": "|u1", "fortran_order": False, "shape": (count, *part.shape[1:])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(np.ascontiguousarray(part).data)


def _mapped(path: Path) -> Pixels:
    pixels: Pixels = np.load(path, mmap_mode="r")
    return pixels
