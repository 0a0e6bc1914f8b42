"""What the names in a file of results stand for: images, corrupted images, filters.

A `Cell` has the last part of a path. A folder may get other content, or another one may be called
alike, and its numbers would be taken for those that were measured. So a file of results keeps a
fingerprint for each name, and refuses whatever else comes under it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ttapca.benchmark.cells import Claim
from ttapca.benchmark.subject import Condition, Subject
from ttapca.fitting.store import TENSORS

ENDS = 50  # images at either end of a corruption whose pixels are compared


def images_claim(subject: Subject) -> Claim:
    """Return the claim of the clean images: all their pixels and labels count."""
    source, count = subject.source, len(subject.source.clean)
    others = f"on {count:,} others that are called `{subject.data}` too, or these have"
    return Claim(subject.data, count, source.fingerprint, "images", others, "the data")


def corrupted_claims(subject: Subject, conditions: Iterable[Condition]) -> list[Claim]:
    """Return the claims of a folder of corrupted images; none if they are made in memory.

    For each condition the first and last images count, with their labels: all of them may be
    gigabytes, and other noise shows in every image. So a folder may get more corruptions later.

    Raises:
        TtapcaError: The folder lacks a condition, or has other images than the clean ones.
    """
    folder = subject.source.folder
    if folder is None:
        return []
    found = []
    for condition in dict.fromkeys(conditions):
        images, (name, severity) = subject.source.images([condition]), condition
        ends = images[:ENDS].fingerprint() + images[-ENDS:].fingerprint()
        found.append(
            Claim(
                _key("corrupted", subject.data, folder.name, f"{name} {severity}"),
                len(images),
                ends,
                "corrupted images",
                f"on others of `{name}` {severity} in a folder that is called `{folder.name}` too, "
                "or these have",
                "the folder",
            )
        )
    return found


def filter_claim(subject: Subject, folder: Path) -> Claim:
    """Return the claim of a saved filter: all its tensors count."""
    name, layer = subject.filter_name, subject.fitted.layer if subject.fitted else ""
    return Claim(
        _key("filter", subject.weights, layer, name),
        0,
        hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest(),
        "filter",
        f"with another one that is called `{name}` too, or this one has",
        "the filter",
    )


def _key(*parts: str) -> str:
    """Return a name that no data set has: theirs are last parts of paths, without a slash."""
    return "/".join(parts)
