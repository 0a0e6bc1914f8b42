"""A reader of pickles that runs nothing, and that no file can make slow or large."""

from __future__ import annotations

import os
import pickle
import subprocess
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import plain_pickle
from ttapca.datasets.plain_pickle import read_plain_pickle
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
def test_plain_data_come_back(content, protocol, tmp_path_factory):
    path = tmp_path_factory.mktemp("pickle") / "plain"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    assert read_plain_pickle(path) == content


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "bool", "S3", "U3", ">i4"])
@pytest.mark.parametrize("protocol", range(6))
def test_arrays_come_back(dtype, protocol, tmp_path):
    for array in (np.arange(6).astype(dtype), np.arange(6).astype(dtype).reshape(2, 3).T):
        (tmp_path / "array").write_bytes(pickle.dumps(array, protocol=protocol))
        found = read_plain_pickle(tmp_path / "array")
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


class Calls:
    """Unpickles by calling anything."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_executes_nothing(protocol, tmp_path):
    trace, path = tmp_path / "it-ran", tmp_path / "test_batch"
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
            path.write_bytes(pickle.dumps(content, protocol=protocol))
            with pytest.raises(DataFormatError, match=r"asks for `.*`\. Nothing in it was run"):
                read_plain_pickle(path)
            assert not trace.exists()
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(trace)), protocol))  # the attack is real
    assert trace.exists()


def array_of(shape, dtype, content):
    """The program of one array, its parts given as programs."""
    begin = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return b"\x80\x02" + begin + b"(K\x01" + shape + dtype + b"\x89" + content + b"tb."


def dtype_of(name, order=b"|", size=b"J\xff\xff\xff\xff"):
    begin = b"cnumpy\ndtype\n(U" + bytes([len(name)]) + name + b"K\x00K\x01tR"
    return begin + b"(K\x03U\x01" + order + b"NNN" + size + b"J\xff\xff\xff\xffK\x00tb"


ONE, TWO_BYTES, BYTE = b"(K\x01t", b"U\x02ab", dtype_of(b"u1")
BILLION = (10**9).to_bytes(4, "little")
FRAMED = b"\x8a\x08" + (2**62).to_bytes(8, "little")
ATTACKS = {
    "a type of another item size": (
        array_of(ONE, dtype_of(b"u1", size=b"J" + BILLION), TWO_BYTES),
        "type `u1` of an array has another size",
    ),
    "a type of a negative item size": (
        array_of(ONE, dtype_of(b"S2", size=b"J\xfe\xff\xff\xff"), TWO_BYTES),
        "type `S2` of an array has another size",
    ),
    "a type built twice": (
        array_of(ONE, dtype_of(b"u1") + b"(K\x03U\x01|NNNK\x09K\x09K\x00tb", TWO_BYTES),
        "TypeError: only an array and its type have a state",
    ),
    # The array below has the type already; with a longer item it would reach past its bytes.
    "a type changed under its array": (
        array_of(b"(K\x02t", dtype_of(b"S1", size=b"K\x01") + b"q\x07", TWO_BYTES)[:-1]
        + b"h\x07(K\x03U\x01|NNNJ\x40\x42\x0f\x00J\x01\x00\x00\x00K\x00tb\x86.",
        "TypeError: only an array and its type have a state",
    ),
    "a type of no size": (array_of(ONE, dtype_of(b"S0"), b"U\x00"), "`S0` is not plain numbers"),
    "a type of unknown order": (array_of(ONE, dtype_of(b"u1", b"x"), TWO_BYTES), "another size or"),
    "no type": (array_of(ONE, b"N", TWO_BYTES), "must be made of bytes and a type"),
    "more elements than bytes": (
        array_of(b"(J" + BILLION + b"t", BYTE, TWO_BYTES),
        r"shape \(1000000000,\) .* must have as many bytes; found 2",
    ),
    "6 GB from a tuple": (
        array_of(b"(J" + BILLION + b"K\x06t", BYTE, b"(K\x00t"),
        "must be made of bytes and a type",
    ),
    "3 GB from the shape of an empty array": (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J"
        + BILLION
        + b"K\x03tU\x01btR.",
        "an array or a name where a value belongs",
    ),
    "3 GB from a call of the array's type": (
        b"cnumpy\nndarray\n((J" + BILLION + b"K\x03tcnumpy\ndtype\n(U\x02u1tRtR.",
        "TypeError: an array is not made by its type",
    ),
    "fewer elements than bytes": (array_of(ONE, BYTE, TWO_BYTES), "as many bytes; found 2"),
    "a product past 64 bits": (
        array_of(b"(" + b"J" + BILLION + b"J" + BILLION + b"J" + BILLION + b"t", BYTE, TWO_BYTES),
        "as many bytes; found 2",
    ),
    "a negative length": (array_of(b"(J\xff\xff\xff\xfft", BYTE, TWO_BYTES), "sensible numbers"),
    "a length of 2^62": (array_of(b"(" + FRAMED + b"t", BYTE, TWO_BYTES), "sensible numbers"),
    "a thousand axes": (
        array_of(b"(" + b"K\x01" * 1000 + b"t", BYTE, TWO_BYTES),
        "at most 32 axes",
    ),
    "an array that is never finished": (
        b"\x80\x02](cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btRe.",
        "an array or a name where a value belongs",
    ),
    "a name as a value": (b"cnumpy\nndarray\n.", "an array or a name where a value belongs"),
    "a memo that was never put": (b"\x80\x02j" + BILLION + b".", "KeyError"),
    "2^60 leaves": (b"\x80\x02K\x01" + b"q\x00h\x00\x86" * 60 + b".", "container in two places"),
    "a list of itself": (b"\x80\x02]q\x00h\x00a.", "container in two places"),
    "a number of a million digits": (b"L" + b"9" * 10**6 + b"L\n.", "ValueError: Exceeds"),
    "a number of a million bytes": (b"\x80\x02\x8b" + bytes(10**6) + b".", "opcode LONG4"),
    "lists a hundred thousand deep": (
        b"\x80\x02" + b"](" * 10**5 + b"e" * 10**5 + b".",
        "more than 100 deep",
    ),
    "keys with one hash": (b"\x80\x02}(I0\nNI2305843009213693951\nNu.", "a key must be text"),
    "a key without end": (b"\x80\x02}" + b")" + b"\x85" * 10**5 + b"Ns.", "a key must be text"),
    "the bytes of one text again and again": (
        b"\x80\x02c_codecs\nencode\nq\x00V" + b"x" * 10**5 + b"\nq\x01\x85R"
        b"](" + b"h\x00h\x01\x85R" * 100 + b"e.",
        "more bytes than it has",
    ),
    "bytes of a chosen size": (
        b"c__builtin__\nbytes\n(J" + BILLION + b"tR.",
        "TypeError",
    ),
    "text longer than the file": (b"\x80\x02T\xff\xff\xff\x7fabc.", "only 4 remain"),
    "text of a negative length": (b"\x80\x02T\xff\xff\xff\xffabc.", "byte count < 0"),
    "a name of a million letters": (b"c" + b"x" * 10**6 + b"\nname\n.", r"asks for `x{60}\.\.\.`"),
    "a value below a mark": (b"N(a.", "IndexError: the stack is empty"),
    "nothing to append to": (b"K\x01K\x02a.", "TypeError: only a list"),
    "nothing to set an item of": (b"NVa\nNs.", "TypeError: only a dict"),
    "a call of a value": (b"K\x01)R.", "TypeError: a name and a tuple"),
    "another kind of array": (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\ntR.",
        "only an ndarray is an array",
    ),
    "a codec": (b"c_codecs\nencode\n(Vabc\nVrot13\ntR.", "encoding `rot13`"),
    "a name": (b"cos\nsystem\n(Vtrue\ntR.", r"asks for `os\.system`"),
    "a name on the stack": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"asks for `os\.system`"),
    "a method": (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.", r"asks for `numpy\.nd"),
    "another function": (b"cnumpy.core.multiarray\nfromfile\n.", "asks for `"),
    **{
        f"the opcode {name}": (program, f"it has the opcode {name}, which no CIFAR file has")
        for name, program in {
            "INST": b"(Vtrue\nios\nsystem\n.",
            "OBJ": b"\x80\x02(No.",
            "NEWOBJ": b"\x80\x02]\x81.",
            "NEWOBJ_EX": b"\x80\x04]]}\x92.",
            "EXT1": b"\x80\x02\x82\x01.",
            "PERSID": b"Pname\n.",
            "BINPERSID": b"NQ.",
            "DUP": b"N2\x86.",
            "POP": b"N0.",
            "POP_MARK": b"N1.",
            "NEXT_BUFFER": b"\x80\x05\x97.",
            "EMPTY_SET": b"\x80\x04\x8f.",
            "STRING": b"S'text'\n.",
        }.items()
    },
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_before_anything_is_made(attack, tmp_path):
    program, message = ATTACKS[attack]
    (tmp_path / "batch").write_bytes(program)
    tracemalloc.start()
    with pytest.raises(DataFormatError, match=message):
        read_plain_pickle(tmp_path / "batch")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000


@pytest.mark.parametrize(
    ("program", "value"),
    [
        (array_of(b"(K\x02t", dtype_of(b"u1"), TWO_BYTES), [ord("a"), ord("b")]),
        (b"\x80\x02]Kar" + BILLION + b"a.", [ord("a")]),  # a memo of any number costs nothing
        (b"](F" + b"9" * 10**6 + b"\ne.", [float("inf")]),
    ],
)
def test_programs_that_only_look_like_attacks_are_read(program, value, tmp_path):
    (tmp_path / "batch").write_bytes(program)
    assert list(read_plain_pickle(tmp_path / "batch")) == value


@pytest.mark.parametrize(
    "array", [np.array([None, 1]), np.zeros(1, [("a", "i4")]), np.zeros(1, "M8[s]")]
)
def test_arrays_of_objects_and_records_are_refused(array, tmp_path):
    (tmp_path / "array").write_bytes(pickle.dumps(array, protocol=2))
    with pytest.raises(DataFormatError, match="is not plain numbers"):
        read_plain_pickle(tmp_path / "array")


@given(content=st.binary(max_size=60))
def test_noise_is_an_error_of_ours_or_plain_data(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("pickle") / "noise"
    path.write_bytes(content)
    try:
        read_plain_pickle(path)
    except DataFormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - noise may also be a valid pickle


def test_files_that_are_cut_too_long_or_no_files(tmp_path, monkeypatch):
    path = tmp_path / "batch"
    content = pickle.dumps({"data": np.zeros(100, np.uint8)})
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataFormatError, match=r"not a readable pickle: .*Get it again"):
        read_plain_pickle(path)
    with pytest.raises(DataFormatError, match="cannot be read: Is a directory"):
        read_plain_pickle(tmp_path)
    path.write_bytes(pickle.dumps(list(range(101))))
    monkeypatch.setattr(plain_pickle, "MAX_OPCODES", 100)
    with pytest.raises(DataFormatError, match="more than 100 opcodes"):
        read_plain_pickle(path)
    monkeypatch.setattr(plain_pickle, "MAX_PICKLE_BYTES", 5)
    with pytest.raises(DataFormatError, match="at most 5 bytes"):
        read_plain_pickle(path)
