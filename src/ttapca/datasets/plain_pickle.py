"""Read a pickle of numpy arrays and plain containers, without Python's `pickle`.

A pickle is a program for a stack machine, and Python's machine does what the program says: it calls
functions and reserves memory. Here `pickletools` only takes the program apart, and a small machine
follows the few opcodes that CIFAR's files consist of. Names stand for functions of this file. An
array is made of bytes that are in the file, as many as its shape needs. No container can be in two
places, so the result is a tree with no more nodes than opcodes. All of this bounds time and memory
by the size of the file.
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.reading import MAX_AXES, MAX_REASON, reading
from ttapca.errors import DataFormatError
from ttapca.support.parsing import read_bounded

MAX_PICKLE_BYTES = 1 << 28  # the largest official file has 155 MB, up to 230 in another protocol
MAX_OPCODES = 2_000_000  # the largest official file has some 300,000
MAX_DEPTH = 100  # of nested containers; the official files have 2
SHOWN = 60  # characters of a foreign name in a message

_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|[SU][1-9][0-9]{0,5}")
_LEAVES = (type(None), bool, int, float, str, bytes, np.ndarray)


def read_plain_pickle(path: Path) -> Any:
    """Read dicts, lists, tuples, numbers, text, bytes and numeric arrays; run nothing.

    Text of Python 2 is read as latin-1, as the official CIFAR files need. Arrays are read-only.
    Raise `DataFormatError` if the file is truncated, too large, or asks for anything else.
    """
    with reading(path):
        content = read_bounded(path, DataFormatError, MAX_PICKLE_BYTES)
    try:
        return _checked_tree(_Machine(content).run())
    except DataFormatError as error:
        raise DataFormatError(
            f"{path} must hold numpy arrays and plain containers only; {error}. Nothing in it was "
            "run. Get the file from its official source."
        ) from error
    except Exception as error:  # a truncated or senseless program: an empty stack, a missing memo
        reason = f"{type(error).__name__}: {_shown(str(error), MAX_REASON)}"
        raise DataFormatError(
            f"{path} is not a readable pickle: {reason}. Get it again."
        ) from error


def _checked_tree(root: Any) -> Any:
    """Return the tree if every leaf is plain data and nothing is nested too deep."""
    level = [root]
    for _ in range(MAX_DEPTH):
        if not level:
            return root
        inner: list[Any] = []
        for value in level:
            if isinstance(value, list | tuple):
                inner.extend(value)
            elif isinstance(value, dict):
                inner.extend(value.values())
            elif type(value) not in _LEAVES:
                raise DataFormatError("it has an array or a name where a value belongs")
        level = inner
    raise DataFormatError(f"its containers are nested more than {MAX_DEPTH} deep")


def _shown(text: str, most: int = SHOWN) -> str:
    return ascii(text[:most])[1:-1] + ("..." if len(text) > most else "")


@dataclass
class _Unfinished:
    """An array or a dtype between REDUCE, which begins it, and BUILD, which finishes it."""

    spec: str | None  # the name of a dtype; None for an array
    value: NDArray[Any] | np.dtype[Any] | None = None


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.budget = len(content)  # bytes that `encode` may make, which could repeat one text

    def run(self) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self.content)):
            if count > MAX_OPCODES:
                raise DataFormatError(f"it has more than {MAX_OPCODES:,} opcodes")
            if opcode.name in _VALUES:
                self.stack.append(bytes(argument) if type(argument) is bytearray else argument)
            elif opcode.name in _MAKERS:
                taken, make = _MAKERS[opcode.name]
                self.stack.append(make(self, *self.take(taken)))
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, argument)
            else:
                raise DataFormatError(f"it has the opcode {opcode.name}, which no CIFAR file has")
        return self.take(1)[0]

    def take(self, count: int | None) -> list[Any]:
        """Pop so many values from the stack; for None, all after the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError("the stack is empty")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def extend(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        self.stack[-1].update(_dict_of(*items))

    def put(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def get(self, number: int) -> None:
        value = self.memo[number]
        if isinstance(value, _Unfinished):
            value = value.value
        if value is None or isinstance(value, list | tuple | dict):
            raise DataFormatError("it has one container in two places")
        self.stack.append(value)

    def call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, FunctionType):  # one on the stack comes from `_NAMES`
            raise TypeError("only a name can be called")
        return self.encode(*arguments) if function is _Machine.encode else function(*arguments)

    def finish(self, unfinished: Any, state: Any) -> Any:
        if not isinstance(unfinished, _Unfinished):
            raise TypeError("only an array and its type have a state")
        if unfinished.spec is None:
            _, shape, dtype, fortran, raw = state  # the first is the version of numpy's format
            # Python 2 has one type for text and bytes, which is read as text.
            content = self.encode(raw) if isinstance(raw, str) else raw
            unfinished.value = _array(content, dtype, shape, "F" if fortran else "C")
        else:
            unfinished.value = _finished_dtype(unfinished.spec, *state)
        return unfinished.value

    def encode(self, text: str, encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise DataFormatError(f"bytes in the encoding `{_shown(str(encoding))}` are not plain")
        self.budget -= len(text)
        if self.budget < 0:
            raise DataFormatError("it asks for more bytes than it has")
        return text.encode(encoding)


def _dict_of(*items: Any) -> dict[str | bytes, Any]:
    # The hash of text is salted; numbers could be chosen to collide, which takes hours.
    if not all(isinstance(key, str | bytes) for key in items[::2]):
        raise DataFormatError("a key must be text")
    return dict(zip(items[::2], items[1::2], strict=True))


def _named(*module_and_name: Any) -> Callable[..., Any]:
    name = ".".join(map(str, module_and_name))
    if name not in _NAMES:
        raise DataFormatError(f"it asks for `{_shown(name)}`")
    return _NAMES[name]


def _ndarray(*_: Any) -> None:
    raise TypeError("an array is not made by its type")


def _begin_array(*_: Any) -> _Unfinished:
    return _Unfinished(None)


def _begin_dtype(spec: Any, *_: Any) -> _Unfinished:
    if not isinstance(spec, str) or not _DTYPE.fullmatch(spec):
        raise DataFormatError(f"an array of `{_shown(str(spec))}` is not plain numbers")
    return _Unfinished(spec)


def _finished_dtype(spec: str, *state: Any) -> np.dtype[Any]:
    """Return a dtype by name; what else the state says must agree with it."""
    _, order, *inner, size, _, _ = state
    dtype: np.dtype[Any] = np.dtype(spec)
    if order not in ("<", ">", "=", "|") or inner != [None] * 3 or size not in (-1, dtype.itemsize):
        raise DataFormatError(f"the type `{spec}` of an array has another size or content")
    return dtype if order == "|" else dtype.newbyteorder(order)


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    """Return an array over exactly as many bytes as it needs."""
    if not isinstance(raw, bytes) or not isinstance(dtype, np.dtype):
        raise DataFormatError("an array must be made of bytes and a type of numbers")
    if len(shape) > MAX_AXES:
        raise DataFormatError(f"an array must have at most {MAX_AXES} axes")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise DataFormatError(
            f"an array of shape {shape} and type {dtype} must have as many bytes; found {len(raw)}"
        )
    return np.ndarray(shape, dtype, raw, order="F" if order == "F" else "C")


# What a pickle may name, and the function that is called instead.
_NAMES: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _ndarray,
    "numpy.dtype": _begin_dtype,
    "numpy.core.multiarray._reconstruct": _begin_array,
    "numpy._core.multiarray._reconstruct": _begin_array,
    "numpy.core.numeric._frombuffer": _array,
    "numpy._core.numeric._frombuffer": _array,
    "_codecs.encode": _Machine.encode,  # how Python 3 writes bytes for Python 2
    "__builtin__.bytes": lambda: b"",  # and how it writes empty ones
}
# Opcodes by their names in `pickletools`. The argument of these is a value to push.
_VALUES = frozenset(
    """
    INT LONG LONG1 BININT BININT1 BININT2 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE
    BINUNICODE8 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
    """.split()  # noqa: SIM905 - twenty quoted lines would hide the list
)
# These take so many values (None: all after the last mark) and push one.
_MAKERS: dict[str, tuple[int | None, Callable[..., Any]]] = {
    "NONE": (0, lambda _: None),
    "NEWTRUE": (0, lambda _: True),
    "NEWFALSE": (0, lambda _: False),
    **{f"TUPLE{count}": (count, lambda _, *items: items) for count in (1, 2, 3)},
    "TUPLE": (None, lambda _, *items: items),
    "EMPTY_TUPLE": (0, lambda _: ()),
    "EMPTY_LIST": (0, lambda _: []),
    "LIST": (None, lambda _, *items: [*items]),
    "EMPTY_DICT": (0, lambda _: {}),
    "DICT": (None, lambda _, *items: _dict_of(*items)),
    "STACK_GLOBAL": (2, lambda _, *items: _named(*items)),
    "REDUCE": (2, _Machine.call),
    "BUILD": (2, _Machine.finish),
}
# These do anything else.
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda *_: None),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "APPEND": lambda machine, _: machine.extend(machine.take(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.take(None)),
    "SETITEM": lambda machine, _: machine.update(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.take(None)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": lambda machine, words: machine.stack.append(_named(*words.split(" ", 1))),
}
