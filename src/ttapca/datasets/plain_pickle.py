"""Read a pickle that holds numpy arrays and plain containers, without Python's `pickle`.

A pickle is a program for a stack machine, and Python's own machine does what the program says: it
calls, it shares, it reserves memory. Here the few opcodes that CIFAR's files consist of are
interpreted in plain Python, and nothing else is. Names stand for four things that are rebuilt by
the code below; an array is made of bytes that are in the file, as many as its shape needs; no
container lies in two places, so what is read is a tree with no more nodes than opcodes. That bounds
time and memory by the size of the file.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.reading import read_bytes
from ttapca.errors import DataFormatError

MAX_PICKLE_BYTES = 1 << 28  # the largest official file has 155 MB, up to 230 in another protocol
MAX_OPCODES = 2_000_000  # the largest official file has some 300,000
MAX_DEPTH = 100  # of containers in containers; the official files have 2
MAX_AXES = 32
MAX_DIGITS = 100  # of a number that is written as text
MAX_PROTOCOL = 5
SHOWN = 60  # characters of a foreign name in a message

_STOP = ord(".")
_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|[SU][1-9][0-9]{0,5}")
_ORDERS = ("<", ">", "=", "|")
_LEAVES = (type(None), bool, int, float, str, bytes, np.ndarray)


@dataclass(frozen=True)
class _Name:
    """What a pickle may name; it stands for nothing that could be called."""

    meaning: str


@dataclass
class _Unfinished:
    """An array or a type of numbers, between the two opcodes that make it."""

    spec: str | None  # of a type; an array has none
    value: NDArray[Any] | np.dtype[Any] | None = None


def _names() -> dict[tuple[str, str], _Name]:
    names = {
        ("numpy", "ndarray"): _Name("ndarray"),
        ("numpy", "dtype"): _Name("dtype"),
        ("_codecs", "encode"): _Name("encode"),  # how Python 3 writes bytes for Python 2
        ("__builtin__", "bytes"): _Name("no bytes"),  # and how it writes an empty one
    }
    for core in ("numpy.core", "numpy._core"):  # the older and the newer name of one module
        names[f"{core}.multiarray", "_reconstruct"] = _Name("array")
        names[f"{core}.numeric", "_frombuffer"] = _Name("array of a buffer")
    return names


_NAMES = _names()


def read_plain_pickle(path: Path | str) -> Any:
    """Read numpy arrays and plain containers from a pickle, without running anything it asks for.

    Text of Python 2 is read as latin-1, as the official CIFAR files need. Arrays are read-only.

    Args:
        path: The pickle.

    Returns:
        What it holds: dicts, lists, tuples, numbers, text, bytes and numeric arrays.

    Raises:
        DataNotFoundError: The file is not there.
        DataFormatError: The file is truncated, too large, or asks for anything else.

    Example:
        >>> import pickle, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "plain"
        >>> _ = path.write_bytes(pickle.dumps({"labels": [1, 2]}))
        >>> read_plain_pickle(path)
        {'labels': [1, 2]}
    """
    path = Path(path)
    content = read_bytes(path, MAX_PICKLE_BYTES)
    try:
        return _plain(_Interpreter(content).run())
    except DataFormatError as error:
        raise DataFormatError(
            f"{path} must hold numpy arrays and plain containers only; {error}. Nothing in it was "
            "run. Get the file from its official source."
        ) from error
    except Exception as error:  # a cut-off or senseless program: an empty stack, no such memo, ...
        raise DataFormatError(
            f"{path} is not a readable pickle: {type(error).__name__}: {error}. Get it again."
        ) from error


def _plain(root: Any) -> Any:
    """Give a tree back if every leaf is plain data and none is too deep for whoever reads it."""
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


def _shown(text: str) -> str:
    return ascii(text[:SHOWN])[1:-1] + ("..." if len(text) > SHOWN else "")


class _Interpreter:
    """The stack, the memo and the marks of one pickle.

    Every opcode takes at least one byte. Only `_encode` copies what is there already, and so has
    a budget: a pickle could ask for the bytes of one text over and over.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.view = memoryview(content)
        self.place = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.budget = len(content)

    def run(self) -> Any:
        for _ in range(MAX_OPCODES):
            code = self._take(1)[0]
            if code == _STOP:
                return self._pop()
            step = _STEPS.get(code)
            if step is None:
                raise DataFormatError(f"it has the opcode {code:#04x}, which no CIFAR file has")
            step(self)
        raise DataFormatError(f"it has more than {MAX_OPCODES:,} opcodes")

    # Bytes of the file ---------------------------------------------------------------------------

    def _take(self, count: int) -> memoryview:
        start, stop = self.place, self.place + count
        if count < 0 or stop > len(self.content):
            raise EOFError("it is cut short")
        self.place = stop
        return self.view[start:stop]

    def _line(self) -> memoryview:
        stop = self.content.find(b"\n", self.place)
        line = self._take(stop - self.place)
        self.place += 1
        return line

    def _digits(self) -> str:
        line = self._line()
        if len(line) > MAX_DIGITS:
            raise DataFormatError(f"it has a number of more than {MAX_DIGITS} digits")
        return str(line, "ascii")

    def integer(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def text_integer(self) -> int | bool:
        digits = self._digits()
        if digits in ("00", "01"):  # how the oldest protocol writes truth values
            return digits == "01"
        return int(digits.removesuffix("L"))

    def text_float(self) -> float:
        return float(self._digits())

    def binary_float(self) -> float:
        return float(struct.unpack(">d", self._take(8))[0])

    def text(self, size: int, *, encoding: str = "utf-8", signed: bool = False) -> str:
        errors = "surrogatepass" if encoding == "utf-8" else "strict"
        return str(self._take(self.integer(size, signed=signed)), encoding, errors)

    def text_line(self) -> str:
        return str(self._line(), "raw-unicode-escape")

    def binary(self, size: int) -> bytes:
        return bytes(self._take(self.integer(size)))

    def protocol(self) -> None:
        if self.integer(1) > MAX_PROTOCOL:
            raise ValueError("it is of a later protocol than any that is known")

    def frame(self) -> None:
        self._take(8)  # how much to read at once; it is all here

    # Stack and containers ------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def _pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError("the stack is empty")
        return self.stack.pop()

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple(self._pop() for _ in range(count))[::-1]

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError("only a list is appended to")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise TypeError("only a dict has items")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of text is salted; numbers and tuples can be chosen so that it takes hours.
            if not isinstance(key, str | bytes):
                raise DataFormatError("a key must be text")
            self.stack[-1][key] = value

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        value = self.memo[number]
        if isinstance(value, _Unfinished):
            value = value.value
        if value is None or isinstance(value, list | tuple | dict):
            raise DataFormatError("it has one container in two places")
        self.push(value)

    # Names and what they make --------------------------------------------------------------------

    def name(self, module: str, name: str) -> None:
        if (module, name) not in _NAMES:
            raise DataFormatError(f"it asks for `{_shown(f'{module}.{name}')}`")
        self.push(_NAMES[module, name])

    def name_in_lines(self) -> None:
        self.name(str(self._line(), "utf-8"), str(self._line(), "utf-8"))

    def name_on_stack(self) -> None:
        module, name = self.last(2)
        self.name(str(module), str(name))

    def reduce(self) -> None:
        name, arguments = self.last(2)
        makers: dict[str, Callable[..., Any]] = {
            "ndarray": _no_array,
            "dtype": _begin_dtype,
            "array": _begin_array,
            "array of a buffer": _array,
            "encode": self._encode,
            "no bytes": _no_bytes,
        }
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise TypeError("a name and a tuple are needed to make something")
        self.push(makers[name.meaning](*arguments))

    def build(self) -> None:
        unfinished, state = self.last(2)
        if not isinstance(unfinished, _Unfinished) or not isinstance(state, tuple):
            raise TypeError("only an array and its type have a state")
        if unfinished.spec is None:
            unfinished.value = self._finish_array(*state)
        else:
            unfinished.value = _finish_dtype(unfinished.spec, *state)
        self.push(unfinished.value)

    def _finish_array(self, *state: Any) -> NDArray[Any]:
        _, shape, dtype, fortran, raw = state  # the first is the version of numpy's format
        # Python 2 has one type for text and bytes, which is read as text.
        content = self._encode(raw) if isinstance(raw, str) else raw
        return _array(content, dtype, shape, "F" if fortran else "C")

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise DataFormatError(f"bytes in the encoding `{_shown(str(encoding))}` are not plain")
        self.budget -= len(text)
        if self.budget < 0:
            raise DataFormatError("it asks for more bytes than it has")
        return text.encode(encoding)


def _begin_dtype(spec: Any, *_: Any) -> _Unfinished:
    if not isinstance(spec, str) or not _DTYPE.fullmatch(spec):
        raise DataFormatError(f"an array of `{_shown(str(spec))}` is not plain numbers")
    return _Unfinished(spec)


def _finish_dtype(spec: str, *state: Any) -> np.dtype[Any]:
    """A type by its name; what else numpy noted about it must agree, and is not obeyed."""
    _, order, *inner, size, _, _ = state
    dtype: np.dtype[Any] = np.dtype(spec)
    if order not in _ORDERS or inner != [None] * 3 or size not in (-1, dtype.itemsize):
        raise DataFormatError(f"the type `{spec}` of an array has another size or content")
    return dtype if order == "|" else dtype.newbyteorder(order)


def _begin_array(kind: Any, *_: Any) -> _Unfinished:
    if kind is not _NAMES["numpy", "ndarray"]:
        raise TypeError("only an ndarray is an array")
    return _Unfinished(None)


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    """An array over bytes that are there, exactly as many as it needs."""
    if not isinstance(raw, bytes) or not isinstance(dtype, np.dtype):
        raise DataFormatError("an array must be made of bytes and a type of numbers")
    if not isinstance(shape, tuple) or len(shape) > MAX_AXES:
        raise DataFormatError(f"an array must have at most {MAX_AXES} axes")
    if not all(isinstance(length, int) and 0 <= length < 1 << 40 for length in shape):
        raise DataFormatError("the lengths of an array must be sensible numbers")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise DataFormatError(
            f"an array of shape {shape} and type {dtype} must have as many bytes; found {len(raw)}"
        )
    return np.ndarray(shape, dtype, raw, order="F" if order == "F" else "C")


def _no_array(*_: Any) -> None:
    raise TypeError("an array is not made by its type")


def _no_bytes(*size: Any) -> bytes:
    if size:
        raise DataFormatError("only an empty `bytes` is made by its name")
    return b""


Step = Callable[[_Interpreter], None]


def _pushing(value: Callable[[_Interpreter], Any]) -> Step:
    return lambda machine: machine.push(value(machine))


def _constant(value: Any) -> Step:
    return lambda machine: machine.push(value)


def _empty(kind: type[list[Any]] | type[dict[Any, Any]]) -> Step:
    return lambda machine: machine.push(kind())


def _dict_of(machine: _Interpreter) -> None:
    items = machine.marked()
    machine.push({})
    machine.update(items)


# By opcode, as `pickletools` describes them; the names there are given where they are not obvious.
_STEPS: dict[int, Step] = {
    0x80: lambda machine: machine.protocol(),
    0x95: lambda machine: machine.frame(),
    # Constants and numbers.
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("I"): _pushing(_Interpreter.text_integer),
    ord("L"): _pushing(_Interpreter.text_integer),
    ord("F"): _pushing(_Interpreter.text_float),
    ord("K"): _pushing(lambda machine: machine.integer(1)),
    ord("M"): _pushing(lambda machine: machine.integer(2)),
    ord("J"): _pushing(lambda machine: machine.integer(4, signed=True)),
    0x8A: _pushing(lambda machine: machine.integer(machine.integer(1), signed=True)),  # LONG1
    ord("G"): _pushing(_Interpreter.binary_float),
    # Text and bytes. The strings of Python 2 are read as text.
    ord("V"): _pushing(_Interpreter.text_line),
    0x8C: _pushing(lambda machine: machine.text(1)),
    ord("X"): _pushing(lambda machine: machine.text(4)),
    0x8D: _pushing(lambda machine: machine.text(8)),
    ord("U"): _pushing(lambda machine: machine.text(1, encoding="latin-1")),
    ord("T"): _pushing(lambda machine: machine.text(4, encoding="latin-1", signed=True)),
    ord("C"): _pushing(lambda machine: machine.binary(1)),
    ord("B"): _pushing(lambda machine: machine.binary(4)),
    0x8E: _pushing(lambda machine: machine.binary(8)),
    0x96: _pushing(lambda machine: machine.binary(8)),  # BYTEARRAY8
    # Containers.
    ord("("): lambda machine: machine.mark(),
    ord(")"): _constant(()),
    0x85: _pushing(lambda machine: machine.last(1)),
    0x86: _pushing(lambda machine: machine.last(2)),
    0x87: _pushing(lambda machine: machine.last(3)),
    ord("t"): _pushing(lambda machine: tuple(machine.marked())),
    ord("]"): _empty(list),
    ord("l"): _pushing(lambda machine: machine.marked()),
    ord("a"): lambda machine: machine.extend([*machine.last(1)]),
    ord("e"): lambda machine: machine.extend(machine.marked()),
    ord("}"): _empty(dict),
    ord("d"): _dict_of,
    ord("s"): lambda machine: machine.update([*machine.last(2)]),
    ord("u"): lambda machine: machine.update(machine.marked()),
    # What is used again.
    ord("p"): lambda machine: machine.put(machine.text_integer()),
    ord("q"): lambda machine: machine.put(machine.integer(1)),
    ord("r"): lambda machine: machine.put(machine.integer(4)),
    0x94: lambda machine: machine.put(len(machine.memo)),  # MEMOIZE
    ord("g"): lambda machine: machine.get(machine.text_integer()),
    ord("h"): lambda machine: machine.get(machine.integer(1)),
    ord("j"): lambda machine: machine.get(machine.integer(4)),
    # Names and what they make.
    ord("c"): lambda machine: machine.name_in_lines(),
    0x93: lambda machine: machine.name_on_stack(),
    ord("R"): lambda machine: machine.reduce(),
    ord("b"): lambda machine: machine.build(),
}
