"""Files of weights: read what people have, safely, and write our own.

A checkpoint can be a program in disguise: pickle runs what it is told to. Only tensors and plain
containers are admitted here; anything else is refused with the way to convert it.
"""

from __future__ import annotations

import json
import pickle
import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ttapca.disk import make_folder, replace_file
from ttapca.errors import CheckpointError

SAFETENSORS = ".safetensors"
WRAPPERS = ("state_dict", "model_state_dict", "net", "model")
PREFIXES = ("module.", "model.")
FORMAT = "ttapca.weights"

# How torch names what a file asks for and is not allowed: classes and functions.
UNSAFE_NAME = re.compile(r"(?:GLOBAL|class|function)\s+`?([\w.]+\.[\w.]+)")
CONVERSION = (
    'python -c "import sys, torch; c = torch.load(sys.argv[1], weights_only=False, '
    "map_location='cpu'); c = c.state_dict() if hasattr(c, 'state_dict') else c; "
    "c = next((c[k] for k in {names} if k in c), c); "
    'torch.save({{k: v for k, v in c.items() if torch.is_tensor(v)}}, sys.argv[2])" '
    "{path} weights.pth"
)


@dataclass(frozen=True)
class Weights:
    """What a file holds.

    Attributes:
        tensors: By name, without the prefixes that wrappers leave.
        description: What a file of ours says about its network; empty for anybody else's.
    """

    tensors: dict[str, Tensor]
    description: dict[str, Any] = field(default_factory=dict)


def read_weights(path: Path) -> Weights:
    """Read a state dict from `.safetensors`, or from anything that `torch.save` wrote.

    The weights may be bare or under `state_dict`, `model_state_dict`, `net` or `model`; prefixes
    `module.` and `model.` are taken off. No code in the file is run.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is missing, cut short, unsafe, or holds no weights.

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
        return Weights(_without_prefixes(tensors, path), _description(metadata, path))
    return Weights(_without_prefixes(_unwrapped(_read_torch(path)), path))


def write_weights(path: Path, tensors: Mapping[str, Tensor], description: dict[str, Any]) -> None:
    """Write a file that says itself which network it is for.

    Args:
        path: Ends in `.safetensors`; replaced in one step.
        tensors: By name.
        description: Anything that JSON can hold.

    Raises:
        StorageError: The operating system refuses.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
        >>> write_weights(path, {"fc.bias": torch.zeros(3)}, {"architecture": "resnet20"})
        >>> read_weights(path).description
        {'architecture': 'resnet20'}
    """
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
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it was cut short or is of another "
            "kind. Copy or download it again."
        ) from error


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old files: what counts is whether they are read
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = UNSAFE_NAME.search(str(error))
        if unsafe is None:
            raise _damaged(path, error) from error
        raise CheckpointError(
            f"{path} holds more than tensors: it asks for `{unsafe[1]}`, and reading that would "
            "run code from the file, so it is refused. If you trust its author, convert it once:\n"
            f"{CONVERSION.format(names=WRAPPERS, path=shlex.quote(str(path)))}"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    # What torch says about it is long and about its own options; the cause is kept for who looks.
    return CheckpointError(
        f"{path} is not a whole PyTorch checkpoint: it was cut short or is of another kind "
        f"({type(error).__name__} while reading it). Copy or download it again."
    )


def _unwrapped(content: Any) -> Any:
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            return content[name]
    return content


def _without_prefixes(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, Mapping) or not any(
        isinstance(value, Tensor) for value in content.values()
    ):
        found = f"the keys {list(content)[:5]}" if isinstance(content, Mapping) else "no dict"
        raise CheckpointError(
            "A checkpoint is a state dict, bare or under "
            f"{', '.join(f'`{name}`' for name in WRAPPERS)}; {path} holds {found}. Save "
            "`model.state_dict()`."
        )
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        bare = str(name)
        while bare.startswith(PREFIXES):
            bare = bare.partition(".")[2]
        if isinstance(value, Tensor):
            tensors[bare] = value
    return tensors


def _description(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        return {}
    try:
        description = json.loads(metadata["description"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} says that ttapca wrote it, but not what: {error}."
        ) from error
    if not isinstance(description, dict):
        raise CheckpointError(f"The description in {path} must be an object of JSON.")
    return description
