"""Read a pickle that holds numpy arrays and plain containers, and nothing that could act.

A pickle is a program: it names callables and their arguments. Here it can name a handful, all
harmless; any other name stops the reading before anything is called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ttapca.errors import DataFormatError

MAX_PICKLE_BYTES = 1 << 30  # the largest official file has 155 MB
PLAIN_KINDS = "biufSU"  # booleans, numbers and text; no objects, no records


def _plain_dtype(spec: str, *options: bool) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(spec, *options)
    if dtype.kind not in PLAIN_KINDS:
        raise DataFormatError(f"an array of `{dtype}` is not plain numbers")
    return dtype


def _encode(text: str, encoding: str = "latin1") -> bytes:
    # Python 3 writes bytes for Python 2 as text and this call; only its own encoding is served.
    if encoding != "latin1":
        raise DataFormatError(f"bytes in the encoding `{encoding}` are not plain data")
    return text.encode(encoding)


def _no_bytes() -> bytes:
    # How Python 3 writes an empty bytes object for Python 2. It takes no argument: `bytes(10**12)`
    # is no way to fill the memory.
    return b""


def _admitted() -> Mapping[tuple[str, str], Callable[..., Any]]:
    sample = np.zeros(1)
    # Asked of numpy itself: the functions have moved between its private modules, and files carry
    # the name of the module that was current when they were written.
    rebuild: Any = sample.__reduce__()[0]
    from_buffer: Any = sample.__reduce_ex__(5)[0]
    names: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): _plain_dtype,
        ("_codecs", "encode"): _encode,
        ("__builtin__", "bytes"): _no_bytes,
    }
    for core in ("numpy.core", "numpy._core"):
        names[f"{core}.multiarray", "_reconstruct"] = rebuild
        names[f"{core}.numeric", "_frombuffer"] = from_buffer
    return names


class _PlainUnpickler(pickle.Unpickler):
    admitted = _admitted()

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self.admitted[module_name, global_name]
        except KeyError:
            raise DataFormatError(f"it asks for `{module_name}.{global_name}`") from None


def read_plain_pickle(path: Path | str) -> Any:
    """Read numpy arrays and plain containers from a pickle, without running anything it asks for.

    Text of Python 2 is read as latin-1, as the official CIFAR files need.

    Args:
        path: The pickle.

    Returns:
        What it holds: dicts, lists, tuples, numbers, text, bytes and numeric arrays.

    Raises:
        DataFormatError: The file is truncated, too large, or asks for anything else.

    Example:
        >>> import pickle, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "plain"
        >>> _ = path.write_bytes(pickle.dumps({"labels": [1, 2]}))
        >>> read_plain_pickle(path)
        {'labels': [1, 2]}
    """
    path = Path(path)
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise DataFormatError(
            f"{path} is larger than {MAX_PICKLE_BYTES} bytes, which no CIFAR file is."
        )
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file, encoding="latin1").load()
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    except DataFormatError as error:
        raise DataFormatError(
            f"{path} must hold numpy arrays and plain containers only; {error}. Nothing in it was "
            "run. Get the file from its official source."
        ) from error
    except Exception as error:  # a hostile or cut-off pickle can fail in any way that Python knows
        raise DataFormatError(
            f"{path} is not a readable pickle: {type(error).__name__}: {error}. Get it again."
        ) from error
