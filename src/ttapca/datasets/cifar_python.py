"""CIFAR-10 and CIFAR-100 in the official python version, which torchvision uses as well.

Each file is a pickled dict: `data` of shape (n, 3072), and `labels` or `fine_labels`. Pickle runs
what a file names. Here a file may name numpy's arrays only, and gets stand-ins for them that check
sizes. No file makes time or memory grow beyond its own size: instructions and keys are limited, and
an array is a view of bytes that are in the file.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import conform
from ttapca.datasets.cifar import CHANNELS, PIXEL_BYTES, PYTHON_VERSIONS, SHOWN, SIDE, find_split
from ttapca.datasets.images import Images
from ttapca.datasets.reading import LABELS, MAX_AXES, Split, make_images, reading
from ttapca.errors import DataFormatError
from ttapca.support.parsing import read_bounded

MAX_PICKLE_BYTES = 1 << 28  # the largest official file has 155 MB, up to 230 in another protocol
MAX_INSTRUCTIONS = 2_000_000  # the largest official file has some 300,000
INSTRUCTIONS = frozenset(  # that such files consist of, in any protocol
    """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG LONG1 BININT BININT1 BININT2 FLOAT BINFLOAT
    UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINSTRING BINSTRING SHORT_BINBYTES
    BINBYTES BINBYTES8 BYTEARRAY8 TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE LIST EMPTY_LIST APPEND
    APPENDS DICT EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD PUT BINPUT LONG_BINPUT
    MEMOIZE GET BINGET LONG_BINGET
    """.split()  # noqa: SIM905 - fifty quoted lines would hide the list
)
DTYPE = re.compile(r"b1|[iu][1248]|f[248]")


def read_cifar_python(folder: Path | str, split: Split = "test") -> Images:
    """Read CIFAR-10 or CIFAR-100 (fine labels) in the official python version.

    The files are pickles; only arrays and plain containers are accepted, and nothing is run.

    Args:
        folder: `cifar-10-batches-py` or `cifar-100-python`, under any name.
        split: `train` or `test`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [7]}
        >>> _ = (folder / "test_batch").write_bytes(pickle.dumps(batch))
        >>> read_cifar_python(folder).labels.tolist()
        [7]
    """
    folder = Path(folder)
    version, files = find_split(folder, split, PYTHON_VERSIONS)
    parts = [_read_batch(path, version.labels_key) for path in files]
    pixels = np.concatenate([planes for planes, _ in parts])  # (n, 3, 32, 32)
    labels = np.concatenate([numbers for _, numbers in parts])
    names, path = version.class_names, folder / version.names_file
    if path.is_file():
        key = f"{version.labels_key.removesuffix('s')}_names"
        found = _entries(path).get(key)
        if not isinstance(found, list) or not found:
            raise DataFormatError(f"{path} must have a list `{key}`.")
        if not all(isinstance(name, str | bytes) for name in found):
            raise DataFormatError(f"{path}: `{key}` must be a list of text.")
        names = tuple(map(_text, found))
    return make_images(folder, pixels.transpose(0, 2, 3, 1), labels, names)


def _read_batch(path: Path, labels_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    entries = _entries(path)
    data, labels = entries.get("data"), entries.get(labels_key)
    if data is None or labels is None:
        there = ", ".join(f"`{key[:SHOWN]}`" for key in list(entries)[:SHOWN])
        raise DataFormatError(
            f"{path} must have the entries `data` and `{labels_key}`; found {there or 'none'}."
        )
    with reading(path):
        pixels: NDArray[Any] = data.array() if isinstance(data, _Array) else np.empty(0)
        numbers = labels.array() if isinstance(labels, _Array) else None
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise DataFormatError(f"{path}: `data` must be a uint8 array of shape (n, {PIXEL_BYTES}).")
    if numbers is not None:  # the official files have a list
        labels = numbers[: len(pixels) + 1].tolist() if numbers.ndim else []
    conform(labels, LABELS, str(path), DataFormatError, labels_key)
    if pixels.shape != (len(labels), PIXEL_BYTES):
        raise DataFormatError(
            f"{path}: `data` must have shape (n, {PIXEL_BYTES}) with n labels; "
            f"found {pixels.shape} and {len(labels)} labels."
        )
    return pixels.reshape(len(pixels), CHANNELS, SIDE, SIDE), np.array(labels, np.int64)


def _entries(path: Path) -> dict[str, Any]:
    """Return the dict that a file holds; its arrays are still stand-ins."""
    with reading(path):
        content = read_bounded(path, DataFormatError, MAX_PICKLE_BYTES)
    with reading(path, "is not a readable pickle", "Nothing in it was run. Get it again."):
        for count, (instruction, _, _) in enumerate(pickletools.genops(content)):
            if instruction.name not in INSTRUCTIONS or count > MAX_INSTRUCTIONS:
                raise DataFormatError(
                    f"It has the instruction {instruction.name}, which no file of CIFAR has, or "
                    f"more than {MAX_INSTRUCTIONS:,}. Nothing was run. Get the official file."
                )
        found = _CifarUnpickler(content).load()
    if not isinstance(found, dict):
        raise DataFormatError(f"{path} must hold a dict; found {type(found).__name__}.")
    # Keys are bytes if Python 3 copied what it had read with encoding="bytes".
    return {_text(key): value for key, value in found.items()}


def _text(found: str | bytes) -> str:
    return found if isinstance(found, str) else found.decode("utf-8", errors="replace")


class _Entries(dict[str | bytes, Any]):
    """A dict whose keys are text: a number may collide, and nested tuples take for ever to hash."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | bytes):
            raise DataFormatError(f"A key must be text; found a {type(key).__name__}.")
        super().__setitem__(key, value)


class _Dtype:
    """Stands in for the type of an array: numbers by name, in either byte order."""

    def __init__(self, spec: Any, *_: Any) -> None:
        if not isinstance(spec, str) or not DTYPE.fullmatch(spec):
            raise DataFormatError(f"An array must be of numbers; found {ascii(spec)[:SHOWN]}.")
        self.dtype: np.dtype[Any] = np.dtype(spec)

    def finish(self, _version: Any, order: Any, *_: Any) -> None:
        if order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands in for an array, which is made only if it is asked for."""

    state: tuple[Any, ...] | None = None

    def __init__(self, *_: Any) -> None:
        """Ignore what numpy's function for new arrays is given: a type, a shape and a letter."""

    def finish(self, _version: Any, shape: Any, dtype: Any, fortran: Any, raw: Any) -> None:
        self.state = (raw, dtype, shape, "F" if fortran else "C")

    def array(self) -> NDArray[Any]:
        """Return a view of exactly as many bytes as the array needs."""
        raw, kind, shape, order = self.state or (None, None, None, None)
        if isinstance(raw, str):  # Python 2 has one type for text and bytes
            raw = raw.encode("latin-1")
        sides = shape if isinstance(shape, tuple) else (None,)
        if (
            not isinstance(raw, bytes | bytearray)
            or not isinstance(kind, _Dtype)
            or not all(isinstance(side, int) and side >= 0 for side in sides)
            or len(sides) > MAX_AXES
            or math.prod(sides) * kind.dtype.itemsize != len(raw)
        ):
            raise DataFormatError("An array needs a type, a shape, and as many bytes as that says.")
        return np.ndarray(sides, kind.dtype, raw, order="F" if order == "F" else "C")


def _array_of_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.state = (raw, dtype, shape, order)
    return made


class _CifarUnpickler(pickle._Unpickler):  # the one in Python: its instructions can be replaced
    """Python's own unpickler with a short list of names and stand-ins for them."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin-1")  # of Python 2's text
        self._left = len(content)
        self._names: dict[str, Callable[..., Any] | None] = {
            "numpy.ndarray": None,
            "numpy.dtype": _Dtype,
            "numpy.core.multiarray._reconstruct": _Array,
            "numpy._core.multiarray._reconstruct": _Array,
            "numpy.core.numeric._frombuffer": _array_of_buffer,
            "numpy._core.numeric._frombuffer": _array_of_buffer,
            "_codecs.encode": self._encode,  # how Python 3 writes bytes for Python 2
            "__builtin__.bytes": lambda: b"",  # and how it writes none
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name of numpy's; refuse every other name."""
        wanted = f"{module}.{name}"
        if wanted not in self._names:
            raise DataFormatError(
                f"It must hold arrays and plain containers only, and asks for "
                f"`{ascii(wanted[:SHOWN])[1:-1]}`. Nothing was run. Get the official file."
            )
        return self._names[wanted]

    def _encode(self, text: str, encoding: str) -> bytes:
        """Return bytes of text, in all no more than the file has."""
        self._left -= len(text)
        if self._left < 0 or encoding != "latin1":
            raise DataFormatError("It asks for more bytes than it has, or for another encoding.")
        return text.encode("latin-1")

    def load_build(self) -> None:
        state, unfinished = self.stack.pop(), self.stack[-1]
        if not isinstance(unfinished, _Array | _Dtype) or not isinstance(state, tuple):
            raise DataFormatError("Only an array and its type have a state.")
        unfinished.finish(*state)

    def load_empty_dictionary(self) -> None:
        self.append(_Entries())

    def load_dict(self) -> None:
        items, entries = self.pop_mark(), _Entries()
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[key] = value
        self.append(entries)

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.EMPTY_DICT[0]: load_empty_dictionary,
        pickle.DICT[0]: load_dict,
    }
