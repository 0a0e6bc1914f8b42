"""What a folder of corrupted images was made from, so that two runs never mix in it.

`corruptions.json` lies beside the `.npy` files. The official archives have none; a reader that does
not know it can ignore it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import ListOf, Record, Text, Whole, conform, shown
from ttapca._version import __version__
from ttapca.corruptions.pixels import Pixels
from ttapca.errors import DataFormatError, OptionError
from ttapca.support.parsing import parse_json, read_bounded

MANIFEST = "corruptions.json"

_SHA256 = Text(64)
SCHEMA = Record(
    {
        "images": Whole(0),
        "images_sha256": _SHA256,
        "labels_sha256": _SHA256,
        "severities": ListOf(Whole(1, 5), 1, 5),
        "seed": Whole(0),
        "table": Text(),
        "table_sha256": _SHA256,
        "version": Text(100),
    }
)


@dataclass(frozen=True)
class Manifest:
    """Everything that decides the bytes of a folder, except which corruptions are in it.

    Attributes:
        images: How many images a block of one severity holds.
        images_sha256: Of the clean grey levels.
        labels_sha256: Of the labels.
        severities: The blocks of each file, in order; the official files have all five.
        seed: Of the random numbers.
        table: The name of the table of severities.
        table_sha256: Of its file.
        version: Of this library.
    """

    images: int
    images_sha256: str
    labels_sha256: str
    severities: tuple[int, ...]
    seed: int
    table: str
    table_sha256: str
    version: str = __version__

    def dumps(self) -> bytes:
        """The manifest as a JSON file."""
        return (json.dumps(asdict(self), indent=2) + "\n").encode()

    def check(self, folder: Path) -> None:
        """Compare with what the folder was begun with.

        Args:
            folder: Where files may lie already.

        Raises:
            OptionError: The folder was begun with other options, or not by this library.
            DataFormatError: Its manifest cannot be read.
        """
        path = folder / MANIFEST
        if not path.exists():
            strangers = sorted(each.name for each in folder.glob("*.npy"))
            if strangers:
                raise OptionError(
                    f"Corrupted images go to a folder of their own; {folder} has no {MANIFEST} and "
                    f"holds {strangers[0]} from elsewhere. Choose another folder."
                )
            return
        found = _loads(path)
        for field in fields(self):
            before, now = getattr(found, field.name), getattr(self, field.name)
            if before != now:
                raise OptionError(
                    f"A folder holds files of one run only; {folder} was begun with "
                    f"{field.name} = {shown(before)}, and now it is {shown(now)}. Choose "
                    "another folder, or delete this one."
                )


def _loads(path: Path) -> Manifest:
    where = f"{MANIFEST} must be the one that a run wrote; {path}"
    content = parse_json(read_bounded(path, DataFormatError), where, DataFormatError)
    conform(content, SCHEMA, where, DataFormatError)
    return Manifest(**{**content, "severities": tuple(content["severities"])})


def digest(array: Pixels | NDArray[np.integer[Any]]) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
