"""What a run would need to be the paper's own: the network, the corrupted images, how many."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ttapca.benchmark import paper
from ttapca.datasets.cifar import read_manifest
from ttapca.networks.architectures import shapes_of
from ttapca.networks.network import ImageNetwork

_ARCHITECTURE = paper.NETWORK.lower()
_WAYS_TO_A_NETWORK = {
    "cifar10": "it is RobustBench's Standard, which `robustbench.utils.load_model('Standard', "
    "threat_model='corruptions')` writes to models/cifar10/corruptions/Standard.pt; then `ttapca "
    "reproduce cifar10 Standard.pt --normalise none`",
    "cifar100": "the authors trained it (83 %) and did not publish it",
}


def needed_for_the_papers_setting(
    data: str, network: nn.Module, corrupted: Path | None, images: int | None
) -> list[str]:
    """Say what differs from the paper's setting, and how to get it.

    Args:
        data: `cifar10` or `cifar100`; the paper has no other, so for others nothing is said.
        network: As it is measured.
        corrupted: The folder with corrupted images; None if they are made.
        images: How many of each corruption; None for all.

    Returns:
        A sentence for each difference; none if all is as in the paper.

    Example:
        >>> from ttapca import networks
        >>> wide = networks.build("wrn-28-10", normalisation="none")
        >>> needed_for_the_papers_setting("cifar10", wide, Path("CIFAR-10-C"), 1000)
        ['Images of each corruption: 1,000 here, 10,000 in the paper; leave out --quick.']
    """
    if data not in _WAYS_TO_A_NETWORK:
        return []
    found = []
    if not _is_the_papers(network, data):
        weights = sum(parameter.numel() for parameter in network.parameters())
        found.append(
            f"Network: one with {weights:,} weights here, {paper.NETWORK} in the paper; "
            f"{_WAYS_TO_A_NETWORK[data]}."
        )
    if corrupted is None or read_manifest(corrupted):
        found.append(
            f"Corrupted images: made by ttapca here, the published ones in the paper; `ttapca data "
            f"get {data}-c` gets them (2.9 GB)."
        )
    if images is not None and images != paper.IMAGES:
        found.append(
            f"Images of each corruption: {images:,} here, {paper.IMAGES:,} in the paper; leave out "
            "--quick."
        )
    return found


def _is_the_papers(network: nn.Module, data: str) -> bool:
    """Tell whether a network can be the paper's, as far as shapes and normalisation tell."""
    if not isinstance(network, ImageNetwork):
        return False
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    same = shapes == shapes_of(_ARCHITECTURE, network.classes, network.input_shape[0])
    plain = not any(network.normalise.values.mean) and set(network.normalise.values.std) == {1.0}
    return same and (plain or data != "cifar10")
