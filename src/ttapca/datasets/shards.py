"""Images in many files, each of which can be read by itself, by any process that sees it."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttapca._checks import Whole, check_option
from ttapca.datasets.pictures import PictureSize
from ttapca.datasets.shard_kinds import BATCH, LABELS, FolderShard, Shard, TarShard, kind_of
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError
from ttapca.support.progress import counted

if TYPE_CHECKING:
    from torch import Tensor

COUNTED_AT_ONCE = 8  # tar files, whose headers lie scattered: most of the time is waiting
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST_IN_A_RANGE = 10_000_000


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
