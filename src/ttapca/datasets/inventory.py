"""What is in a folder of data sets, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ttapca.datasets.catalog import DATA_SETS, DataSet, Layout, SplitFacts, has_checksum
from ttapca.datasets.cifar import BinaryVersion, read_cifar_binary
from ttapca.datasets.cifar_c import (
    LABELS_FILE,
    corruptions_in,
    read_cifar_c,
    read_manifest,
    severities_in,
)
from ttapca.datasets.images import Images
from ttapca.datasets.reading import Split
from ttapca.errors import TtapcaError
from ttapca.support.progress import Reporter, Silent

State = Literal["verified", "partial", "generated", "damaged"]
SPLIT_WORDS: dict[Split, str] = {"train": "training", "test": "test"}


@dataclass(frozen=True)
class Holding:
    """One data set found on disk.

    Attributes:
        name: The data set.
        layout: The layout it is in.
        folder: Where it lies.
        size: Bytes on disk.
        state: `verified`: every file has the publisher's checksum. `partial`: readable, but not all
            of it. `generated`: made here, not the publisher's. `damaged`: not to be used.
        detail: What exactly.

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
    """List the data sets in a folder and verify each, which reads every byte.

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
    """Verify one data set, in one layout, in one folder."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        state, detail = _judge(data_set, layout, folder, report or Silent())
    except (TtapcaError, OSError) as error:
        state, detail = "damaged", str(error)
    return Holding(data_set.name, layout.title, folder, size, state, detail)


def _judge(data_set: DataSet, layout: Layout, folder: Path, report: Reporter) -> tuple[State, str]:
    if layout.version is None and read_manifest(folder):
        return _judge_generated(folder)
    missing = [name for name in layout.checksums if not (folder / name).is_file()]
    wrong = _wrong_files(layout, folder, missing, report)
    if not missing and not wrong:
        return "verified", f"{len(layout.checksums)} files with the publisher's checksums"
    if isinstance(layout.version, BinaryVersion) and not missing:
        remarks = _remarks(data_set, layout.version, folder, wrong)
        if remarks:
            return "partial", "; ".join(remarks)
    if layout.version is None and not wrong and LABELS_FILE not in missing:
        there = len(corruptions_in(folder))
        return "partial", f"{there} of {len(layout.checksums) - 1} corruptions, all verified"
    complaints = (("missing", missing), ("another checksum", wrong))
    return "damaged", "; ".join(
        f"{what}: {', '.join(names)}" for what, names in complaints if names
    )


def _wrong_files(layout: Layout, folder: Path, missing: list[str], report: Reporter) -> list[str]:
    there = {name: known for name, known in layout.checksums.items() if name not in missing}
    total, done = sum((folder / name).stat().st_size for name in there), 0
    wrong = []
    for name, known in there.items():
        report.advance(f"checking {layout.folder}", done, total)
        if not has_checksum(folder / name, known):
            wrong.append(name)
        done += (folder / name).stat().st_size
    report.advance(f"checking {layout.folder}", total, total)
    return wrong


def _judge_generated(folder: Path) -> tuple[State, str]:
    corruptions = corruptions_in(folder)
    for corruption in corruptions:
        for severity in severities_in(folder):
            read_cifar_c(folder, corruption, severity)  # raises where a file is not what it claims
    return "generated", f"{len(corruptions)} corruptions, not the publisher's files"


def _remarks(
    data_set: DataSet, version: BinaryVersion, folder: Path, wrong: list[str]
) -> list[str]:
    """Say where images are fewer, or in another order; nothing if some are wrong."""
    remarks: list[str] = []
    for split, facts in data_set.splits.items():
        if not set(version.files[split]) & set(wrong):
            continue
        images, words = read_cifar_binary(folder, split), SPLIT_WORDS[split]
        if len(images) < facts.count:
            remarks.append(f"{len(images):,} of {facts.count:,} {words} images")
        elif not _same_in_any_order(images, facts):
            return []
        else:
            remarks.append(f"all {words} images, in an order of their own")
    return remarks


def _same_in_any_order(images: Images, facts: SplitFacts) -> bool:
    per_class = np.bincount(images.labels, minlength=len(images.class_names))
    return (
        len(images) == facts.count
        and len(set(per_class.tolist())) == 1
        and facts.has_means(images.channel_means())
    )
