"""Read weight files of any origin, and write our own. No code in a file is run."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Collection, Mapping
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
from ttapca.support.disk import make_folder, replace_file
from ttapca.support.modules import WRAPPED
from ttapca.support.parsing import parse_json

SAFETENSORS = ".safetensors"
WRAPPERS = ("state_dict", "model_state_dict", "net", "model")
PREFIX = re.compile(rf"^(?:{'|'.join(WRAPPED)})\.")
FORMAT = "ttapca.weights"
SHARING = 16  # tensors may share a storage, but may not show more than this many times the file
CONVERSION = (
    'python -c "import sys, torch; c = torch.load(sys.argv[1], weights_only=False, '
    "map_location='cpu'); c = c.state_dict() if hasattr(c, 'state_dict') else c; "
    f"c = next((c[k] for k in {WRAPPERS} if k in c), c); "
    'torch.save({k: v for k, v in c.items() if torch.is_tensor(v)}, sys.argv[2])"'
)
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

# The description that a file of ours has of its network. Callers of `train` may add plain values.
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
    """The weights of a file, and the description that a file of ours has of its network."""

    path: Path
    stored: dict[str, Tensor]  # by the names that they have there
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, without the prefixes of modules that wrapped the network."""
        return self.named_like(None)

    def named_like(self, wanted: Collection[str] | None) -> dict[str, Tensor]:
        """Return the weights without the prefixes that the wanted names lack; None wants none."""
        found = self.stored
        while wanted is None or not found.keys() >= set(wanted):
            shorter: dict[str, Tensor] = {}
            for name, tensor in found.items():
                bare = PREFIX.sub("", name)
                if bare in shorter:
                    raise CheckpointError(
                        f"Weights have different names; {self.path} holds two that are called "
                        f"`{bare[:200]}` but for a prefix. Save those of one network."
                    )
                shorter[bare] = tensor
            if shorter.keys() == found.keys():
                break
            found = shorter
        return found


def read_weights(path: Path) -> WeightFile:
    """Read a state dict, bare or wrapped, from `.safetensors` or what `torch.save` wrote."""
    if not path.is_file():
        raise CheckpointError(f"A checkpoint is a file; there is none at {path}.")
    if path.suffix == SAFETENSORS:
        tensors, metadata = read_safetensors(path)
        return WeightFile(path, _state_dict(tensors, path), _description(metadata, path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the parser fails in many ways on hostile bytes
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused:
            raise CheckpointError(
                f"{path} holds more than tensors: it asks for `{refused[1]}`, and reading that "
                "would run code from the file, so it is refused. If you trust its author, convert "
                f"it once:\n{CONVERSION} {shlex.quote(str(path))} weights.pth"
            ) from error
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint: it was cut short or is of another kind "
            f"({type(error).__name__} while reading it). Copy or download it again."
        ) from error
    named = content if isinstance(content, Mapping) else {}
    inner = [named[name] for name in WRAPPERS if isinstance(named.get(name), Mapping)]
    return WeightFile(path, _state_dict(inner[0] if inner else content, path))


def write_weights(path: Path, tensors: Mapping[str, Tensor], description: dict[str, Any]) -> None:
    """Write a `.safetensors` file in one step, with a description of its network."""
    conform(description, DESCRIPTION, "The description of a network", OptionError)
    write_safetensors(path, tensors, {"format": FORMAT, "description": json.dumps(description)})


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors and metadata as one safetensors file, in one step."""
    make_folder(path.parent)
    # Copied, since safetensors refuses tensors that share memory, as those of a shared layer do.
    plain = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    replace_file(path, safetensors.torch.save(plain, metadata))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, or raise `CheckpointError`."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except Exception as error:  # the parser and torch fail in many ways on hostile bytes
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it was cut short or is of another "
            "kind. Copy or download it again."
        ) from error


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    named = content if isinstance(content, Mapping) else {}
    tensors = {str(name): value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        found = f"the keys {shown(list(named)[:5])}" if isinstance(content, Mapping) else "no dict"
        raise CheckpointError(
            f"A checkpoint is a state dict, bare or under `{'`, `'.join(WRAPPERS)}`; {path} holds "
            f"{found}. Save `model.state_dict()`."
        )
    size = path.stat().st_size
    for name, tensor in tensors.items():
        dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"Weights are dense tensors of common types; `{name[:200]}` in {path} has type "
                f"{tensor.dtype} and layout {tensor.layout}. Save `model.state_dict()` in float32."
            )
        # Compressed records and repeated numbers may take far more memory than the file.
        if tensor.untyped_storage().nbytes() > size or tensor.numel() > SHARING * size:
            raise CheckpointError(
                f"{path} is not a whole checkpoint: `{name[:200]}` would be larger than the file. "
                "Copy or download it again."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"Weights are finite numbers; `{name[:200]}` in {path} holds others: the training "
                "diverged, or the file was changed. Take an earlier checkpoint."
            )
    return tensors


def _description(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        return {}
    where = f"The description in {path}"
    if "description" not in metadata:
        raise CheckpointError(f"{where} is missing, although ttapca wrote the file.")
    description: dict[str, Any] = parse_json(metadata["description"], where, CheckpointError)
    conform(description, DESCRIPTION, where, CheckpointError)
    return description
