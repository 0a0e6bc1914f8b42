"""Turn a name or a file into a network. The names and shapes in a file are checked first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, conform, shown
from ttapca.errors import CheckpointError, LayerNotFoundError, OptionError, did_you_mean
from ttapca.networks.architectures import ARCHITECTURES, build, default_shape, shapes_of
from ttapca.networks.external import is_hub_name, load_from_hub
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

FILTER_SUFFIX = "-filter"  # of the folder beside the weights of a packaged network
COUNTER = "num_batches_tracked"  # of BatchNorm; older files lack it, and nothing depends on it
NAMES_SHOWN = 4
FIRST_WEIGHTS = ("conv1.weight", "features.0.0.weight")
LAST_WEIGHTS = ("fc.weight", "classifier.1.weight")

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def load(
    source: str | Path,
    architecture: str | None = None,
    *,
    normalisation: str | Normalisation | None = None,
    input_shape: Sequence[int] | None = None,
    eps: float | None = None,
) -> ImageNetwork:
    """Load a trained network, in evaluation mode.

    Args:
        source: A name of `packaged()`, or a file: `.safetensors`, or `.pt`, `.pth`, `.pth.tar`
            with the weights bare or under `state_dict`, `model_state_dict`, `net`; or `hf:NAME` and
            `timm:NAME` for networks of transformers and timm that are on this machine.
        architecture: One of `ARCHITECTURES`; by default found out from the weights. They do not
            tell the strides of a ResNet-50, 101 or 152: it is taken for torchvision's unless you
            say `resnet50-early-stride`.
        normalisation: Of images in [0, 1]: one of `NORMALISATIONS`, or numbers. Files written by
            `train` state it; for others, state it yourself.
        input_shape: The shape of one image; by default the file's, or else 32 x 32 pixels, and
            224 x 224 for networks of photographs.
        eps: Number that norms add to a variance, by default mostly 1e-5; weights that come from
            TensorFlow or Keras often need 1e-3.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "mine.pth"
        >>> torch.save({"state_dict": build("resnet20").state_dict()}, path)
        >>> load(path, normalisation="cifar10").classes
        10
    """
    if is_hub_name(str(source)):
        options = {"architecture": architecture, "input_shape": input_shape, "eps": eps}
        for option, value in options.items():
            if value is not None:
                raise OptionError(f"`{option}=` has no meaning for `{source}`.")
        return load_from_hub(str(source), normalisation)
    weights = read_weights(find_weights(source))
    return _network(weights, architecture, normalisation, input_shape, eps)


def load_rotation(
    source: str | Path, *, normalisation: str | Normalisation | None = None
) -> RotationNetwork:
    """Load a network together with the rotation head that it was trained with, as `load` does.

    Example:
        >>> load_rotation("nothing")
        Traceback (most recent call last):
        ttapca.errors.OptionError: `nothing` is neither a packaged network nor a file...
    """
    weights = read_weights(find_weights(source))
    split = weights.description.get("rotation_split")
    tensors = {
        name.removeprefix(HEAD_PREFIX): tensor
        for name, tensor in weights.tensors.items()
        if name.startswith(HEAD_PREFIX)
    }
    if not split or "conv1.weight" not in tensors:
        raise CheckpointError(
            f"Test-time training needs a rotation head; {weights.path} has none. Train one with: "
            "ttapca train DATA ARCHITECTURE --rotation-head LAYER --to DIR"
        )
    network = _network(weights, None, normalisation)
    head = RotationHead(_size(tensors, ("conv1.weight",), 1, 4, MOST_CHANNELS) or 1)
    _fill(head, tensors, "rotation head", weights.path)
    try:
        return RotationNetwork(network, split, head).eval()
    except LayerNotFoundError as error:
        raise CheckpointError(
            f"The rotation head in {weights.path} fits no layer: {error}"
        ) from error


def load_weights(network: nn.Module, path: Path | str) -> nn.Module:
    """Load the weights of a file into any module, and return it in evaluation mode.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "mine.pth"
        >>> torch.save(nn.Linear(2, 1).state_dict(), path)
        >>> load_weights(nn.Linear(2, 1), path)
        Linear(in_features=2, out_features=1, bias=True)
    """
    wanted = [name for name in network.state_dict() if not name.endswith(COUNTER)]
    tensors = _without_head(read_weights(Path(path)).named_like(wanted))
    _fill(network, tensors, type(network).__name__, Path(path))
    return network.eval()


def packaged() -> dict[str, Path]:
    """Return the networks that ship with the package: names and files.

    Example:
        >>> "digits-small-cnn" in packaged()
        True
    """
    return {path.stem: path for path in sorted(_shipped().glob(f"*{SAFETENSORS}"))}


def packaged_filters() -> dict[str, Path]:
    """Return the filters that ship with packaged networks, for `ttapca.load`: names and folders.

    Example:
        >>> import ttapca
        >>> ttapca.load(packaged_filters()["cifar10-resnet20"]).layer
        'conv1'
    """
    folders = sorted(_shipped().glob(f"*{FILTER_SUFFIX}"))
    return {path.name.removesuffix(FILTER_SUFFIX): path for path in folders}


def _shipped() -> Path:
    return Path(str(resources.files("ttapca.networks") / "weights"))


def describe_weights(source: str | Path) -> dict[str, Any]:
    """Return the description that `train` wrote of a packaged network or a file; else nothing."""
    return read_weights(find_weights(source)).description


def find_weights(source: str | Path) -> Path:
    """Return the file of a packaged network's name or of a path."""
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
    raise OptionError(
        f"`{source}` is neither a packaged network nor a file.{did_you_mean(str(source), names)} "
        f"Packaged: {', '.join(names) or 'none in this copy'}."
    )


def guess_architecture(tensors: Tensors) -> str | None:
    """Return the architecture with these names and shapes, for any classes and channels."""
    classes, channels = _classes_in(tensors), _channels_in(tensors)
    if classes is None or channels is None:
        return None
    for name in ARCHITECTURES:
        wanted = shapes_of(name, classes, channels)
        if wanted == _shapes_in(tensors, wanted):
            return name
    return None


def _network(
    weights: WeightFile,
    architecture: str | None,
    normalisation: str | Normalisation | None,
    input_shape: Sequence[int] | None = None,
    eps: float | None = None,
) -> ImageNetwork:
    path, description = weights.path, weights.description
    tensors = _without_head(weights.tensors)
    described = description.get("architecture")
    if described is not None:
        where = f"The description in {path}"
        conform(described, OneOf(tuple(ARCHITECTURES)), where, CheckpointError, at="architecture")
    name = architecture or described or guess_architecture(tensors)
    if name is None:
        raise CheckpointError(
            f"The weights in {path} fit no architecture of ttapca; they start with "
            f"{', '.join(f'`{each}`' for each in list(tensors)[:3])}. Name the network's factory: "
            f"--model {description.get('factory') or 'package.module:factory'} --weights {path}"
        )
    channels, classes = _channels_in(tensors) or CIFAR_SHAPE[0], _classes_in(tensors) or 1
    default = (channels, *default_shape(name)[1:])
    shape = input_shape or description.get("input_shape") or default
    conform(tuple(shape), INPUT_SHAPE, "A network", OptionError, at="input_shape")
    if normalisation is None:
        normalisation = _required_normalisation(description, shape[0], path)
    _check_shapes(shapes_of(name, classes, shape[0]), tensors, name, path)
    network = build(name, classes=classes, normalisation=normalisation, input_shape=shape, eps=eps)
    _fill(network, tensors, name, path)
    return network.eval()


def stated_normalisation(description: Mapping[str, Any]) -> Normalisation | None:
    """Return the normalisation that a description of weights states; None if it states none."""
    values = description.get("normalisation")
    return None if values is None else Normalisation(tuple(values["mean"]), tuple(values["std"]))


def _required_normalisation(
    description: Mapping[str, Any], channels: int, path: Path
) -> Normalisation:
    found = stated_normalisation(description)
    if found is None:
        raise OptionError(
            f"{path} does not say what its network subtracts from images and divides them by. "
            f"State it: normalisation {', '.join(NORMALISATIONS)}, or a mean and a std."
        )
    try:
        return found.for_channels(channels)
    except OptionError as error:
        raise CheckpointError(f"The normalisation in {path} does not fit: {error}") from error


def _without_head(tensors: Tensors) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if not name.startswith(HEAD_PREFIX)}


def _size(
    tensors: Tensors, names: Sequence[str], axis: int, dimensions: int, most: int
) -> int | None:
    """Return one side of the first of these tensors that has a sensible shape."""
    for shape in (tensors[name].shape for name in names if name in tensors):
        if len(shape) == dimensions and 1 <= shape[axis] <= most:
            return shape[axis]
    return None


def _classes_in(tensors: Tensors) -> int | None:
    return _size(tensors, LAST_WEIGHTS, 0, 2, MOST_CLASSES)


def _channels_in(tensors: Tensors) -> int | None:
    return _size(tensors, FIRST_WEIGHTS, 1, 4, MOST_CHANNELS)


def _fill(network: nn.Module, tensors: Tensors, name: str, path: Path) -> None:
    """Copy weights into a network, all of them or none; it keeps its precision."""
    own = network.state_dict()
    _check_shapes({key: tuple(value.shape) for key, value in own.items()}, tensors, name, path)
    for key, value in tensors.items():
        if value.is_complex() and not own[key].is_complex():
            raise CheckpointError(
                f"`{key}` of `{name}` is real, and complex in {path}: the weights are of another "
                "network."
            )
    counters = {key: torch.zeros_like(own[key]) for key in own if key.endswith(COUNTER)}
    network.load_state_dict({**counters, **tensors})


def _shapes_in(tensors: Tensors, wanted: Shapes) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in a file, with the wanted counters, which it may lack."""
    counters = {key: shape for key, shape in wanted.items() if key.endswith(COUNTER)}
    return {**counters, **{name: tuple(value.shape) for name, value in tensors.items()}}


def _check_shapes(wanted: Shapes, tensors: Tensors, name: str, path: Path) -> None:
    """Raise `CheckpointError` unless a network and a file have the same names and shapes."""
    found = _shapes_in(tensors, wanted)
    if found == wanted:
        return
    differences = {
        "missing": [f"`{key}`" for key in wanted if key not in found],
        "unexpected": [f"`{shown(key)[1:-1]}`" for key in found if key not in wanted],
        "wrong shape": [
            f"`{key}` {found[key]} for {shape}"
            for key, shape in wanted.items()
            if found.get(key, shape) != shape
        ],
    }
    wrong = []
    for difference, names in differences.items():
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        if names:
            wrong.append(f"{difference} {', '.join(names[:NAMES_SHOWN])}{more}")
    fitting = guess_architecture(tensors)
    advice = (
        f"They are those of the architecture `{fitting}` with {_classes_in(tensors)} classes."
        if fitting
        else "No architecture of ttapca has these names and shapes; for a network of your own "
        "name its factory: `--model package.module:factory --weights FILE`."
    )
    raise CheckpointError(
        f"The weights in {path} do not fit `{name}`: {'; '.join(wrong)}. {advice}"
    )
