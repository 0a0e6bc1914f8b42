"""Files of weights: read what people have, safely, and write our own.

A checkpoint can be a program in disguise: pickle runs what it is told to. Only tensors and plain
containers are admitted here; anything else is refused with the way to convert it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from ttapca._checks import ListOf, Maybe, Number, Plain, Record, Text, Whole, conform, shown
from ttapca.errors import CheckpointError, OptionError
from ttapca.networks.network import INPUT_SHAPE, MOST_CHANNELS, MOST_CLASSES
from ttapca.networks.torch_files import read_torch
from ttapca.support.disk import make_folder, replace_file
from ttapca.support.parsing import parse_json

SAFETENSORS = ".safetensors"
WRAPPERS = ("state_dict", "model_state_dict", "net", "model")
PREFIXES = re.compile(r"^(?:(?:module|model)\.)+")
FORMAT = "ttapca.weights"

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

# What a file of ours says about its network. It may hold more: callers of `train` add what they
# like.
DESCRIPTION = Record(
    optional={
        "architecture": Text(100),
        "factory": Maybe(Text()),
        "classes": Whole(1, MOST_CLASSES),
        "input_shape": INPUT_SHAPE,
        "normalisation": Record(
            {
                "mean": ListOf(Number(-1e6, 1e6), 1, MOST_CHANNELS),
                "std": ListOf(Number(1e-9, 1e6), 1, MOST_CHANNELS),
            }
        ),
        "rotation_split": Maybe(Text()),
        "class_names": ListOf(Text(), 0, MOST_CLASSES),
        "data": Record({"name": Text()}, {"training_images": Text(64)}, others=Plain()),
        "training": Record(
            optional={"epochs": Whole(1, 10**6), "finished_epochs": Whole(1, 10**6)},
            others=Plain(),
        ),
        "test_accuracy": Number(0, 100),
    },
    others=Plain(),
)


@dataclass(frozen=True)
class WeightFile:
    """What a file holds.

    Attributes:
        tensors: By name, without the prefixes that wrappers leave.
        description: What a file of ours says about its network; empty for anybody else's.
    """

    tensors: dict[str, Tensor]
    description: dict[str, Any] = field(default_factory=dict)


def read_weights(path: Path) -> WeightFile:
    """Read a state dict from `.safetensors`, or from anything that `torch.save` wrote.

    The weights may be bare or under `state_dict`, `model_state_dict`, `net` or `model`; prefixes
    `module.` and `model.` are taken off. No code in the file is run.

    Raises:
        CheckpointError: The file is missing, cut short or unsafe, its description makes no sense,
            or it holds no weights, or weights that are not finite.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.pth"
        >>> torch.save({"state_dict": {"module.fc.bias": torch.zeros(3)}}, path)
        >>> read_weights(path).tensors
        {'fc.bias': tensor([0., 0., 0.])}
    """
    if not path.is_file():
        raise CheckpointError(f"A checkpoint is a file; there is none at {path}.")
    if path.suffix == SAFETENSORS:
        tensors, metadata = read_safetensors(path)
        return WeightFile(_state_dict(tensors, path), _description(metadata, path))
    content = read_torch(path, WRAPPERS)
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            return WeightFile(_state_dict(content[name], path))
    return WeightFile(_state_dict(content, path))


def write_weights(path: Path, tensors: Mapping[str, Tensor], description: dict[str, Any]) -> None:
    """Write a `.safetensors` file, in one step, that says itself which network it is for.

    Raises:
        OptionError: The description makes no sense.
        StorageError: The operating system refuses.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
        >>> write_weights(path, {"fc.bias": torch.zeros(3)}, {"architecture": "resnet20"})
        >>> read_weights(path).description
        {'architecture': 'resnet20'}
    """
    conform(description, DESCRIPTION, "The description of a network", OptionError)
    write_safetensors(path, tensors, {"format": FORMAT, "description": json.dumps(description)})


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors and words as one safetensors file, in one step."""
    make_folder(path.parent)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, safetensors.torch.save(plain, metadata))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and words.

    Raises:
        CheckpointError: The file is cut short or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except Exception as error:  # whatever the parser, and torch after it, make of hostile bytes
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it was cut short or is of another "
            "kind. Copy or download it again."
        ) from error


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    weights = content if isinstance(content, Mapping) else {}
    tensors = {
        PREFIXES.sub("", str(name)): value
        for name, value in weights.items()
        if isinstance(value, Tensor)
    }
    if not tensors:
        found = (
            f"the keys {shown(list(content)[:5])}" if isinstance(content, Mapping) else "no dict"
        )
        raise CheckpointError(
            "A checkpoint is a state dict, bare or under "
            f"{', '.join(f'`{name}`' for name in WRAPPERS)}; {path} holds {found}. Save "
            "`model.state_dict()`."
        )
    for name, tensor in tensors.items():
        _check_plain(name, tensor, path)
    return tensors


def _check_plain(name: str, tensor: Tensor, path: Path) -> None:
    """Refuse a tensor that is not dense, of a common type, and finite."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not dense or tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"Weights are dense tensors of common types; `{name[:200]}` in {path} has type "
            f"{tensor.dtype} and layout {tensor.layout}. Save `model.state_dict()` in float32."
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"Weights are finite numbers; `{name[:200]}` in {path} holds others: the training "
            "diverged, or the file was changed. Take an earlier checkpoint."
        )


def _description(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        return {}
    where = f"The description in {path}"
    if "description" not in metadata:
        raise CheckpointError(f"{where} is missing, although ttapca wrote the file.")
    description: dict[str, Any] = parse_json(metadata["description"], where, CheckpointError)
    conform(description, DESCRIPTION, where, CheckpointError)
    return description
