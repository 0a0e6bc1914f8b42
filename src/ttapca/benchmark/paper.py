"""The paper's options, its errors (`paper.toml` has Tables 1 and 2), and its setting."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

METHODS = ("source", "bn", "tent", "ttapca-exp", "ttapca-relu")
SEVERITY = 5
BATCH_SIZE = 200
COMPONENTS = 2000
STEPS = 1
LR = 1e-3
NETWORK = "WRN-28-10"
IMAGES = 10_000

_ROUNDING = 0.01  # half a unit of the errors and half a unit of the mean
_WAYS_TO_A_NETWORK = {
    "cifar10": "it is RobustBench's Standard, which `robustbench.utils.load_model('Standard', "
    "threat_model='corruptions')` writes to models/cifar10/corruptions/Standard.pt; then `ttapca "
    "reproduce cifar10 Standard.pt --normalise none`",
    "cifar100": "the authors trained it (83 %) and did not publish it",
}


@dataclass(frozen=True)
class PaperRow:
    """One method of one of the two tables."""

    table: int  # 1 (episodic) or 2 (online)
    setting: str
    data: str  # cifar10 or cifar100
    method: str  # its name in this library
    printed_name: str
    printed_mean: float
    errors: Mapping[str, float]  # in percent, by corruption, in the paper's order
    spreads: Mapping[str, float]  # the printed standard deviations, by corruption

    @property
    def mean(self) -> float:
        """The average of the row."""
        return statistics.fmean(self.errors.values())

    @property
    def mean_differs(self) -> bool:
        """Whether the printed mean is not the row's average."""
        return abs(self.mean - self.printed_mean) > _ROUNDING


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Return every row of both tables, in the paper's order."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = []
    for entry in content["row"]:
        errors = dict(zip(content["columns"], entry.pop("errors"), strict=True))
        found.append(PaperRow(**{"spreads": {}, **entry}, errors=errors))
    return tuple(found)


def paper_row(data: str, setting: str, method: str) -> PaperRow | None:
    """Return one row, or None if the paper has none; `CIFAR-10-C` is the same as `cifar10`."""
    name = data.lower().replace("-", "").replace("_", "").removesuffix("c")
    wanted = (name, setting, method)
    return next((r for r in paper_rows() if (r.data, r.setting, r.method) == wanted), None)


def needed_for_the_papers_setting(
    data: str, network: nn.Module, corrupted: Path | None, images: int | None
) -> list[str]:
    """Return a sentence for each difference to the paper's setting; none for data it lacks."""
    from ttapca.datasets.cifar import read_manifest

    if data not in _WAYS_TO_A_NETWORK:
        return []
    found = []
    if not _is_the_papers(network, data):
        weights = sum(parameter.numel() for parameter in network.parameters())
        found.append(
            f"Network: one with {weights:,} weights here, {NETWORK} in the paper; "
            f"{_WAYS_TO_A_NETWORK[data]}."
        )
    if corrupted is None or read_manifest(corrupted):
        found.append(
            f"Corrupted images: made by ttapca here, the published ones in the paper; `ttapca data "
            f"get {data}-c` gets them (2.9 GB)."
        )
    if images is not None and images != IMAGES:
        found.append(
            f"Images of each corruption: {images:,} here, {IMAGES:,} in the paper; leave out "
            "--quick."
        )
    return found


def _is_the_papers(network: nn.Module, data: str) -> bool:
    """Return whether a network can be the paper's, by its shapes and its normalisation."""
    from ttapca.networks.architectures import shapes_of  # needs torch
    from ttapca.networks.network import ImageNetwork

    if not isinstance(network, ImageNetwork):
        return False
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    same = shapes == shapes_of(NETWORK.lower(), network.classes, network.input_shape[0])
    plain = not any(network.normalise.values.mean) and set(network.normalise.values.std) == {1.0}
    return same and (plain or data != "cifar10")
