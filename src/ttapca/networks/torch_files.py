"""Files that `torch.save` wrote: looked through before torch reads them.

`torch.load(weights_only=True)` runs no code of a file. But it believes what a file says about
sizes, and calls whatever it thinks harmless: thirty bytes can ask it for all memory there is. So
the pickle inside is followed here first, without making anything: Python's own unpickler runs it,
over stand-ins that note what they are asked for. Only containers, numbers, words and tensors may be
in it, each storage must be as large as the file says, and each tensor must lie within its storage.
Then torch reads the file.
"""

from __future__ import annotations

import io
import math
import pickle
import shlex
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ttapca.errors import CheckpointError

ZIP_START = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C  # the first number of the format before zip
PROTOCOL = 1001
PICKLES_BEFORE_DATA = 5  # of that format: magic, protocol, system, content, names of the storages
LARGEST_PICKLE = 8_000_000  # bytes, without the numbers of the tensors; about 250 for a tensor
MOST_DIMENSIONS = 64
# Tensors may share a storage, and repeat it by strides of zero; together at most so many times.
SHARING = 16

CONVERSION = (
    'python -c "import sys, torch; c = torch.load(sys.argv[1], weights_only=False, '
    "map_location='cpu'); c = c.state_dict() if hasattr(c, 'state_dict') else c; "
    "c = next((c[k] for k in {names} if k in c), c); "
    'torch.save({{k: v for k, v in c.items() if torch.is_tensor(v)}}, sys.argv[2])" '
    "{path} weights.pth"
)


def read_torch(path: Path, wrappers: tuple[str, ...]) -> Any:
    """What `torch.save` wrote, if it is no more than containers and tensors.

    Args:
        path: The file.
        wrappers: Names under which weights may lie, for the advice on other files.

    Raises:
        CheckpointError: It is cut short, holds more than tensors, or lies about sizes.
    """
    try:
        _look_through(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old files: what counts is whether they are read
            return torch.load(path, map_location="cpu", weights_only=True)
    except _MoreThanTensors as error:
        raise CheckpointError(
            f"{path} holds more than tensors: it asks for `{error}`, and reading that would run "
            "code from the file, so it is refused. If you trust its author, convert it once:\n"
            f"{CONVERSION.format(names=wrappers, path=shlex.quote(str(path)))}"
        ) from error
    except Exception as error:  # whatever two parsers make of hostile bytes
        # What torch says about it is long and about its own options; the cause is kept.
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint: it was cut short or is of another kind "
            f"({type(error).__name__} while reading it). Copy or download it again."
        ) from error


class _MoreThanTensors(Exception):  # noqa: N818 - a signal inside this module
    """The pickle names something that is neither a container nor a tensor."""


def _look_through(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = io.BytesIO(file.read(LARGEST_PICKLE))
    if start.read(len(ZIP_START)) == ZIP_START:
        _look_through_zip(path, size)
        return
    start.seek(0)
    storages = _Storages(size)
    found = [_Follower(start, storages).load() for _ in range(PICKLES_BEFORE_DATA)]
    if found[:2] != [MAGIC, PROTOCOL]:
        raise ValueError("no magic number")


def _look_through_zip(path: Path, size: int) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > size:
            raise ValueError("members of more bytes than the file")
        (content,) = [each for each in members if each.filename.endswith("/data.pkl")]
        folder = content.filename.removesuffix("data.pkl")
        records = {each.filename.removeprefix(f"{folder}data/"): each.file_size for each in members}
        with archive.open(content) as file:
            _Follower(io.BytesIO(file.read(LARGEST_PICKLE)), _Storages(size, records)).load()


class _Storage(NamedTuple):
    numbers: int


class _Container:
    """Stands in for every list, dictionary and tensor: takes what it is given, keeps nothing."""

    __slots__ = ()

    def append(self, value: object) -> None:
        """Of a list."""

    def extend(self, values: object) -> None:
        """Of a list."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | bytes | int | float | None):  # a nested tuple takes for ever
            raise TypeError("a name that is none")

    def __setstate__(self, state: object) -> None:
        """The attributes of a state dict: its versions."""


_CONTAINER = _Container()


class _Storages:
    """What a file says about its storages, compared with the file.

    Args:
        size: Bytes of the file.
        records: Bytes of each storage by name, where the file has a directory.
    """

    def __init__(self, size: int, records: Mapping[str, int] | None = None) -> None:
        self._size = size
        self._records = records
        self._seen: dict[str, int] = {}
        self._total = 0
        self._shown = 0

    def storage(self, identifier: Any) -> _Storage:
        """The storage that a persistent identifier names."""
        kind, of_type, name, _, count, *view = identifier
        if kind != "storage" or not isinstance(name, str) or view not in ([], [None]):
            raise ValueError("no identifier of a storage")
        if not isinstance(count, int) or count < 0:
            raise ValueError("no number of elements")
        item = ITEM_SIZES[of_type.name]
        if name not in self._seen:
            self._seen[name] = count * item
            self._total += count * item
        length = self._seen[name]
        if length != count * item or self._total > self._size:
            raise ValueError("storages of more bytes than the file")
        if self._records is not None and self._records[name] != length:
            raise ValueError("a storage of another size than its record")
        return _Storage(count)

    def tensor(
        self, storage: object, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Compare a tensor with its storage."""
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor without a storage")
        for numbers in ((offset,), shape, strides):
            if not all(isinstance(each, int) and each >= 0 for each in numbers):
                raise ValueError("a size that is no number")
        if len(shape) != len(strides) or len(shape) > MOST_DIMENSIONS:
            raise ValueError("a shape without strides")
        count = math.prod(shape)
        steps = zip(shape, strides, strict=True)
        last = offset + sum((side - 1) * stride for side, stride in steps)
        self._shown += count
        if count and (last >= storage.numbers or self._shown > SHARING * self._size):
            raise ValueError("a tensor of more numbers than its storage")
        if not count and max((*shape, 0)) > self._size:
            raise ValueError("an empty tensor of an absurd shape")


class _Named:
    """Stands in for a type or a function that a pickle names."""

    def __init__(self, name: str, storages: _Storages) -> None:
        self.name = name
        self._storages = storages

    def __call__(self, *arguments: Any) -> object:
        """Give what the call would give, as far as it matters here."""
        if self.name in _REBUILD:
            self._storages.tensor(*arguments[:4])
        elif self.name not in _CALLED or (self.name == "OrderedDict" and arguments):
            raise ValueError("a call of a type, or a container that is made of another")
        return _CONTAINER

    def __setstate__(self, state: object) -> None:
        raise ValueError("attributes of a type")


ITEM_SIZES = {
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("BFloat16Storage", "HalfStorage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("ComplexFloatStorage", "DoubleStorage", "LongStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_CALLED = {"OrderedDict", "_rebuild_parameter", "Size", "device"}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# What a pickle may name.
_ALLOWED = {
    "torch": {*ITEM_SIZES, *_DTYPES, "Size", "device"},
    "torch.storage": {"UntypedStorage"},
    "torch._utils": {*_REBUILD, "_rebuild_parameter"},
    "collections": {"OrderedDict"},
}
# The instructions that such pickles are made of.
_INSTRUCTIONS = (
    "PROTO STOP MARK GLOBAL BINPERSID REDUCE BUILD NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET"
)


def _add_container(follower: Any) -> None:
    follower.append(_CONTAINER)


class _Follower(pickle._Unpickler):  # the one in Python: its instructions can be replaced
    """Follow one pickle, without making what it describes."""

    def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        """Let a pickle name what tensors are made of, and nothing else."""
        if name not in _ALLOWED.get(module, ()):
            raise _MoreThanTensors(f"{module}.{name}")
        return _Named(name, self._storages)

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage of a tensor."""
        return self._storages.storage(pid)

    dispatch = {
        **{
            getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
            for name in _INSTRUCTIONS.split()
        },
        pickle.EMPTY_DICT[0]: _add_container,
        pickle.EMPTY_LIST[0]: _add_container,
    }
