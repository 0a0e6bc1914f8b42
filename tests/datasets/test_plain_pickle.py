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
    st.sampled_from([None, True, False])
    | st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
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
        Calls(open, str(trace), "w"),
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
BEGIN = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
BILLION = (10**9).to_bytes(4, "little")
FRAMED = b"\x8a\x08" + (2**62).to_bytes(8, "little")
OTHER_SIZE = b"(K\x03U\x01|NNNJ\x40\x42\x0f\x00J\x01\x00\x00\x00K\x00tb"
ENCODED = b"\x80\x02c_codecs\nencode\nq\x00V" + b"x" * 10**5 + b"\nq\x01\x85R"
NO_VALUE = "an array or a name where a value belongs"
ATTACKS = [
    # types: of another or a negative item size, built twice or changed under an array, unknown
    (array_of(ONE, dtype_of(b"u1", size=b"J" + BILLION), TWO_BYTES), "`u1` .* has another size"),
    (array_of(ONE, dtype_of(b"S2", size=b"J\xfe\xff\xff\xff"), TWO_BYTES), "has another size"),
    (array_of(ONE, BYTE + OTHER_SIZE, TWO_BYTES), "only an array and its type have a state"),
    (
        array_of(b"(K\x02t", dtype_of(b"S1", size=b"K\x01") + b"q\x07", TWO_BYTES)[:-1]
        + (b"h\x07" + OTHER_SIZE + b"\x86."),
        "only an array and its type have a state",
    ),
    (array_of(ONE, dtype_of(b"S0"), b"U\x00"), "`S0` is not plain numbers"),
    (array_of(ONE, dtype_of(b"u1", b"x"), TWO_BYTES), "another size or"),
    (array_of(ONE, b"N", TWO_BYTES), "must be made of bytes and a type"),
    # gigabytes: from a shape, a tuple, an empty array, a call of a type; a product past 64 bits
    (
        array_of(b"(J" + BILLION + b"t", BYTE, TWO_BYTES),
        r"\(1000000000,\) .* as many bytes; found 2",
    ),
    (array_of(b"(J" + BILLION + b"K\x06t", BYTE, b"(K\x00t"), "must be made of bytes and a type"),
    (BEGIN + b"(J" + BILLION + b"K\x03tU\x01btR.", NO_VALUE),
    (b"cnumpy\nndarray\n((J" + BILLION + b"tcnumpy\ndtype\n(U\x02u1tRtR.", "not made by its type"),
    (array_of(b"(" + 3 * (b"J" + BILLION) + b"t", BYTE, TWO_BYTES), "as many bytes; found 2"),
    (array_of(ONE, BYTE, TWO_BYTES), "as many bytes; found 2"),
    (array_of(b"(J\xff\xff\xff\xfft", BYTE, TWO_BYTES), "bytes; found 2|negative dim"),
    (array_of(b"(" + FRAMED + b"t", BYTE, TWO_BYTES), "bytes; found 2|negative dim"),
    (array_of(b"(" + b"K\x01" * 1000 + b"t", BYTE, TWO_BYTES), "at most 32 axes"),
    (b"c__builtin__\nbytes\n(J" + BILLION + b"tR.", "TypeError"),
    (ENCODED + b"](" + b"h\x00h\x01\x85R" * 100 + b"e.", "more bytes than it has"),
    # trees: unfinished, shared, of themselves, too deep; keys that take hours to hash
    (b"\x80\x02](" + BEGIN + b"(K\x00tU\x01btRe.", NO_VALUE),
    (b"cnumpy\nndarray\n.", NO_VALUE),
    (b"\x80\x02K\x01" + b"q\x00h\x00\x86" * 60 + b".", "container in two places"),
    (b"\x80\x02]q\x00h\x00a.", "container in two places"),
    (b"\x80\x02" + b"](" * 10**5 + b"e" * 10**5 + b".", "more than 100 deep"),
    (b"\x80\x02}(I0\nNI2305843009213693951\nNu.", "a key must be text"),
    (b"\x80\x02}" + b")" + b"\x85" * 10**5 + b"Ns.", "a key must be text"),
    # numbers and text that are too long, or state another length
    (b"L" + b"9" * 10**6 + b"L\n.", "ValueError: Exceeds"),
    (b"\x80\x02\x8b" + bytes(10**6) + b".", "opcode LONG4"),
    (b"\x80\x02T\xff\xff\xff\x7fabc.", "only 4 remain"),
    (b"\x80\x02T\xff\xff\xff\xffabc.", "byte count < 0"),
    # programs that make no sense
    (b"\x80\x02j" + BILLION + b".", "KeyError"),
    (b"N(a.", "IndexError: the stack is empty"),
    (b"K\x01K\x02a.", "no attribute .extend"),
    (b"NVa\nNs.", "no attribute .update"),
    (b"K\x01)R.", "TypeError: only a name can be called"),
    # names of anything else
    (b"c_codecs\nencode\n(Vabc\nVrot13\ntR.", "encoding `rot13`"),
    (b"c" + b"x" * 10**6 + b"\nname\n.", r"asks for `x{60}\.\.\.`"),
    (b"cos\nsystem\n(Vtrue\ntR.", r"asks for `os\.system`"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"asks for `os\.system`"),
    (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.", r"asks for `numpy\.nd"),
    (b"cnumpy.core.multiarray\nfromfile\n.", "asks for `"),
    # other opcodes
    (b"(Vtrue\nios\nsystem\n.", "the opcode INST, which no CIFAR file has"),
    (b"\x80\x02(No.", "the opcode OBJ"),
    (b"\x80\x02]\x81.", "the opcode NEWOBJ"),
    (b"\x80\x04]]}\x92.", "the opcode NEWOBJ_EX"),
    (b"\x80\x02\x82\x01.", "the opcode EXT1"),
    (b"Pname\n.", "the opcode PERSID"),
    (b"NQ.", "the opcode BINPERSID"),
    (b"N2\x86.", "the opcode DUP"),
    (b"\x80\x05\x97.", "the opcode NEXT_BUFFER"),
    (b"S'text'\n.", "the opcode STRING"),
]


@pytest.mark.parametrize(("program", "message"), ATTACKS, ids=map(str, range(len(ATTACKS))))
def test_an_attack_is_refused_before_anything_is_made(program, message, tmp_path):
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
