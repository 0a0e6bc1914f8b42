"""Images in many files, each of which can be read by itself, by any process that sees it.

A shard is an `.npy` or `.npz` of images, a folder of pictures, or a WebDataset `.tar`.
"""

from __future__ import annotations

import dataclasses
import glob
import mmap
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Whole, check_option, shown
from ttapca.datasets.images import to_tensor
from ttapca.datasets.pictures import (
    PICTURE_SUFFIXES,
    PictureSize,
    class_folders,
    open_picture,
    picture_pixels,
    pictures_in,
    read_picture,
)
from ttapca.datasets.reading import map_npy, npz_shape, parse_npy, read_npz_arrays, reading
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError
from ttapca.support.progress import counted

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 256
MOST_CHANNELS = 4
LARGEST_FLOAT = 8  # bytes; torch knows no larger one
LABELS = ".labels.npy"  # instead of `.npy`, for the labels of an array of images
# The endings of files in a tar file.
ARRAY, LABEL = "npy", "cls"
IMAGES = frozenset({suffix.removeprefix(".") for suffix in PICTURE_SUFFIXES} | {ARRAY})
LONGEST_LABEL = 18  # digits of the number of a class
MOST_PADDING = 2**20  # bytes of zeros at the end of a tar file

COUNTED_AT_ONCE = 8  # tar files, whose headers lie scattered: most of the time is waiting
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST_IN_A_RANGE = 10_000_000

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard(ABC):
    """One file or folder of images, which yields batches as a loader does.

    A batch is a tensor of images, or a pair of images and labels if the shard has labels. Images of
    bytes become float32 in [0, 1] with channels first; arrays of floating-point numbers stay as
    they are.

    Attributes:
        path: Its place.
        samples: How many images it has.
        batch_size: Images in a batch; the last one may have fewer.
        pictures: The size that pictures are brought to.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "part-0.npy"
        >>> np.save(path, np.zeros((3, 8, 8, 1), np.uint8))
        >>> shard = ArrayShard(path, samples=3, batch_size=2, pictures=PictureSize())
        >>> [tuple(batch.shape) for batch in shard]
        [(2, 1, 8, 8), (1, 1, 8, 8)]
    """

    path: Path
    samples: int
    batch_size: int
    pictures: PictureSize

    def __len__(self) -> int:
        """Return the number of images."""
        return self.samples

    def __str__(self) -> str:
        """Return the path."""
        return str(self.path)

    def check(self) -> None:
        """Raise `DataNotFoundError` in a process that does not see the shard."""
        if not self.path.exists():
            raise DataNotFoundError(
                f"A worker must see the shards that it reads; there is no {self.path} here. Put it "
                "into a folder that all workers share."
            )

    @abstractmethod
    def count(self) -> int:
        """Look at the shard, and return how many images it has."""

    @abstractmethod
    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield batches."""


class ArrayShard(Shard):
    """An `.npy` or `.npz` of images: bytes (n, height, width, channels), or floats (n, ...).

    An `.npz` calls them `images`, and may have `labels`. The labels of `part-7.npy` may be beside
    it, in `part-7.labels.npy`.
    """

    def count(self) -> int:
        """Return how many there are, by the header."""
        zipped = self.path.suffix.lower() == ".npz"
        shape = npz_shape(self.path, "images") if zipped else map_npy(self.path).shape
        if len(shape) < 2:
            raise ShapeError(f"{self.path}: images have a shape (n, ...); found {shape}.")
        return shape[0]

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield batches; an `.npy` is mapped into memory, an `.npz` is read whole."""
        if self.path.suffix.lower() == ".npz":
            arrays = read_npz_arrays(self.path, ["images"], optional=["labels"])
            images, labels = arrays["images"], arrays.get("labels")
        else:
            beside = self.path.with_name(self.path.name.removesuffix(".npy") + LABELS)
            images, labels = map_npy(self.path), map_npy(beside) if beside.exists() else None
        with reading(self.path):
            _check_images(images)
            if labels is not None and (
                labels.dtype.kind not in "iu" or labels.shape != (len(images),)
            ):
                raise DataFormatError(
                    f"There must be one label for each of {len(images)} images, a whole number; "
                    f"found {labels.dtype} of shape {labels.shape}."
                )
        for start in range(0, len(images), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield _batch(images[rows], None if labels is None else labels[rows])


class FolderShard(Shard):
    """A folder of pictures, or of folders of pictures; without labels."""

    def count(self) -> int:
        """Return how many pictures there are."""
        return len(self._paths())

    def _paths(self) -> list[Path]:
        folders = [self.path, *class_folders(self.path)]
        return [path for folder in folders for path in pictures_in(folder)]

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield batches."""
        for some in _batches(self._paths(), self.batch_size):
            yield to_tensor(_stack([read_picture(path, self.pictures) for path in some], some))


class TarShard(Shard):
    """A WebDataset tar file: samples are neighbours whose names differ in their endings only.

        00017.jpg   a picture, or 00017.npy, an array
        00017.cls   the number of its class, as text

    The name of a sample ends at the first dot after the last slash. Other endings are skipped.
    Files are read where they lie; nothing is unpacked.
    """

    def count(self) -> int:
        """Return how many samples there are, by the headers."""
        return sum(1 for _ in self._samples())

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield batches."""
        decoded = (self._decode(*sample) for sample in self._samples())
        for some in _batches(decoded, self.batch_size):
            names, images, classes = zip(*some, strict=True)
            with reading(self.path):
                labels = [label for label in classes if label is not None]
                if labels and len(labels) < len(some):
                    raise DataFormatError("Either all samples have a class, `.cls`, or none has.")
                pixels = _stack(images, names)
            yield _batch(pixels, np.array(labels) if labels else None)

    def _samples(self) -> Iterator[tuple[str, dict[str, tarfile.TarInfo], mmap.mmap]]:
        """Yield name, files by their endings, and the tar file; only headers are read."""
        advice = "It must be a plain tar file, not a compressed one."
        with reading(self.path, "is not a readable tar file", advice), self.path.open("rb") as file:
            # `tarfile` reads as many bytes as a header states; a map has no more than the file.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with content, tarfile.open(fileobj=cast("IO[bytes]", content), mode="r:") as archive:
                for name, members in groupby(_members(archive, content), _sample_name):
                    sample: dict[str, tarfile.TarInfo] = {}
                    for member in members:
                        if _kind(member) in sample:
                            raise DataFormatError(f"There are two {_quoted(member.name)}.")
                        sample[_kind(member)] = member
                    images = len(sample.keys() & IMAGES)
                    if images != 1:
                        raise DataFormatError(
                            "A sample has one image, with one of the endings "
                            f"{', '.join(sorted(IMAGES))}; {_quoted(name)} has {images or 'none'}."
                        )
                    yield name, sample, content
                _check_end(content, archive.offset)

    def _decode(
        self, name: str, sample: dict[str, tarfile.TarInfo], content: mmap.mmap
    ) -> tuple[str, NDArray[Any], int | None]:
        """Return the name, the image and the class of a sample."""
        parts = {
            kind: content[member.offset_data : member.offset_data + member.size]
            for kind, member in sample.items()
        }
        label = parts.pop(LABEL, b"").strip()
        ((kind, image),) = parts.items()
        with reading(self.path, f"has no readable image {_quoted(sample[kind].name)}"):
            if LABEL in sample and (len(label) > LONGEST_LABEL or not label.isdigit()):
                raise DataFormatError(
                    f"{_quoted(sample[LABEL].name)} holds the number of a class; found "
                    f"{label[:LONGEST_LABEL]!r}."
                )
            if kind == ARRAY and self.pictures.size is not None:
                raise OptionError(
                    f"`size=` is for pictures; {self.path} holds arrays, which keep their size."
                )
            pixels: NDArray[Any] = (
                parse_npy(image)
                if kind == ARRAY
                else picture_pixels(open_picture(image), self.pictures)
            )
        return name, pixels, int(label) if label else None


def _members(archive: tarfile.TarFile, content: mmap.mmap) -> Iterator[tarfile.TarInfo]:
    """Yield the images and labels of a tar file; raise for anything but plain files and folders."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined] # it would keep all headers
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise DataFormatError(
                f"Samples are plain files; {_quoted(member.name)} is a link, a device or sparse."
            )
        if member.offset_data + member.size > len(content):
            raise DataFormatError(
                f"{_quoted(member.name)} would have {member.size:,} bytes; the tar file has "
                f"{len(content):,}. It was cut short."
            )
        if _kind(member) in (*IMAGES, LABEL):
            yield member


def _sample_name(member: tarfile.TarInfo) -> str:
    return member.name.removesuffix(f".{PurePosixPath(member.name).name.partition('.')[2]}")


def _kind(member: tarfile.TarInfo) -> str:
    start, _, kind = PurePosixPath(member.name).name.partition(".")
    return kind.lower() if start else ""


def _check_end(content: mmap.mmap, end: int) -> None:
    """Raise unless zeros follow the last member: `tarfile` takes anything else for the end, too."""
    rest = content[end : end + MOST_PADDING + 1]
    if len(rest) < tarfile.BLOCKSIZE:
        raise DataFormatError("It has no end: it was cut short, or is still being written.")
    if rest.strip(b"\0") or len(rest) > MOST_PADDING:
        raise DataFormatError(
            f"At byte {end:,}, something follows that is no file: it is damaged, or several tar "
            "files were joined."
        )


def _quoted(name: str) -> str:
    return f"`{shown(name)[1:-1]}`"


def kind_of(path: Path) -> Callable[..., Shard]:
    """Return the class of a shard by its path, or raise `DataFormatError`."""
    if path.is_dir():
        return FolderShard
    kind = path.suffix.lower()
    if kind not in (".npy", ".npz", ".tar"):
        raise DataFormatError(
            f"A shard is a folder of pictures or one of .npy, .npz, .tar; not {path}."
        )
    return TarShard if kind == ".tar" else ArrayShard


def _check_images(images: NDArray[Any]) -> None:
    """Raise unless an array of samples is one of pixels, or of floating-point numbers."""
    pixels = images.dtype == np.uint8
    if pixels and (images.ndim != 4 or not 1 <= images.shape[-1] <= MOST_CHANNELS):
        raise ShapeError(
            "Images of bytes have a shape (n, height, width, channels), with 1 to "
            f"{MOST_CHANNELS} channels; found {images.shape}."
        )
    floats = images.dtype.kind == "f" and images.dtype.itemsize <= LARGEST_FLOAT
    if not pixels and (not floats or images.ndim < 2):
        raise DataFormatError(
            "Images are bytes, 0 to 255, or floating-point numbers as the model takes them, of 64 "
            f"bits at most; found {images.dtype} of shape {images.shape}."
        )


def _batch(images: NDArray[Any], labels: NDArray[Any] | None) -> Tensor | tuple[Tensor, Tensor]:
    import torch

    if images.dtype == np.uint8:
        tensor = to_tensor(images)
    else:
        tensor = torch.from_numpy(images.astype(images.dtype.newbyteorder("="), order="C"))
    return tensor if labels is None else (tensor, torch.from_numpy(labels.astype(np.int64)))


def _stack(images: Sequence[NDArray[Any]], names: Sequence[Any]) -> NDArray[Any]:
    """Stack images, which must all have one shape and type."""
    for image, name in zip(images, names, strict=True):
        if (image.shape, image.dtype) != (images[0].shape, images[0].dtype):
            raise ShapeError(
                f"All images must have one size; {names[0]} has {images[0].shape} of "
                f"{images[0].dtype}, and {name} has {image.shape} of {image.dtype}. Give `size=` "
                "to resize pictures."
            )
    stacked = np.stack(images)
    _check_images(stacked)
    return stacked


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    remaining = iter(items)
    while some := list(islice(remaining, size)):
        yield some


@dataclass(frozen=True)
class Shards:
    """Shards in order: data in parts for `ttapca.fit`, and a loader of all their batches.

    Attributes:
        parts: The shards.
        batch_size: Images in a batch; the last one of a shard may have fewer.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in "ab":
        ...     np.save(folder / f"{name}.npy", np.zeros((50, 8, 8, 1), np.uint8))
        >>> shards = open_shards(folder / "*.npy", batch_size=30)
        >>> shards.samples, [len(batch) for batch in shards], len(shards.batched(10))
        (100, [30, 20, 30, 20], 10)
    """

    parts: tuple[Shard, ...]
    batch_size: int

    @property
    def samples(self) -> int:
        """How many images there are."""
        return sum(map(len, self.parts))

    def __len__(self) -> int:
        """Return the number of batches."""
        return sum(-(-len(part) // self.batch_size) for part in self.parts)

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield the batches of all shards."""
        for part in self.parts:
            yield from part

    def __str__(self) -> str:
        """Return how many there are, in words."""
        shards = counted(len(self.parts), "shard")
        return f"all {counted(self.samples, 'image')} of {shards}, in stored order"

    def image_shape(self) -> tuple[int, ...]:
        """Return the shape of an image as a model gets it; the first one is read."""
        first = next(iter(dataclasses.replace(self.parts[0], batch_size=1)))
        images = first[0] if isinstance(first, tuple) else first
        return tuple(images.shape[1:])

    def batched(self, size: int) -> Shards:
        """Return the same shards with batches of another size."""
        check_option("size", size, Whole(1))
        parts = tuple(dataclasses.replace(part, batch_size=size) for part in self.parts)
        return Shards(parts, size)


def open_shards(
    what: str | Path | Iterable[str | Path],
    *,
    batch_size: int = BATCH,
    size: int | tuple[int, int] | None = None,
    shorter_side: int | None = None,
) -> Shards:
    """Find shards, and count their images; only headers are read.

    Args:
        what: A path, a pattern such as `train/*.tar` or `train-{0000..0146}.tar`, or several of
            either. Paths of a pattern are sorted; several stay in their order.
        batch_size: Images in a batch.
        size: For pictures, as for `load`.
        shorter_side: Likewise.

    Raises:
        DataNotFoundError: A path or pattern leads to nothing.
        DataFormatError: A file is no shard, is damaged, or has no images.
        OptionError: An option makes no sense, or would have no effect.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> for number in range(3):
        ...     np.save(folder / f"part-{number}.npy", np.zeros((40, 8, 8, 1), np.uint8))
        >>> print(open_shards(folder / "*.npy"))
        all 120 images of 3 shards, in stored order
    """
    check_option("batch_size", batch_size, Whole(1))
    pictures = PictureSize(size, shorter_side)
    given = [what] if isinstance(what, (str, Path)) else list(what)
    paths = [path for each in given for path in _found(str(each))]
    if not paths:
        raise DataNotFoundError("Shards must be named; the list is empty.")
    shards = [kind_of(path)(path.absolute(), 0, batch_size, pictures) for path in paths]
    if size is not None and not any(isinstance(each, (FolderShard, TarShard)) for each in shards):
        raise OptionError(
            f"`size=` is for pictures in folders and tar files; {paths[0]} is an array."
        )
    with ThreadPoolExecutor(COUNTED_AT_ONCE) as pool:
        counts = list(pool.map(lambda shard: shard.count(), shards))
    for shard, count in zip(shards, counts, strict=True):
        if not count:
            raise DataFormatError(f"A shard holds images; {shard} holds none.")
    parts = map(lambda shard, count: dataclasses.replace(shard, samples=count), shards, counts)
    return Shards(tuple(parts), batch_size)


def is_sharded(what: str) -> bool:
    """Return whether words name shards, rather than a data set or a single set of images.

    Example:
        >>> is_sharded("train/*.npz"), is_sharded("part-7.tar"), is_sharded("cifar10")
        (True, True, False)
    """
    return bool(RANGE.search(what)) or glob.has_magic(what) or what.endswith(".tar")


def _found(pattern: str) -> list[Path]:
    """Return the paths that a path or pattern stands for."""
    if Path(pattern).exists():
        return [Path(pattern)]
    named = list(_expanded(pattern))
    found: list[str] = []
    for each in named:
        # By `glob`, not `Path.glob`, which takes no pattern that begins at the root.
        paths = sorted(glob.glob(each, recursive=True))  # noqa: PTH207
        if not paths:
            raise DataNotFoundError(f"Shards must exist; there is no {each}.")
        found += paths
    return [Path(path) for path in found if not path.endswith(LABELS)]


def _expanded(pattern: str) -> Iterator[str]:
    """Yield a pattern with numbers for its ranges: `{08..11}` stands for 08, 09, 10 and 11."""
    match = RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    first, last = int(match[1]), int(match[2])
    if not first <= last <= first + MOST_IN_A_RANGE:
        raise OptionError(f"A range of shards goes up, as in {{000..146}}; found {match[0]}.")
    for number in range(first, last + 1):
        middle = str(number).zfill(len(match[1]))
        yield from _expanded(pattern[: match.start()] + middle + pattern[match.end() :])
