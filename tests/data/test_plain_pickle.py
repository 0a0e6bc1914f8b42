from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.data import plain_pickle
from ttapca.data.plain_pickle import read_plain_pickle
from ttapca.errors import DataFormatError

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(content=plain, protocol=st.integers(2, 5))
def test_plain_data_come_back(content: Any, protocol: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("pickle") / "plain"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    assert read_plain_pickle(path) == content


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "bool", "S3", "U3", ">i4"])
@pytest.mark.parametrize("protocol", range(6))
def test_arrays_come_back(dtype: str, protocol: int, tmp_path: Path) -> None:
    for array in (np.arange(6).astype(dtype), np.arange(6).astype(dtype).reshape(2, 3).T):
        content = pickle.dumps(array, protocol=protocol)
        (tmp_path / "array").write_bytes(content)
        found = read_plain_pickle(tmp_path / "array")
        assert found.dtype == pickle.loads(content).dtype
        np.testing.assert_array_equal(found, array)


class Calls:
    """Unpickles by calling anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_executes_nothing(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    attacks = [
        Calls(os.system, f"touch {trace}"),
        Calls(subprocess.check_call, ["touch", str(trace)]),
        Calls(eval, f"open({str(trace)!r}, 'w')"),
        Calls(exec, f"open({str(trace)!r}, 'w')"),
        Calls(open, str(trace), "w"),
        Calls(np.load, str(trace)),
        Calls(np.savetxt, str(trace), [1]),
    ]
    for attack in attacks:
        for content in (attack, {"data": attack}, [np.zeros(2), attack]):
            path = tmp_path / "test_batch"
            path.write_bytes(pickle.dumps(content, protocol=protocol))
            with pytest.raises(DataFormatError, match=r"asks for `.*`\. Nothing in it was run"):
                read_plain_pickle(path)
            assert not trace.exists()


def test_the_same_pickle_does_execute_when_read_carelessly(tmp_path: Path) -> None:
    """The attack of the test above is a real one."""
    trace = tmp_path / "it-ran"
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(trace))))
    assert trace.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
        b"cnumpy\nload\n.",
        b"cnumpy.core.multiarray\nfromfile\n.",
    ],
)
def test_no_opcode_gets_another_name(program: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(program)
    with pytest.raises(DataFormatError, match="asks for `"):
        read_plain_pickle(tmp_path / "batch")


def test_arrays_of_objects_and_records_are_refused(tmp_path: Path) -> None:
    for array in (np.array([None, 1]), np.zeros(1, [("a", "i4")]), np.zeros(1, "M8[s]")):
        (tmp_path / "array").write_bytes(pickle.dumps(array, protocol=2))
        with pytest.raises(DataFormatError, match="is not plain numbers"):
            read_plain_pickle(tmp_path / "array")


def test_other_codecs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.")
    with pytest.raises(DataFormatError, match="encoding `rot13`"):
        read_plain_pickle(tmp_path / "text")


@given(content=st.binary(max_size=60))
def test_noise_is_an_error_of_ours_or_plain_data(content: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("pickle") / "noise"
    path.write_bytes(content)
    try:
        read_plain_pickle(path)
    except DataFormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - noise may also be a valid pickle


def test_a_truncated_pickle_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps({"data": np.zeros(100, np.uint8)})
    (tmp_path / "batch").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataFormatError, match=r"not a readable pickle: .*Get it again"):
        read_plain_pickle(tmp_path / "batch")


def test_an_enormous_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_PICKLE_BYTES", 5)
    (tmp_path / "batch").write_bytes(pickle.dumps([0] * 100))
    with pytest.raises(DataFormatError, match="larger than 5 bytes"):
        read_plain_pickle(tmp_path / "batch")


def test_a_folder_is_no_pickle(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="cannot be read: Is a directory"):
        read_plain_pickle(tmp_path)
