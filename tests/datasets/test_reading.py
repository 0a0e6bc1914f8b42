from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ttapca.datasets.reading import reading
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError, StorageError

PATH = Path("some/file.npz")


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            struct.error("unpack requires"),
            DataFormatError,
            "cannot be read: unpack requires. It is",
        ),
        (NotImplementedError(), DataFormatError, "cannot be read: NotImplementedError"),
        (RecursionError("too deep"), DataFormatError, "cannot be read: too deep"),
        (MemoryError(), DataFormatError, "needs more memory than there is"),
        (PermissionError(13, "Permission denied"), DataFormatError, "read: Permission denied"),
        (FileNotFoundError(2, "No such file"), DataNotFoundError, "does not exist"),
        (ShapeError("Too flat."), ShapeError, ": Too flat."),
        (DataFormatError("Too odd."), DataFormatError, ": Too odd."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_names_the_file(
    raised: Exception, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^some/file\.npz.*{message}"), reading(PATH):
        raise raised


def test_other_errors_of_ours_and_an_interrupt_pass() -> None:
    with pytest.raises(StorageError, match=r"^full$"), reading(PATH):
        raise StorageError("full")
    with pytest.raises(KeyboardInterrupt), reading(PATH):
        raise KeyboardInterrupt


def test_the_message_of_a_parser_is_cut() -> None:
    with pytest.raises(DataFormatError, match=r"x{300}\. It is damaged"), reading(PATH):
        raise ValueError("x" * 10_000)


