"""Read weight files of any origin safely, and write our own.

`torch.load(weights_only=True)` runs no code from a file, but it believes the sizes in the file and
calls some functions it considers harmless: thirty bytes can ask it for all the memory there is. So
Python's own unpickler first runs the pickle over stand-ins that make nothing and check every
request. Only then does torch read the file.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import shlex
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
    """Read a state dict from `.safetensors`, or from anything that `torch.save` wrote.

    The weights may be bare or under `state_dict`, `model_state_dict`, `net` or `model`, and their
    names may have the prefixes `module.`, `model.` and `_orig_mod.`. No code in the file is run.

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
        return WeightFile(path, _state_dict(tensors, path), _description(metadata, path))
    content = _read_torch(path)
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
    for name, tensor in tensors.items():
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


# Files that `torch.save` wrote --------------------------------------------------------------------

ZIP_START = b"PK\x03\x04"
LEGACY_START = [0x1950A86A20F9469CFC6C, 1001]  # magic number and protocol of the format before zip
LEGACY_PICKLES = 5  # these two, the system, the content, the names of the storages
LARGEST_PICKLE = 8_000_000  # bytes without the values of the tensors; a tensor takes about 250
MOST_DIMENSIONS = 64
SHARING = 16  # tensors may share storages, but may not show more than this many times the file
CONVERSION = (
    'python -c "import sys, torch; c = torch.load(sys.argv[1], weights_only=False, '
    "map_location='cpu'); c = c.state_dict() if hasattr(c, 'state_dict') else c; "
    f"c = next((c[k] for k in {WRAPPERS} if k in c), c); "
    'torch.save({k: v for k, v in c.items() if torch.is_tensor(v)}, sys.argv[2])"'
)


def _read_torch(path: Path) -> Any:
    try:
        _inspect(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            return torch.load(path, map_location="cpu", weights_only=True)
    except _MoreThanTensors as error:
        raise CheckpointError(
            f"{path} holds more than tensors: it asks for `{error}`, and reading that would run "
            "code from the file, so it is refused. If you trust its author, convert it once:\n"
            f"{CONVERSION} {shlex.quote(str(path))} weights.pth"
        ) from error
    except Exception as error:  # both parsers fail in many ways on hostile bytes
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint: it was cut short or is of another kind "
            f"({type(error).__name__} while reading it). Copy or download it again."
        ) from error


def _inspect(path: Path) -> None:
    """Raise an error of any kind unless a file holds tensors and plain containers only."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LARGEST_PICKLE)
    if not start.startswith(ZIP_START):
        inspector = _Inspector(start, size)
        if [inspector.load() for _ in range(LEGACY_PICKLES)][:2] != LEGACY_START:
            raise ValueError("no magic number")
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > size:
            raise ValueError("members of more bytes than the file")
        (content,) = [each for each in members if each.filename.endswith("/data.pkl")]
        folder = content.filename.removesuffix(".pkl") + "/"
        records = {each.filename.removeprefix(folder): each.file_size for each in members}
        with archive.open(content) as file:
            _Inspector(file.read(LARGEST_PICKLE), size, records).load()


class _MoreThanTensors(Exception):  # noqa: N818 - a signal inside this module
    """The pickle names something that is neither a container nor a tensor."""


class _Container:
    """Stands in for every list, dictionary and tensor; it keeps nothing."""

    __slots__ = ()

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | bytes | int | float | None):  # a nested tuple takes for ever
            raise TypeError("a key of a dictionary that is no name")

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes of a state dict, which are its versions."""


class _Storage(NamedTuple):
    numbers: int


class _Named(NamedTuple):
    """Stands in for a type or a function that a pickle names."""

    name: str
    inspector: _Inspector

    def __call__(self, *arguments: Any) -> _Container:
        """Check the call instead of making it."""
        if self.name in _REBUILD:
            self.inspector.check_tensor(*arguments[:4])
        elif self.name not in _CALLED or (self.name == "OrderedDict" and arguments):
            raise ValueError("a call of a type, or a container that is made of another")
        return _CONTAINER

    def __setstate__(self, state: object) -> None:
        raise ValueError("attributes of a type")


_CONTAINER = _Container()
_ITEM_SIZES = {
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("BFloat16Storage", "HalfStorage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("ComplexFloatStorage", "DoubleStorage", "LongStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_CALLED = {"OrderedDict", "_rebuild_parameter", "Size", "device"}
_DTYPE_NAMES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED = {  # names in a pickle, by module
    "torch": {*_ITEM_SIZES, *_DTYPE_NAMES, "Size", "device"},
    "torch.storage": {"UntypedStorage"},
    "torch._utils": {*_REBUILD, "_rebuild_parameter"},
    "collections": {"OrderedDict"},
}
_INSTRUCTIONS = (  # that such pickles are made of
    "PROTO STOP MARK GLOBAL BINPERSID REDUCE BUILD NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET"
)


def _push_container(unpickler: Any) -> None:
    unpickler.append(_CONTAINER)


class _Inspector(pickle._Unpickler):  # the one in Python: its instructions can be replaced
    """Follow a pickle without making its objects, and compare its sizes with file and `records`."""

    def __init__(self, content: bytes, size: int, records: Mapping[str, int] | None = None) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._size, self._records = size, records
        self._lengths: dict[str, int] = {}  # bytes of each storage
        self._total = 0  # bytes of all storages
        self._shown = 0  # numbers in all tensors

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a part of tensors; refuse everything else."""
        if name not in _ALLOWED.get(module, ()):
            raise _MoreThanTensors(f"{module}.{name}")
        return _Named(name, self)

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a stand-in for a storage, which must be as large as the file says."""
        kind, of_type, name, _, count, *view = pid
        if kind != "storage" or not isinstance(name, str) or view not in ([], [None]):
            raise ValueError("no identifier of a storage")
        if not isinstance(count, int) or count < 0:
            raise ValueError("no number of elements")
        length = count * _ITEM_SIZES[of_type.name]
        if name not in self._lengths:
            self._lengths[name] = length
            self._total += length
        if self._lengths[name] != length or self._total > self._size:
            raise ValueError("storages of more bytes than the file")
        if self._records is not None and self._records[name] != length:
            raise ValueError("a storage of another size than its record")
        return _Storage(count)

    def check_tensor(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Raise an error of any kind unless this is a storage, and a tensor lies within it."""
        if not all(isinstance(each, int) and each >= 0 for each in (offset, *shape, *strides)):
            raise ValueError("a size that is no number")
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError("a shape that no tensor has")
        steps = zip(shape, strides, strict=True)
        last = offset + sum((side - 1) * stride for side, stride in steps)
        count = math.prod(shape)
        self._shown += count
        # Only a storage has `numbers`: this is also the check that there is one.
        if (last >= storage.numbers or self._shown > SHARING * self._size) and count:
            raise ValueError("a tensor of more numbers than its storage")
        if not count and max((*shape, 0)) > self._size:
            raise ValueError("an empty tensor of an absurd shape")

    dispatch = {
        **{
            getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
            for name in _INSTRUCTIONS.split()
        },
        pickle.EMPTY_DICT[0]: _push_container,
        pickle.EMPTY_LIST[0]: _push_container,
    }
