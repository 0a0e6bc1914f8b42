"""The subject of a comparison: the network, its filter, and the test images."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca.benchmark.rows import CLEAN, Fingerprint
from ttapca.corruptions import CIFAR_C, IMAGENET_C, default_table, load_table, load_textures
from ttapca.corruptions.apply import corrupt_any_size, needs_photographs
from ttapca.corruptions.sensors import DEGRADATIONS, degrade
from ttapca.datasets import Choice, Images, Series, Split, choose, read_cifar_c
from ttapca.errors import DataFormatError, NotEnoughDataError, OptionError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.store import TENSORS
from ttapca.networks.source import fingerprint
from ttapca.support.disk import queued

Condition = tuple[str, int]  # a corruption and its severity
Pixels = NDArray[Any]  # of images uint8, of series floats

ENDS = 50  # images at either end of a corruption whose pixels are compared


@dataclass(eq=False)
class Subject:
    """The network, the filter and the images of a comparison."""

    name: str  # the network's, as the user gave it
    network: nn.Module  # after every run it is as it was before
    data: str
    source: ImageSource
    fitted: FittedFilter | None = None  # with at least as many components as the plan asks for
    # The name of a filter that was given, or the route that was asked for; empty for the one that
    # is fitted on the training images by the usual route.
    filter_name: str = ""
    # Options of methods that are objects and not text, and how a `Cell` names them; by method.
    provided: dict[str, dict[str, Any]] = field(default_factory=dict)
    stated: dict[str, dict[str, str]] = field(default_factory=dict)
    fingerprints: tuple[Fingerprint, ...] = ()  # compared with those in a file of results
    # The last test spectrum and the images it belongs to: methods in a row share it.
    spectrum: tuple[object, Tensor] | None = field(default=None, init=False, repr=False)

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the network, which tells it from others of the same name."""
        return fingerprint(self.network)

    def filter(self, components: int) -> FittedFilter:
        """Return the filter with its first components; raise if there is none, or has fewer."""
        if self.fitted is None:
            raise OptionError("This comparison needs a fitted filter; found none.")
        if components == self.fitted.n_components_:
            return self.fitted
        return self.fitted.truncated(components)


@dataclass(frozen=True)
class ImageCache:
    """A folder of arrays of pixels, which processes map into their memory.

    The process that needs an array first makes it; others wait. A removed array stays in their
    memory.
    """

    folder: Path
    most: int  # arrays that are kept

    def get(self, name: str, count: int, make: Callable[[], Iterable[Pixels]]) -> Pixels:
        """Return `count` images, perhaps read-only; all that they depend on is in the name."""
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()}.npy"
        try:
            if not path.exists():
                self._fill(path, count, make)
            pixels: Pixels = np.load(path, mmap_mode="r")
            return pixels
        except OSError:  # no room on the disk, perhaps: there may be some in memory
            return np.concatenate(list(make()))

    def _fill(self, path: Path, count: int, make: Callable[[], Iterable[Pixels]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with queued(path.with_suffix(".lock")):
            if path.exists():  # another process has made it meanwhile
                return
            unfinished = path.with_suffix(".unfinished")
            try:
                _write_array(unfinished, count, make())
                unfinished.replace(path)
            finally:  # a disk that is full now has to hold the results as well
                unfinished.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process makes room as well
                arrays = sorted(self.folder.glob("*.npy"), key=lambda each: each.stat().st_mtime)
                for old in arrays[: -self.most]:
                    old.unlink(missing_ok=True)


def _write_array(path: Path, count: int, parts: Iterable[Pixels]) -> None:
    # Not through a memory map, which ends the process if the disk is full.
    with path.open("wb") as file:
        for number, part in enumerate(parts):
            if number == 0:
                shape, descr = (count, *part.shape[1:]), part.dtype.str
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(np.ascontiguousarray(part).data)


@dataclass(eq=False)
class ImageSource:
    """The test images of a data set, clean and corrupted; those of the last request are kept.

    Args:
        clean: The test images; all of them are used.
        folder: A folder in the CIFAR-C layout; None to make the corrupted images in memory.
        seed: For making corrupted images.
        textures: The folder with the photographs of frost.
        rows: Which of all test images the clean ones are; the first ones by default.
        cache: Shares the images that several processes make.
        table: The severities of corrupted images made in memory, as for `ttapca.corruptions`.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> source = ImageSource(read_digits()[:50])
        >>> source.images([("fog", 5), ("clean", 0)])
        Images(100 of 8x8x1, 10 classes)
    """

    clean: Images
    folder: Path | None = None
    seed: int = 0
    textures: Path | None = None
    rows: NDArray[np.int64] | None = None
    cache: ImageCache | None = None
    table: str | None = None
    _kept: tuple[tuple[Condition, ...], Images] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """Where corrupted images come from, as a `Cell` says it."""
        if self.folder is not None:
            return self.folder.name
        if isinstance(self.clean, Series):
            return f"generated, seed {self.seed}"
        table = self.table or default_table(*self.clean.images.shape[1:3])
        with_table = "" if table == CIFAR_C else f" with {table}"
        if table not in (CIFAR_C, IMAGENET_C):  # another file may have its name
            loaded = load_table(table)
            with_table = f" with {loaded.name} {loaded.digest[:8]}"
        return f"generated{with_table}, seed {self.seed}"

    def check(self, conditions: Sequence[Condition]) -> None:
        """Raise now if photographs or files are missing, which would stop a run hours later."""
        corrupted = [condition for condition in conditions if condition[0] != CLEAN]
        self.check_names(name for name, _ in corrupted)
        if isinstance(self.clean, Series):
            return  # nothing is read
        if self.folder is not None:
            for condition in corrupted:
                self._read(self.folder, *condition)
        elif any(needs_photographs(self.clean.images, name, self.table) for name, _ in corrupted):
            load_textures(self.textures)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise if images are to have degradations of sensors, or series corruptions of images."""
        series = isinstance(self.clean, Series)
        if series and self.folder is not None:
            raise OptionError("`corrupted=` is a folder of images; found series. Leave it out.")
        wrong = [each for each in names if each != CLEAN and (each in DEGRADATIONS) != series]
        if wrong:
            kind, other = ("Series", "images") if series else ("Images", "series")
            own = f"`sensors` or {', '.join(DEGRADATIONS)}" if series else "`standard` or others"
            raise OptionError(
                f"{kind} take {own}; found `{wrong[0]}`, which is for {other}. Name some of these."
            )

    def images(self, conditions: Sequence[Condition]) -> Images:
        """Return all images of the first condition, followed by all of the next."""
        wanted = tuple(conditions)
        if self._kept is None or self._kept[0] != wanted:
            self._kept = None  # before the new ones are made: there may not be room for both
            self._kept = (wanted, self._joined(wanted))
        return self._kept[1]

    def _joined(self, wanted: tuple[Condition, ...]) -> Images:
        stored = self.folder is not None or wanted[0][0] == CLEAN
        if len(wanted) == 1 and (stored or self.cache is None):
            return self._condition(*wanted[0])

        def parts() -> Iterator[Pixels]:
            return (self._condition(*condition).images for condition in wanted)

        if self.cache is None:
            pixels = np.concatenate(list(parts()))
        else:
            pixels = self.cache.get(repr(wanted), len(wanted) * len(self.clean), parts)
        labels = np.tile(self.clean.labels, len(wanted))
        return self._with(pixels, labels)

    def _condition(self, corruption: str, severity: int) -> Images:
        if corruption == CLEAN:
            return self.clean
        if self.folder is not None:
            return self._read(self.folder, corruption, severity)
        of_images = partial(corrupt_any_size, table=self.table, textures=self.textures)
        make: Callable[..., Pixels] = degrade if isinstance(self.clean, Series) else of_images
        pixels = make(self.clean.images, corruption, severity, self.seed)
        return self._with(pixels, self.clean.labels)

    def _with(self, pixels: Pixels, labels: NDArray[np.int64]) -> Images:
        return replace(self.clean, images=pixels, labels=labels)

    def _read(self, folder: Path, corruption: str, severity: int) -> Images:
        found = read_cifar_c(folder, corruption, severity, class_names=self.clean.class_names)
        count = len(self.clean)
        if len(found) < count:
            raise NotEnoughDataError(
                f"{folder} must hold the {count} test images that are asked for; it has "
                f"{len(found)} of `{corruption}` {severity}. Ask for fewer with `images`."
            )
        if self.rows is not None and len(found) > int(self.rows.max()):
            found = found.subset(self.rows)
        if not np.array_equal(found.labels[:count], self.clean.labels):
            raise DataFormatError(
                f"{folder} must hold the test images of the data set in the same order; the labels "
                f"of `{corruption}` differ. Name the folder that belongs to the data set."
            )
        return found[:count]


def choose_measured(labels: NDArray[np.int64], count: int | None, split: Split) -> Choice:
    """Choose the measured images: of training images the last, as methods learn from the first."""
    return choose(labels, count, order="stored", last=split == "train")


def images_fingerprint(subject: Subject) -> Fingerprint:
    """Return the fingerprint of the clean images: all their pixels and labels count."""
    clean, name = subject.source.clean, subject.data
    return Fingerprint(name, len(clean), clean.fingerprint(), "images", name)


def corrupted_fingerprints(subject: Subject, conditions: Iterable[Condition]) -> list[Fingerprint]:
    """Return the fingerprints of a folder of corrupted images; none if they are made in memory."""
    # The first and last images of each condition count: all of them may be gigabytes.
    folder = subject.source.folder
    found = []
    for condition in dict.fromkeys(conditions if folder else ()):
        images, (name, severity) = subject.source.images([condition]), condition
        # No data set has such a name: theirs are last parts of paths, without a slash.
        key = "/".join(("corrupted", subject.data, subject.source.name, f"{name} {severity}"))
        digest = images[:ENDS].fingerprint() + images[-ENDS:].fingerprint()
        place = f"{subject.source.name}/{name} {severity}"
        found.append(Fingerprint(key, len(images), digest, "corrupted images", place))
    return found


def filter_fingerprint(subject: Subject, folder: Path) -> Fingerprint:
    """Return the fingerprint of a saved filter: all its tensors count."""
    name, layer = subject.filter_name, subject.fitted.layer if subject.fitted else ""
    digest = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    key = "/".join(("filter", subject.weights, layer, name))
    return Fingerprint(key, 0, digest, "filter", name)
