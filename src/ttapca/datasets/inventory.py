"""What is in a folder of data sets, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ttapca.datasets.catalog import DATA_SETS, DataSet, Layout, SplitFacts, has_checksum
from ttapca.datasets.cifar import (
    LABELS_FILE,
    corruptions_in,
    read_cifar_binary,
    read_cifar_c,
    read_manifest,
    severities_in,
)
from ttapca.datasets.images import Images
from ttapca.errors import TtapcaError
from ttapca.support.progress import Reporter, Silent

State = Literal["verified", "partial", "generated", "damaged"]
MEAN_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Holding:
    """One data set found on disk.

    Attributes:
        name: The data set.
        layout: The layout it is in.
        folder: Where it is.
        size: Bytes on disk.
        state: `verified`: every file has the publisher's checksum. `partial`: readable, but
            incomplete or in another order. `generated`: made here, not the publisher's. `damaged`:
            not to be used.
        detail: The state in more words.

    Example:
        >>> Holding("cifar10", "binary version", Path("x"), 0, "verified", "6 files").state
        'verified'
    """

    name: str
    layout: str
    folder: Path
    size: int
    state: State
    detail: str


def inventory(root: Path, report: Reporter | None = None) -> list[Holding]:
    """List the data sets in a folder and verify each of them, which reads every byte.

    Args:
        root: The folder that holds the folders of the data sets.
        report: Told how far it is.

    Example:
        >>> inventory(Path("nowhere"))
        []
    """
    return [
        inspect(data_set, layout, root / layout.folder, report)
        for data_set in DATA_SETS.values()
        for layout in data_set.layouts
        if (root / layout.folder).is_dir()
    ]


def inspect(
    data_set: DataSet, layout: Layout, folder: Path, report: Reporter | None = None
) -> Holding:
    """Verify one data set in one layout."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        state, detail = _judge(data_set, layout, folder, report or Silent())
    except (TtapcaError, OSError) as error:
        state, detail = "damaged", str(error)
    return Holding(data_set.name, layout.title, folder, size, state, detail)


def _judge(data_set: DataSet, layout: Layout, folder: Path, report: Reporter) -> tuple[State, str]:
    if layout.version is None and read_manifest(folder):
        corruptions = corruptions_in(folder)
        for corruption in corruptions:
            for severity in severities_in(folder):
                read_cifar_c(folder, corruption, severity)  # raises if a file is damaged
        return "generated", f"{len(corruptions)} corruptions, not the publisher's files"
    missing = [name for name in layout.checksums if not (folder / name).is_file()]
    wrong = _wrong_files(layout, folder, report)
    if not missing and not wrong:
        return "verified", f"{len(layout.checksums)} files with the publisher's checksums"
    if layout.version is None and not wrong and LABELS_FILE not in missing:
        there = len(corruptions_in(folder))
        return "partial", f"{there} of {len(layout.checksums) - 1} corruptions, all verified"
    if layout.version is not None and layout.version.label_bytes and not missing:
        remarks = _remarks(data_set, layout, folder, wrong)
        if remarks:
            return "partial", "; ".join(remarks)
    complaints = {"missing": missing, "another checksum": wrong}
    return "damaged", "; ".join(
        f"{what}: {', '.join(names)}" for what, names in complaints.items() if names
    )


def _wrong_files(layout: Layout, folder: Path, report: Reporter) -> list[str]:
    sizes = {
        name: (folder / name).stat().st_size
        for name in layout.checksums
        if (folder / name).is_file()
    }
    wrong, done = [], 0
    for name, size in sizes.items():
        report.advance(f"checking {layout.folder}", done, sum(sizes.values()))
        if not has_checksum(folder / name, layout.checksums[name]):
            wrong.append(name)
        done += size
    report.advance(f"checking {layout.folder}", done, done)
    return wrong


def _remarks(data_set: DataSet, layout: Layout, folder: Path, wrong: list[str]) -> list[str]:
    """Say which splits are incomplete or in another order; nothing if images are wrong."""
    remarks: list[str] = []
    for split, facts in data_set.splits.items():
        if layout.version is None or not set(layout.version.files[split]) & set(wrong):
            continue
        images = read_cifar_binary(folder, split)
        words = "training" if split == "train" else "test"
        if len(images) < facts.count:
            remarks.append(f"{len(images):,} of {facts.count:,} {words} images")
        elif not _same_in_any_order(images, facts):
            return []
        else:
            remarks.append(f"all {words} images, in another order")
    return remarks


def _same_in_any_order(images: Images, facts: SplitFacts) -> bool:
    per_class = np.bincount(images.labels, minlength=len(images.class_names))
    return (
        len(images) == facts.count
        and len(set(per_class.tolist())) == 1
        and np.allclose(images.channel_means(), facts.channel_means, rtol=0, atol=MEAN_TOLERANCE)
    )
