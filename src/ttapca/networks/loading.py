"""One way in: a name, a file, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttapca._checks import OneOf, conform
from ttapca.errors import CheckpointError, LayerNotFoundError, OptionError, did_you_mean
from ttapca.networks.architectures import ARCHITECTURES, build, shapes_of
from ttapca.networks.descriptions import INPUT_SHAPE
from ttapca.networks.matching import (
    channels_of,
    check_shapes,
    classes_of,
    guess_architecture,
    load_into,
    shapes_in,
)
from ttapca.networks.network import CIFAR_SHAPE, NORMALISATIONS, ImageNetwork, Normalisation
from ttapca.networks.rotation import HEAD_PREFIX, RotationHead, RotationNetwork
from ttapca.networks.weight_files import SAFETENSORS, Weights, read_weights


def load(
    source: str | Path,
    architecture: str | None = None,
    *,
    normalisation: str | Normalisation | None = None,
    input_shape: Sequence[int] | None = None,
) -> ImageNetwork:
    """Load a trained network.

    Args:
        source: A name of `packaged()`, or a file: `.safetensors`, or `.pt`, `.pth`, `.pth.tar`
            with the weights bare or under `state_dict`, `model_state_dict`, `net`.
        architecture: One of `ARCHITECTURES`; found out from the weights by default.
        normalisation: What the network does to images in [0, 1] before anything else: one of
            `NORMALISATIONS`, or numbers. Files written by `train` know it; others have to be told.
        input_shape: Of one image; 32 x 32 pixels by default, or what the file says.

    Returns:
        The network, in evaluation mode.

    Raises:
        OptionError: There is no such name or file, or an option is missing or makes no sense.
        CheckpointError: The file is damaged, unsafe, or does not fit the architecture.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "mine.pth"
        >>> torch.save({"state_dict": build("resnet20").state_dict()}, path)
        >>> load(path, normalisation="cifar10").classes
        10
    """
    path = find_weights(source)
    weights = read_weights(path)
    return _network(weights, path, architecture, normalisation, input_shape)


def load_rotation(
    source: str | Path, *, normalisation: str | Normalisation | None = None
) -> RotationNetwork:
    """Load a network together with the rotation head it was trained with.

    Args:
        source: As for `load`.
        normalisation: As for `load`.

    Raises:
        OptionError: As for `load`.
        CheckpointError: As for `load`, or there is no rotation head in the file.

    Example:
        >>> load_rotation("nothing")
        Traceback (most recent call last):
        ttapca.errors.OptionError: `nothing` is neither a packaged network nor a file...
    """
    path = find_weights(source)
    weights = read_weights(path)
    split = weights.description.get("rotation_split")
    head_tensors = {
        name.removeprefix(HEAD_PREFIX): tensor
        for name, tensor in weights.tensors.items()
        if name.startswith(HEAD_PREFIX)
    }
    if not split or "conv1.weight" not in head_tensors:
        raise CheckpointError(
            f"Test-time training needs a rotation head; {path} has none. Train one with: ttapca "
            "train DATA ARCHITECTURE --rotation-head LAYER --to DIR"
        )
    network = _network(weights, path, None, normalisation, None)
    first = head_tensors["conv1.weight"]
    channels = first.shape[1] if first.dim() == 4 else 1
    with torch.device("meta"):  # as large as the file says it is: compared before it is made
        wanted = shapes_in(RotationHead(channels).state_dict())
    check_shapes(wanted, head_tensors, "rotation head", path)
    head = RotationHead(channels)
    load_into(head, head_tensors, "rotation head", path)
    try:
        return RotationNetwork(network, split, head).eval()
    except LayerNotFoundError as error:
        raise CheckpointError(f"The rotation head in {path} fits no layer: {error}") from error


def load_weights(network: nn.Module, path: Path | str) -> nn.Module:
    """Give a network of your own the weights of a file.

    Args:
        network: Changed in place.
        path: As for `load`.

    Returns:
        The network, in evaluation mode.

    Raises:
        CheckpointError: The file is damaged, unsafe, or does not fit the network.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "mine.pth"
        >>> torch.save(nn.Linear(2, 1).state_dict(), path)
        >>> load_weights(nn.Linear(2, 1), path)
        Linear(in_features=2, out_features=1, bias=True)
    """
    load_into(network, _own_tensors(read_weights(Path(path))), type(network).__name__, Path(path))
    return network.eval()


def packaged() -> dict[str, Path]:
    """The networks that ship with the package: names and files.

    Example:
        >>> "digits" in packaged()
        False
    """
    folder = Path(str(resources.files("ttapca.networks") / "weights"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SAFETENSORS}"))}


def find_weights(source: str | Path) -> Path:
    """The file behind a name or a path.

    Raises:
        OptionError: There is none; near names are offered.

    Example:
        >>> find_weights(__file__).name
        'loading.py'
    """
    names = packaged()
    if str(source) in names:
        return names[str(source)]
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if str(source) in ARCHITECTURES:
        raise OptionError(
            f"`{source}` is an architecture, which has no weights before it is trained. Give a "
            f"file of weights, or train it: ttapca train DATA {source} --to DIR"
        )
    known = ", ".join(names) or "none in this copy"
    raise OptionError(
        f"`{source}` is neither a packaged network nor a file.{did_you_mean(str(source), names)} "
        f"Packaged: {known}."
    )


def _network(
    weights: Weights,
    path: Path,
    architecture: str | None,
    normalisation: str | Normalisation | None,
    input_shape: Sequence[int] | None,
) -> ImageNetwork:
    tensors = _own_tensors(weights)
    said = weights.description.get("architecture")
    if said is not None:
        where = f"The description in {path}"
        conform(said, OneOf(tuple(ARCHITECTURES)), where, CheckpointError, at="architecture")
    named = architecture or said or guess_architecture(tensors)
    if named is None:
        owner = weights.description.get("factory")
        raise CheckpointError(
            f"The weights in {path} fit no architecture of ttapca; they start with "
            f"{', '.join(f'`{name}`' for name in list(tensors)[:3])}. Name the network's factory: "
            f"--model {owner or 'package.module:factory'} --weights {path}"
        )
    channels = channels_of(tensors) or CIFAR_SHAPE[0]
    shape = input_shape or weights.description.get("input_shape") or (channels, *CIFAR_SHAPE[1:])
    conform(tuple(shape), INPUT_SHAPE, "A network", OptionError, at="input_shape")
    stated = normalisation or _described_normalisation(weights.description, shape[0], path)
    classes = classes_of(tensors) or 1
    check_shapes(shapes_of(named, classes, shape[0]), tensors, named, path)
    network = build(named, classes=classes, normalisation=stated, input_shape=shape)
    load_into(network, tensors, named, path)
    network.eval()
    return network


def _own_tensors(weights: Weights) -> dict[str, Any]:
    return {
        name: tensor for name, tensor in weights.tensors.items() if not name.startswith(HEAD_PREFIX)
    }


def _described_normalisation(
    description: dict[str, Any], channels: int, path: Path
) -> Normalisation:
    values = description.get("normalisation")
    if values is None:
        raise OptionError(
            f"{path} does not say what its network subtracts from images and divides them by, and "
            "a wrong guess would only show as a worse accuracy. State it: normalisation "
            f"{', '.join(NORMALISATIONS)}, or a mean and a std."
        )
    try:
        return Normalisation(tuple(values["mean"]), tuple(values["std"])).for_channels(channels)
    except OptionError as error:
        raise CheckpointError(f"The normalisation in {path} does not fit: {error}") from error
