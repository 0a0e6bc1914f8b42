"""From a name or a file to a network in evaluation mode, whatever the file's layout.

Nothing is built before the names and shapes in the file fit it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, conform, shown
from ttapca.errors import CheckpointError, LayerNotFoundError, OptionError, did_you_mean
from ttapca.networks.architectures import ARCHITECTURES, build, shapes_of
from ttapca.networks.network import (
    CIFAR_SHAPE,
    INPUT_SHAPE,
    MOST_CHANNELS,
    MOST_CLASSES,
    NORMALISATIONS,
    ImageNetwork,
    Normalisation,
)
from ttapca.networks.rotation import HEAD_PREFIX, RotationHead, RotationNetwork
from ttapca.networks.weight_files import SAFETENSORS, WeightFile, read_weights

COUNTER = "num_batches_tracked"  # BatchNorm's; older files lack it, and nothing depends on it
NAMES_SHOWN = 4

Shapes = Mapping[str, tuple[int, ...]]


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
    return _network(read_weights(path), path, architecture, normalisation, input_shape)


def load_rotation(
    source: str | Path, *, normalisation: str | Normalisation | None = None
) -> RotationNetwork:
    """Load a network together with the rotation head it was trained with, as `load` does.

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
        wanted = _shapes_in(RotationHead(channels).state_dict())
    _check_shapes(wanted, head_tensors, "rotation head", path)
    head = RotationHead(channels)
    _fill(head, head_tensors, "rotation head", path)
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
    _fill(network, _own_tensors(read_weights(Path(path))), type(network).__name__, Path(path))
    return network.eval()


def packaged() -> dict[str, Path]:
    """The networks that ship with the package: names and files.

    Example:
        >>> "digits-small-cnn" in packaged()
        True
    """
    folder = Path(str(resources.files("ttapca.networks") / "weights"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SAFETENSORS}"))}


def find_weights(source: str | Path) -> Path:
    """The file behind a name or a path.

    Raises:
        OptionError: There is none; near names are offered.
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


def guess_architecture(tensors: Mapping[str, Tensor]) -> str | None:
    """The architecture whose state dict has these names and shapes; classes and channels are free.

    Example:
        >>> guess_architecture(build("resnet20", classes=7).state_dict())
        'resnet20'
    """
    classes, channels = _classes_of(tensors), _channels_of(tensors)
    if classes is None or channels is None:
        return None
    found = _without_counters(_shapes_in(tensors))
    for name in ARCHITECTURES:
        if _without_counters(shapes_of(name, classes, channels)) == found:
            return name
    return None


def _network(
    weights: WeightFile,
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
    channels = _channels_of(tensors) or CIFAR_SHAPE[0]
    shape = input_shape or weights.description.get("input_shape") or (channels, *CIFAR_SHAPE[1:])
    conform(tuple(shape), INPUT_SHAPE, "A network", OptionError, at="input_shape")
    stated = normalisation or _described_normalisation(weights.description, shape[0], path)
    classes = _classes_of(tensors) or 1
    _check_shapes(shapes_of(named, classes, shape[0]), tensors, named, path)
    network = build(named, classes=classes, normalisation=stated, input_shape=shape)
    _fill(network, tensors, named, path)
    network.eval()
    return network


def _own_tensors(weights: WeightFile) -> dict[str, Tensor]:
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


def _classes_of(tensors: Mapping[str, Tensor]) -> int | None:
    shape = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    return shape[0] if len(shape) == 2 and 1 <= shape[0] <= MOST_CLASSES else None


def _channels_of(tensors: Mapping[str, Tensor]) -> int | None:
    shape = tensors["conv1.weight"].shape if "conv1.weight" in tensors else ()
    return shape[1] if len(shape) == 4 and 1 <= shape[1] <= MOST_CHANNELS else None


def _fill(network: nn.Module, tensors: Mapping[str, Tensor], name: str, path: Path) -> None:
    """Copy weights into a network, all of them or none; it keeps its own precision."""
    own = network.state_dict()
    _check_shapes(_shapes_in(own), tensors, name, path)
    for key, value in tensors.items():
        if value.is_complex() and not own[key].is_complex():
            raise CheckpointError(
                f"`{key}` of `{name}` is real, and complex in {path}: the weights are of another "
                "network."
            )
    counters = {key: torch.zeros_like(own[key]) for key in own if key.endswith(COUNTER)}
    network.load_state_dict({**counters, **tensors})


def _check_shapes(wanted: Shapes, tensors: Mapping[str, Tensor], name: str, path: Path) -> None:
    """Compare names and shapes of a network with those of a file, which may lack counters."""
    counters = {key: shape for key, shape in wanted.items() if key.endswith(COUNTER)}
    wrong = _differences(wanted, {**counters, **_shapes_in(tensors)})
    if not wrong:
        return
    fitting = guess_architecture(tensors)
    advice = (
        f"They are those of the architecture `{fitting}` with {_classes_of(tensors)} classes."
        if fitting
        else "No architecture of ttapca has these names and shapes; for a network of your own "
        "name its factory: `--model package.module:factory --weights FILE`."
    )
    raise CheckpointError(f"The weights in {path} do not fit `{name}`: {wrong}. {advice}")


def _differences(wanted: Shapes, found: Shapes) -> str:
    """Which names are missing, unexpected or wrongly shaped; nothing when all is well."""
    parts = {
        "missing": [f"`{key}`" for key in wanted if key not in found],
        "unexpected": [f"`{shown(key)[1:-1]}`" for key in found if key not in wanted],
        "wrong shape": [
            f"`{key}` {found[key]} for {shape}"
            for key, shape in wanted.items()
            if key in found and found[key] != shape
        ],
    }
    return "; ".join(f"{what} {_shortened(keys)}" for what, keys in parts.items() if keys)


def _shortened(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shapes_in(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _without_counters(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if not name.endswith(COUNTER)}
