"""CIFAR in its python version: pickles, of which nothing is run and none can take much memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import cifar_python, load, read_cifar_python
from ttapca.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, PYTHON_VERSIONS
from ttapca.errors import DataFormatError


def assert_same(found, expected):
    np.testing.assert_array_equal(found.images, expected.images)
    np.testing.assert_array_equal(found.labels, expected.labels)


def planes(images):
    return images.images.transpose(0, 3, 1, 2).reshape(len(images), -1).copy()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("version", PYTHON_VERSIONS, ids=lambda version: version.folder)
def test_the_python_version_comes_back(version, protocol, make_images, tmp_path):
    images, folder = make_images(10), tmp_path / version.folder
    folder.mkdir()
    for files in version.files.values():
        for part, name in enumerate(files):
            rows = images[part :: len(files)]
            batch = {"data": planes(rows), version.labels_key: rows.labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    names = {"label_names": list(version.class_names), "fine_label_names": ["x"] * 100}
    (folder / version.names_file).write_bytes(pickle.dumps(names, protocol=protocol))
    assert_same(read_cifar_python(folder), images)
    assert len(read_cifar_python(folder, "train")) == 10
    found = load(tmp_path)  # torchvision's root
    assert_same(found, images)
    assert found.class_names in (CIFAR10_CLASSES, ("x",) * 100)


def test_a_pickle_of_python_2_is_read(make_images, tmp_path):
    """The opcodes and module names that Python 2 wrote, byte by byte."""
    images = make_images(4)
    pixels = planes(images).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x04M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in images.labels) + b"e"
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."
    (tmp_path / "test_batch").write_bytes(batch)
    assert_same(read_cifar_python(tmp_path), images)


def test_copies_that_others_made_are_read(make_images, tmp_path):
    """Keys in bytes, labels in an array, names that are no UTF-8."""
    images = make_images(2)
    batch = {b"data": planes(images), b"fine_labels": images.labels}
    (tmp_path / "test").write_bytes(pickle.dumps(batch))
    names = [b"caf\xe9", *(name.encode() for name in CIFAR100_CLASSES[1:])]
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}))
    found = read_cifar_python(tmp_path)
    assert_same(found, images)
    assert found.class_names == ("caf\N{REPLACEMENT CHARACTER}", *CIFAR100_CLASSES[1:])


DATA = np.zeros((1, 3072), np.uint8)
GOOD = {"data": DATA, "fine_labels": [0]}
NO_PIXELS = "must be a uint8 array"


@pytest.mark.parametrize(
    ("batch", "meta", "message"),
    [
        ([1, 2], {}, "must hold a dict; found list"),
        ({}, {}, "entries `data` and `fine_labels`; found none"),
        ({"data": DATA}, {}, "found `data`"),
        (GOOD | {"data": [1]}, {}, NO_PIXELS),
        (GOOD | {"data": DATA.astype(float)}, {}, NO_PIXELS),
        (GOOD | {"data": DATA[0]}, {}, NO_PIXELS),
        (GOOD | {"data": DATA[:, 1:]}, {}, r"found \(1, 3071\) and 1 labels"),
        (GOOD | {"fine_labels": [0, 1]}, {}, r"found \(1, 3072\) and 2 labels"),
        (GOOD | {"fine_labels": 7}, {}, "`fine_labels` must be a list; found 7"),
        *(
            (GOOD | {"fine_labels": [label]}, {}, r"`fine_labels\[0\]` must be a whole number")
            for label in ("x", 1.0, True, -1, 10**7, [0])
        ),
        (GOOD, {"fine_label_names": []}, "meta must have a list"),
        (GOOD, {"fine_label_names": [[]]}, "meta: .* must be a list of text"),
    ],
)
def test_a_pickle_of_something_else_is_refused(batch, meta, message, tmp_path):
    (tmp_path / "test").write_bytes(pickle.dumps(batch))
    (tmp_path / "meta").write_bytes(pickle.dumps(meta))
    with pytest.raises(DataFormatError, match=message):
        read_cifar_python(tmp_path)


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
            with pytest.raises(DataFormatError, match=r"asks for `.*`\. Nothing was run"):
                read_cifar_python(tmp_path)
            assert not trace.exists()
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(trace)), protocol))  # the attack is real
    assert trace.exists()


def array_of(shape, dtype, content):
    """The program of one array, its parts given as programs."""
    return BEGIN + b"(K\x00tU\x01btR(K\x01" + shape + dtype + b"\x89" + content + b"tb"


def dtype_of(name, order=b"|"):
    begin = b"cnumpy\ndtype\n(U" + bytes([len(name)]) + name + b"K\x00K\x01tR"
    return begin + b"(K\x03U\x01" + order + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


BEGIN = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
ONE, TWO_BYTES, BYTE = b"(K\x01t", b"U\x02ab", dtype_of(b"u1")
BILLION = (10**9).to_bytes(4, "little")
ENCODED = b"c_codecs\nencode\nq\x00V" + b"x" * 10**5 + b"\nq\x01X\x06\x00\x00\x00latin1q\x02\x86R"
AGAIN = b"h\x00h\x01h\x02\x86R"
BAD_ARRAY, NUMBERS = "must hold an array of numbers", "its type is"
# Programs of what stands for `data`.
ATTACKS = [
    # types that are none, and arrays of more or fewer bytes than the file has
    (array_of(ONE, b"N", TWO_BYTES), BAD_ARRAY),
    (array_of(ONE, dtype_of(b"O"), TWO_BYTES), NUMBERS),
    (array_of(ONE, dtype_of(b"M8[s]"), TWO_BYTES), NUMBERS),
    (array_of(ONE, dtype_of(b"S2"), TWO_BYTES), NUMBERS),
    (array_of(b"(J" + BILLION + b"t", BYTE, TWO_BYTES), BAD_ARRAY),
    (array_of(b"(" + 3 * (b"J" + BILLION) + b"t", BYTE, TWO_BYTES), BAD_ARRAY),
    (array_of(b"(J\xff\xff\xff\xfft", BYTE, TWO_BYTES), NO_PIXELS),
    (array_of(b"(" + b"K\x01" * 1000 + b"t", BYTE, TWO_BYTES), BAD_ARRAY),
    (array_of(b"K\x01", BYTE, TWO_BYTES), BAD_ARRAY),
    (array_of(ONE, BYTE, b"](Vx\ne"), BAD_ARRAY),
    (BEGIN + b"(J" + BILLION + b"tU\x01btR", BAD_ARRAY),
    (b"cnumpy\nndarray\n(J" + BILLION + b"tR", BAD_ARRAY),
    (b"c__builtin__\nbytes\n(J" + BILLION + b"tR", "asks for `__builtin__.bytes`"),
    (b"c_codecs\nencode\n}Vx\nNsb", "Only an array and its type have a state"),
    (b"cnumpy\ndtype\n}Vx\nNsb", "Only an array and its type have a state"),
    (BYTE + b"(Nt" + b"b", BAD_ARRAY),
    (b"](" + ENCODED + AGAIN * 2000 + b"e", NO_PIXELS),
    (b"c_codecs\nencode\n(Vabc\nVrot13\ntR", NO_PIXELS),
    # trees of themselves, or too deep; keys that take hours to hash
    (b"K\x01" + b"q\x00h\x00\x86" * 60, NO_PIXELS),
    (b"]q\x00h\x00a", NO_PIXELS),
    (b"](" * 10**5 + b"e" * 10**5, NO_PIXELS),
    (b"}(I0\nNI2305843009213693951\nNu", "A key must be text; found a int"),
    (b"(I0\nNd", "A key must be text; found a int"),
    (b"}K\x01" + b"q\x00h\x00\x86" * 60 + b"Ns", "A key must be text; found a tuple"),
    # numbers and text that are too long, or state another length
    (b"L" + b"9" * 10**6 + b"L\n", "not a readable pickle"),
    (b"T\xff\xff\xff\x7fabc", "not a readable pickle"),
    (b"\x96" + bytes(4) + b"\x00\x01\x00\x00abc", "not a readable pickle"),
    # programs that make no sense, names of anything else, other instructions
    (b"j" + BILLION, "not a readable pickle"),
    (b"K\x01)R", "not a readable pickle"),
    (b"c" + b"x" * 10**6 + b"\nname\n", r"asks for `x{20}`"),
    (b"cos\nsystem\n(Vtrue\ntR", r"asks for `os\.system`"),
    (b"\x8c\x02os\x8c\x06system\x93", r"asks for `os\.system`"),
    (b"\x8c\x05numpy\x8c\x0dndarray.dumps\x93", r"asks for `numpy\.nd"),
    (b"cnumpy.core.multiarray\nfromfile\n", "asks for `"),
    (b"(Vtrue\nios\nsystem\n", "the instruction INST, which no file of CIFAR has"),
    (b"(No", "the instruction OBJ"),
    (b"]\x81", "the instruction NEWOBJ"),
    (b"\x82\x01", "the instruction EXT1"),
    (b"NQ", "the instruction BINPERSID"),
]


@pytest.mark.parametrize(("program", "message"), ATTACKS, ids=map(str, range(len(ATTACKS))))
def test_an_attack_is_refused_before_anything_is_made(program, message, tmp_path):
    batch = b"\x80\x02}(U\x04data" + program + b"U\x06labels](K\x00eu."
    (tmp_path / "test_batch").write_bytes(batch)
    tracemalloc.start()
    with pytest.raises(DataFormatError, match=message):
        read_cifar_python(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000


@given(content=st.binary(max_size=60))
def test_noise_is_refused(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("pickle") / "test_batch"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match="test_batch"):
        read_cifar_python(path.parent)


def test_files_that_are_cut_or_too_long(tmp_path, monkeypatch):
    path = tmp_path / "test"
    content = pickle.dumps(GOOD)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataFormatError, match=r"not a readable pickle: .*Get it again"):
        read_cifar_python(tmp_path)
    path.write_bytes(content)
    for name, most, message in (("INSTRUCTIONS", 10, "more than 10"), ("PICKLE_BYTES", 5, "at mo")):
        monkeypatch.setattr(cifar_python, f"MAX_{name}", most)
        with pytest.raises(DataFormatError, match=message):
            read_cifar_python(tmp_path)
