"""Files that `torch.save` wrote: looked through before torch reads them.

`torch.load(weights_only=True)` runs no code of a file. But it believes what a file says about
sizes, and calls whatever it thinks harmless: thirty bytes can ask it for all memory there is. So
the pickle inside is followed here first, instruction by instruction, without making anything: only
containers, numbers, words and tensors may be in it, each storage must be as large as the file
says, and each tensor must lie within its storage. Then torch reads the file.
"""

from __future__ import annotations

import math
import mmap
import pickletools
import shlex
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ttapca.errors import CheckpointError

ZIP_START = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C  # the first number of the format before zip
PROTOCOL = 1001
PICKLES_BEFORE_DATA = 5  # of that format: magic, protocol, system, content, names of the storages
MOST_DIMENSIONS = 64
MOST_INSTRUCTIONS = 5_000_000  # about forty a tensor
# Tensors may share a storage, and repeat it by strides of zero; together at most so many times.
SHARING = 16

CONVERSION = (
    'python -c "import sys, torch; c = torch.load(sys.argv[1], weights_only=False, '
    "map_location='cpu'); c = c.state_dict() if hasattr(c, 'state_dict') else c; "
    "c = next((c[k] for k in {names} if k in c), c); "
    'torch.save({{k: v for k, v in c.items() if torch.is_tensor(v)}}, sys.argv[2])" '
    "{path} weights.pth"
)

ITEM_SIZES = {
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("BFloat16Storage", "HalfStorage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("ComplexFloatStorage", "DoubleStorage", "LongStorage"), 8),
    "ComplexDoubleStorage": 16,
}


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
        if file.read(len(ZIP_START)) == ZIP_START:
            _look_through_zip(path, size)
            return
        seen = _Storages(size)
        # A mapped file gives no more than it has, whatever length the pickle says.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            mapped = cast(IO[bytes], content)  # it can read, read lines and tell
            found = [_Pickle(mapped, seen).follow() for _ in range(PICKLES_BEFORE_DATA)]
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
            _Pickle(file, _Storages(size, records)).follow()


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

    def storage(self, values: object) -> _Storage:
        """The storage that a persistent identifier names."""
        if not isinstance(values, tuple) or len(values) not in (5, 6):
            raise ValueError("no identifier of a storage")
        kind, of_type, name, _, count, *view = values
        if kind != "storage" or not isinstance(of_type, _Global) or not isinstance(name, str):
            raise ValueError("no identifier of a storage")
        if not isinstance(count, int) or count < 0 or view not in ([], [None]):
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
        return _Storage(length // item)

    def tensor(self, values: tuple[Any, ...]) -> object:
        """A tensor in a storage, by the arguments that rebuild it."""
        storage, offset, shape, strides, *_ = values
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
        if count and (last >= storage.count or self._shown > SHARING * self._size):
            raise ValueError("a tensor of more numbers than its storage")
        if not count and max((*shape, 0)) > self._size:
            raise ValueError("an empty tensor of an absurd shape")
        return _OBJECT


@dataclass(frozen=True)
class _Storage:
    count: int


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


_OBJECT = object()  # a container or a tensor: only that it is one matters
_MARK = object()

# What a pickle may name: types that are values, and functions that are called.
_REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_VALUES = {
    "torch": {*ITEM_SIZES, "Size", "device"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.storage": {"UntypedStorage"},
    "torch._utils": {*_REBUILD, "_rebuild_parameter"},
    "collections": {"OrderedDict"},
}
_KEYS = (str, bytes, int, float, bool, type(None))  # a nested tuple takes for ever to hash


class _Pickle:
    """Follow one pickle, without making what it describes.

    Args:
        file: Read up to the end of the pickle.
        storages: What storages and tensors are compared with.
    """

    def __init__(self, file: IO[bytes], storages: _Storages) -> None:
        self._file = file
        self._storages = storages
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def follow(self) -> Any:
        """The last value: a number or a word itself, anything else as an object."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._file)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError("a pickle that does not end")
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _ATOMS:
                self._stack.append(argument)
            else:
                _ACTIONS[opcode.name](self, argument)
        return self._stack.pop()

    def _ignore(self, _: object) -> None:
        """The number of the protocol, and the end."""

    def _name(self, words: str) -> None:
        module, _, name = words.partition(" ")
        if name not in _VALUES.get(module, ()):
            raise _MoreThanTensors(f"{module}.{name}")
        self._stack.append(_Global(module, name))

    def _keep(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _take(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _tuple(self, _: object) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _tuple_of(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def _append(self, _: object) -> None:
        self._stack.pop()
        self._container()

    def _append_all(self, _: object) -> None:
        self._since_mark()
        self._container()

    def _set(self, _: object) -> None:
        self._stack.pop()
        self._check_keys([self._stack.pop()])
        self._container()

    def _set_all(self, _: object) -> None:
        self._check_keys(self._since_mark()[::2])
        self._container()

    def _build(self, _: object) -> None:
        self._stack.pop()  # the attributes of a state dict: its versions
        self._container()

    def _container(self) -> None:
        if self._stack[-1] is not _OBJECT:
            raise ValueError("no container")

    def _check_keys(self, keys: Iterable[object]) -> None:
        if not all(isinstance(key, _KEYS) for key in keys):
            raise ValueError("a name that is none")

    def _storage(self, _: object) -> None:
        self._stack.append(self._storages.storage(self._stack.pop()))

    def _call(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("no call")
        if function.name in _REBUILD:
            self._stack.append(self._storages.tensor(arguments))
        elif function.name == "OrderedDict" and arguments:
            raise ValueError("a container that is made of another")
        elif function.name in ("OrderedDict", "_rebuild_parameter", "Size", "device"):
            self._stack.append(_OBJECT)
        else:
            raise ValueError("a call of a type")


_CONSTANTS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
    "EMPTY_DICT": _OBJECT,
    "EMPTY_LIST": _OBJECT,
    "MARK": _MARK,
}
_ATOMS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINSTRING",
}
_ACTIONS: dict[str, Callable[[_Pickle, Any], None]] = {
    "PROTO": _Pickle._ignore,
    "STOP": _Pickle._ignore,
    "GLOBAL": _Pickle._name,
    "BINPUT": _Pickle._keep,
    "LONG_BINPUT": _Pickle._keep,
    "BINGET": _Pickle._take,
    "LONG_BINGET": _Pickle._take,
    "TUPLE": _Pickle._tuple,
    "TUPLE1": lambda pickle, _: pickle._tuple_of(1),
    "TUPLE2": lambda pickle, _: pickle._tuple_of(2),
    "TUPLE3": lambda pickle, _: pickle._tuple_of(3),
    "APPEND": _Pickle._append,
    "APPENDS": _Pickle._append_all,
    "SETITEM": _Pickle._set,
    "SETITEMS": _Pickle._set_all,
    "BUILD": _Pickle._build,
    "BINPERSID": _Pickle._storage,
    "REDUCE": _Pickle._call,
}
