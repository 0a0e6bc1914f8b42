"""CIFAR-10 and CIFAR-100 in the official python version, which torchvision uses as well.

Each file is a pickled dict: `data` of shape (n, 3072), and `labels` or `fine_labels`. Pickle runs
the functions that a file names. Here a file may name those of numpy's arrays only, and gets a
stand-in for them that calls nothing. No file makes time or memory grow beyond its own size:
instructions and keys are limited, and an array is a view of bytes that are in the file.
"""

from __future__ import annotations

import io
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
from ttapca.datasets.reading import LABELS, Split, make_images, reading
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
NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")


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
    with reading(path, "must hold an array of numbers with as many bytes as its shape needs"):
        pixels = data.array() if isinstance(data, _StandIn) else np.empty(0)
        if isinstance(labels, _StandIn):  # the official files have a list
            labels = labels.array()[: len(pixels) + 1].tolist()
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise DataFormatError(f"{path}: `data` must be a uint8 array of shape (n, {PIXEL_BYTES}).")
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
        # Latin 1 turns the text of Python 2 into as many characters as it has bytes.
        found = _CifarUnpickler(io.BytesIO(content), encoding="latin-1").load()
    if not isinstance(found, dict):
        raise DataFormatError(f"{path} must hold a dict; found {type(found).__name__}.")
    # Keys are bytes if Python 3 copied what it had read with encoding="bytes".
    return {_text(key): value for key, value in found.items()}


def _text(found: str | bytes) -> str:
    return found if isinstance(found, str) else found.decode("utf-8", errors="replace")


class _StandIn:
    """Stands in for an array or its type: what the file gives numpy's functions to make it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()

    def array(self) -> NDArray[Any]:
        """Return a view of the bytes in the file; raise any error if they are not an array's."""
        if self.state:
            _, shape, kind, fortran, raw = self.state
        else:  # `_frombuffer`, as protocol 5 has it
            raw, kind, shape, order = self.arguments
            fortran = order == "F"
        if not NUMBERS.fullmatch(kind.arguments[0]):
            raise ValueError(f"its type is {ascii(kind.arguments[0])[:SHOWN]}")
        dtype = np.dtype(kind.arguments[0])
        if kind.state[1] in ("<", ">"):
            dtype = dtype.newbyteorder(kind.state[1])
        content = raw.encode("latin-1") if isinstance(raw, str) else raw
        flat: NDArray[Any] = np.frombuffer(content, dtype)
        return flat.reshape(shape, order="F" if fortran else "C")


class _Entries(dict[str | bytes, Any]):
    """A dict whose keys are text: numbers may collide, and nested tuples take for ever to hash."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | bytes):
            raise DataFormatError(f"A key must be text; found a {type(key).__name__}.")
        super().__setitem__(key, value)


class _CifarUnpickler(pickle._Unpickler):  # the one in Python: its instructions can be replaced
    """Python's own unpickler with a short list of names and a stand-in for them."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    names: ClassVar[dict[str, Callable[..., Any]]] = {
        "numpy.ndarray": _StandIn,
        "numpy.dtype": _StandIn,
        "numpy.core.multiarray._reconstruct": _StandIn,
        "numpy._core.multiarray._reconstruct": _StandIn,
        "numpy.core.numeric._frombuffer": _StandIn,
        "numpy._core.numeric._frombuffer": _StandIn,
        "_codecs.encode": lambda text, _encoding: text,  # how Python 3 writes bytes for Python 2
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name of numpy's; refuse every other name."""
        wanted = f"{module}.{name}"
        if wanted not in self.names:
            raise DataFormatError(
                f"It must hold arrays and plain containers only, and asks for "
                f"`{ascii(wanted[:SHOWN])[1:-1]}`. Nothing was run. Get the official file."
            )
        return self.names[wanted]

    def load_build(self) -> None:
        """Give a state to a stand-in; Python's own would set attributes of any object."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _StandIn) or not isinstance(state, tuple):
            raise DataFormatError("Only an array and its type have a state.")
        self.stack[-1].state = state

    def load_dict(self) -> None:
        """Make a dict of the items since the mark."""
        items, entries = self.pop_mark(), _Entries()
        for key, value in zip(items[::2], items[1::2], strict=True):
            entries[key] = value
        self.append(entries)

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.EMPTY_DICT[0]: lambda self: self.append(_Entries()),
        pickle.DICT[0]: load_dict,
    }
