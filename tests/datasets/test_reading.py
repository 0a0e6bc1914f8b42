from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ttapca.datasets.reading import check_labels, read_bytes, read_json, reading
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


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(DataFormatError, match="larger than 4 bytes; found 5"):
        read_bytes(tmp_path / "a", 4)


def test_json_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('"é"'.encode("latin-1"))
    with pytest.raises(DataFormatError, match=r"a\.json is not readable JSON"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("labels", [None, "12", {"a": 1}, [1.0], [True], [None], [10**7], ["1"]])
def test_what_is_no_list_of_labels(labels: object) -> None:
    with pytest.raises(DataFormatError, match=r"some/file\.npz: labels must be"):
        check_labels(PATH, labels)
