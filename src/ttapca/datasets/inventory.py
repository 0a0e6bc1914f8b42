"""What is in a folder of data sets, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ttapca.datasets.catalog import DATA_SETS
from ttapca.datasets.checksums import matches
from ttapca.datasets.cifar import read_cifar_binary
from ttapca.datasets.cifar_c import (
    LABELS_FILE,
    corruptions_in,
    read_cifar_c,
    read_manifest,
    severities_in,
)
from ttapca.datasets.cifar_versions import BinaryVersion
from ttapca.datasets.images import Images
from ttapca.datasets.progress import Reporter, Silent
from ttapca.datasets.reading import Split
from ttapca.datasets.sources import DataSet, Layout, SplitFacts
from ttapca.errors import TtapcaError

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
    """List the data sets in a folder and verify each.

    Args:
        root: The folder that holds the folders of the data sets.
        report: Who wants to see the progress: this reads every byte.

    Returns:
        What is there.

    Example:
        >>> inventory(Path("nowhere"))
        []
    """
    found = (
        inspect(data_set, layout, root / layout.folder, report)
        for data_set in DATA_SETS.values()
        for layout in data_set.layouts
        if (root / layout.folder).is_dir()
    )
    return list(found)


def inspect(
    data_set: DataSet, layout: Layout, folder: Path, report: Reporter | None = None
) -> Holding:
    """Verify one data set in one folder.

    Args:
        data_set: What it should be.
        layout: How it should lie there.
        folder: Where it lies.
        report: Who wants to see the progress.

    Returns:
        What was found.

    Example:
        >>> cifar10 = DATA_SETS["cifar10"]
        >>> inspect(cifar10, cifar10.layouts[0], Path("nowhere")).state
        'damaged'
    """
    report = report or Silent()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        state, detail = _judge(data_set, layout, folder, report)
    except (TtapcaError, OSError) as error:
        state, detail = "damaged", str(error)
    return Holding(data_set.name, layout.title, folder, size, state, detail)


def _judge(data_set: DataSet, layout: Layout, folder: Path, report: Reporter) -> tuple[State, str]:
    if layout.version is None and read_manifest(folder):
        return _judge_generated(folder)
    missing = [name for name in layout.checksums if not (folder / name).is_file()]
    wrong = [
        name
        for name, expected in layout.checksums.items()
        if name not in missing and not matches(folder / name, expected, report)
    ]
    if not missing and not wrong:
        return "verified", f"{len(layout.checksums)} files with the publisher's checksums"
    if isinstance(layout.version, BinaryVersion) and wrong and not missing:
        remarks = _remarks_on_other_files(data_set, layout.version, folder, wrong)
        return ("partial", "; ".join(remarks)) if remarks else ("damaged", _complaints([], wrong))
    if layout.version is None and missing and not wrong and LABELS_FILE not in missing:
        there = len(corruptions_in(folder))
        return "partial", f"{there} of {len(layout.checksums) - 1} corruptions, all verified"
    return "damaged", _complaints(missing, wrong)


def _judge_generated(folder: Path) -> tuple[State, str]:
    severities = severities_in(folder)
    corruptions = corruptions_in(folder)
    for corruption in corruptions:
        for severity in severities:
            read_cifar_c(folder, corruption, severity)  # raises where a file is not what it claims
    return "generated", f"{len(corruptions)} corruptions, not the publisher's files"


def _remarks_on_other_files(
    data_set: DataSet, version: BinaryVersion, folder: Path, wrong: list[str]
) -> list[str]:
    """Tell fewer images, or the right images in another order, from wrong ones: no remarks."""
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


def _complaints(missing: list[str], wrong: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"missing: {', '.join(missing)}")
    if wrong:
        parts.append(f"another checksum: {', '.join(wrong)}")
    return "; ".join(parts)
