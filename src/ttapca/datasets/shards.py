"""Images in many files, each of which can be read by itself, by any process that sees it.

A shard is an `.npy` or `.npz` of images, a folder of pictures, or a WebDataset `.tar`.
"""

from __future__ import annotations

import dataclasses
import glob
import mmap
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

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
ARRAYS = (".npy", ".npz")
LABELS = ".labels.npy"  # instead of `.npy`, for the labels of an array of images
# The endings of files in a tar file.
ARRAY, LABEL = "npy", "cls"
IMAGES = frozenset({suffix.removeprefix(".") for suffix in PICTURE_SUFFIXES} | {ARRAY})
MOST_PADDING = 2**20  # bytes of zeros at the end of a tar file

COUNTED_AT_ONCE = 8  # tar files, whose headers lie scattered: most of the time is waiting

# Name, image, and class if it has one, of a sample in a folder or in a tar file.
Sample = tuple[str, NDArray[Any], int | None]


@dataclass(frozen=True)
class Shard:
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
        >>> shard = Shard(path, samples=3, batch_size=2, pictures=PictureSize())
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

    @property
    def kind(self) -> str:
        """One of `folder`, `.npy`, `.npz`, `.tar`."""
        return "folder" if self.path.is_dir() else self.path.suffix.lower()

    def count(self) -> int:
        """Return how many images there are; only headers and names are read."""
        if self.kind in ARRAYS:
            zipped = self.kind == ".npz"
            shape = npz_shape(self.path, "images") if zipped else map_npy(self.path).shape
            if len(shape) < 2:
                raise ShapeError(f"{self.path}: images have a shape (n, ...); found {shape}.")
            return shape[0]
        return sum(1 for _ in self._readers())

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield batches."""
        with reading(self.path):
            if self.kind in ARRAYS:
                images, labels = _arrays(self.path, self.kind)
                for start in range(0, len(images), self.batch_size):
                    rows = slice(start, start + self.batch_size)
                    yield _batch(images[rows], None if labels is None else labels[rows])
            else:
                samples = (read() for read in self._readers())
                while some := list(islice(samples, self.batch_size)):
                    yield _stacked(some)

    def _readers(self) -> Iterator[Callable[[], Sample]]:
        """Yield a function for each sample, which reads it."""
        if self.kind == ".tar":
            yield from _tar_samples(self.path, self.pictures)
        else:
            for folder in (self.path, *class_folders(self.path)):
                for path in pictures_in(folder):
                    yield partial(_read_file, path, self.pictures)


def _arrays(path: Path, kind: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the images of an array file, and their labels; an `.npy` is mapped into memory."""
    if kind == ".npz":
        arrays = read_npz_arrays(path, ["images"], optional=["labels"])
        images, labels = arrays["images"], arrays.get("labels")
    else:
        beside = path.with_name(path.name.removesuffix(".npy") + LABELS)
        images, labels = map_npy(path), map_npy(beside) if beside.exists() else None
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]):
        raise DataFormatError(
            f"There must be one label for each of {len(images)} images, a whole number; found "
            f"{labels.dtype} of shape {labels.shape}."
        )
    return images, labels


def _read_file(path: Path, size: PictureSize) -> Sample:
    return str(path), read_picture(path, size), None


def _tar_samples(path: Path, size: PictureSize) -> Iterator[Callable[[], Sample]]:
    """Yield a reader of each sample of a WebDataset tar file; only headers are read at once."""
    # A sample is a picture or array and its class, `00017.jpg` and `00017.cls`.
    advice = "It must be a plain tar file, not a compressed one."
    with reading(path, "is not a readable tar file", advice), path.open("rb") as file:
        # `tarfile` reads as many bytes as a header states; a map has no more than the file.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with content, tarfile.open(fileobj=cast("IO[bytes]", content), mode="r:") as archive:
            for name, members in groupby(_members(archive), lambda member: _split(member)[0]):
                found = [(_split(member)[1], member) for member in members]
                images = [each for each in found if each[0] in IMAGES]
                label = next((member for kind, member in found if kind == LABEL), None)
                if len(images) != 1:
                    raise DataFormatError(
                        "A sample has one image, with one of the endings "
                        f"{', '.join(sorted(IMAGES))}; {_quoted(name)} has {len(images) or 'none'}."
                    )
                yield partial(_read_members, path, size, content, *images[0], label)
            # `tarfile` takes a damaged header for the end; samples after it must not be missed.
            rest = content[archive.offset : archive.offset + MOST_PADDING]
            if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
                raise DataFormatError(
                    f"Zeros must mark the end; there are none at byte {archive.offset:,}. It was "
                    "cut short or damaged, or several tar files were joined."
                )


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the images and labels of a tar file; raise for anything but plain files and folders."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined] # it would keep all headers
        if not member.isdir() and (not member.isreg() or member.issparse()):
            raise DataFormatError(
                f"Samples are plain files; {_quoted(member.name)} is a link, a device or sparse."
            )
        if _split(member)[1] in (*IMAGES, LABEL):
            yield member


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the name of a sample, which ends at the first dot after the last slash, and a kind."""
    start, _, ending = PurePosixPath(member.name).name.partition(".")
    return member.name.removesuffix(f".{ending}"), ending.lower() if start else ""


def _read_members(
    path: Path,
    size: PictureSize,
    content: mmap.mmap,
    kind: str,
    image: tarfile.TarInfo,
    label: tarfile.TarInfo | None,
) -> Sample:
    """Read a sample where it lies; nothing is unpacked."""
    number: int | None = None
    with reading(path, f"has no readable image {_quoted(image.name)}"):
        if label is not None:
            text = content[label.offset_data : label.offset_data + label.size].strip()
            if not text.isdigit():
                raise DataFormatError(
                    f"{_quoted(label.name)} holds the number of a class; found {text[:20]!r}."
                )
            number = int(text)
        pixels = content[image.offset_data : image.offset_data + image.size]
        if kind != ARRAY:
            return image.name, picture_pixels(open_picture(pixels), size), number
        if size.size is not None:
            raise OptionError(
                f"`size=` is for pictures; {path} holds arrays, which keep their size."
            )
        return image.name, parse_npy(pixels), number


def _quoted(name: str) -> str:
    return f"`{shown(name)[1:-1]}`"


def _stacked(samples: Sequence[Sample]) -> Tensor | tuple[Tensor, Tensor]:
    """Make a batch of samples, which must all have one shape and type, and a class or none."""
    first_name, first, _ = samples[0]
    for name, image, _ in samples:
        if (image.shape, image.dtype) != (first.shape, first.dtype):
            raise ShapeError(
                f"All images must have one size; {first_name} has {first.shape} of {first.dtype}, "
                f"and {name} has {image.shape} of {image.dtype}. Give `size=` to resize pictures."
            )
    labels = [label for _, _, label in samples if label is not None]
    if labels and len(labels) < len(samples):
        raise DataFormatError("Either all samples have a class, `.cls`, or none has.")
    return _batch(
        np.stack([image for _, image, _ in samples]), np.array(labels) if labels else None
    )


def _batch(images: NDArray[Any], labels: NDArray[Any] | None) -> Tensor | tuple[Tensor, Tensor]:
    import torch

    if images.dtype == np.uint8:
        if images.ndim != 4 or not 1 <= images.shape[-1] <= MOST_CHANNELS:
            raise ShapeError(
                "Images of bytes have a shape (n, height, width, channels), with 1 to "
                f"{MOST_CHANNELS} channels; found {images.shape}."
            )
        tensor = to_tensor(images)
    elif images.dtype.kind == "f" and images.ndim >= 2:
        tensor = torch.from_numpy(images.astype(images.dtype.newbyteorder("="), order="C"))
    else:
        raise DataFormatError(
            "Images are bytes, 0 to 255, or floating-point numbers as the model takes them; found "
            f"{images.dtype} of shape {images.shape}."
        )
    return tensor if labels is None else (tensor, torch.from_numpy(labels.astype(np.int64)))


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
        return f"all {counted(self.samples, 'sample')} of {shards}, in stored order"

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
        what: A path, a pattern such as `train/*.tar`, or several of either. Paths of a pattern are
            sorted; several stay in their order.
        batch_size: Images in a batch.
        size: For pictures, as for `load`.
        shorter_side: Likewise.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> for number in range(3):
        ...     np.save(folder / f"part-{number}.npy", np.zeros((40, 8, 8, 1), np.uint8))
        >>> print(open_shards(folder / "*.npy"))
        all 120 samples of 3 shards, in stored order
    """
    check_option("batch_size", batch_size, Whole(1))
    pictures = PictureSize(size, shorter_side)
    given = [what] if isinstance(what, (str, Path)) else list(what)
    paths = [path for each in given for path in _found(str(each))]
    if not paths:
        raise DataNotFoundError("Shards must be named; the list is empty.")
    shards = [Shard(path.absolute(), 0, batch_size, pictures) for path in paths]
    for shard in shards:
        if shard.kind not in ("folder", ".tar", *ARRAYS):
            raise DataFormatError(
                f"A shard is a folder of pictures or one of .npy, .npz, .tar; not {shard}."
            )
    if size is not None and all(shard.kind in ARRAYS for shard in shards):
        raise OptionError(
            f"`size=` is for pictures in folders and tar files; {paths[0]} is an array."
        )
    with ThreadPoolExecutor(COUNTED_AT_ONCE) as pool:
        counts = list(pool.map(Shard.count, shards))
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
    return glob.has_magic(what) or what.endswith(".tar")


def _found(pattern: str) -> list[Path]:
    """Return the paths that a path or pattern stands for."""
    if Path(pattern).exists():
        return [Path(pattern)]
    # By `glob`, not `Path.glob`, which takes no pattern that begins at the root.
    paths = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if not paths:
        raise DataNotFoundError(f"Shards must exist; there is no {pattern}.")
    return [Path(path) for path in paths if not path.endswith(LABELS)]
