"""Errors that name the file, headers that lie, and archives that would fill the memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ttapca.datasets import read_npz
from ttapca.datasets.reading import map_npy, read_npz_arrays, reading
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError, StorageError


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (NotImplementedError(), DataFormatError, "cannot be read: NotImplementedError"),
        (ValueError("x" * 10_000), DataFormatError, r"cannot be read: x{300}\. It is damaged"),
        (MemoryError(), DataFormatError, "needs more memory than there is"),
        (PermissionError(13, "Permission denied"), DataFormatError, "read: Permission denied"),
        (FileNotFoundError(2, "No such file"), DataNotFoundError, "does not exist"),
        (ShapeError("Too flat."), ShapeError, ": Too flat."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_names_the_file(raised, error, message):
    path = Path("some/file.npz")
    with pytest.raises(error, match=rf"^some/file\.npz.*{message}"), reading(path):
        raise raised
    with pytest.raises(StorageError, match=r"^full$"), reading(path):
        raise StorageError("full")  # other errors of ours pass


def npy(header, body=bytes(12), version=(1, 0)):
    size = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + size + header.encode() + body


def header(descr="'|u1'", fortran="False", shape="(3, 4)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


NO_ARRAY = "not a plain `.npy` array"
LIES = [
    (npy(header(shape="(1000000000000,)")), "is cut short: shape"),
    (npy(header(shape=f"({10**15}, {10**15})")), "is cut short: shape"),
    (npy(header(), bytes(11)), "12 bytes, and 11 are there"),
    (npy(header(shape="(-1, 4)")), "shape is not one of an array"),
    (npy(header(shape="(" + "1," * 40 + ")")), "shape is not one of an array"),
    (npy(header(descr="'|O'")), "'O' items.*pickled objects are refused"),
    (npy(header(descr="[('a', '<i4')]")), "'V' items"),
    (npy(header(descr="'|S0'", shape="(1000000,)")), "'S' items"),
    (npy("(" * 9000), NO_ARRAY),
    (npy(header(shape="(10**12,)")), NO_ARRAY),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100_000), NO_ARRAY),  # a header of 4 GB
    (npy(header(), version=(9, 9)), NO_ARRAY),
    (b"\x93NUMPY", NO_ARRAY),
]


@pytest.mark.parametrize(("content", "message"), LIES, ids=map(str, range(len(LIES))))
def test_a_lie_in_an_npy_is_refused(content, message, tmp_path):
    (tmp_path / "fog.npy").write_bytes(content)
    with pytest.raises(DataFormatError, match=rf"fog\.npy .*{message}"):
        map_npy(tmp_path / "fog.npy")
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
        archive.writestr("fog.npy", content)
    with pytest.raises(DataFormatError, match=r"mine\.npz is not a plain `.npz` archive"):
        read_npz_arrays(tmp_path / "mine.npz", ["fog"])


@pytest.mark.parametrize("dtype", ["u1", ">i4", "S3", "U2", "?"])
@pytest.mark.parametrize("shape", [(3, 4), (), (2, 0, 3), (1024, 1300)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_as_numpy_reads_them(dtype, shape, order, tmp_path):
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape, order=order)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "stored.npz", a=array)
    np.savez_compressed(tmp_path / "packed.npz", a=array, b=array)
    for found in (
        map_npy(tmp_path / "a.npy"),
        read_npz_arrays(tmp_path / "stored.npz", ["a"])["a"],
        read_npz_arrays(tmp_path / "packed.npz", ["b"], optional=["a", "c"])["b"],
    ):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def zeros(size):
    """An archive of zeros, as `numpy.savez_compressed` writes them."""
    buffer = io.BytesIO()
    archive = zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("images.npy", "w") as member:
        member.write(npy(header(shape=f"({size},)"), b""))
        for _ in range(size // 10**6):
            member.write(bytes(10**6))
    return buffer.getvalue()


def test_a_bomb_is_refused_before_it_unpacks_but_a_small_one_is_read(tmp_path):
    (tmp_path / "bomb.npz").write_bytes(zeros(150_000_000))
    tracemalloc.start()
    with pytest.raises(DataFormatError, match=r"bomb\.npz .* more than 100 times as much"):
        read_npz_arrays(tmp_path / "bomb.npz", ["images"])
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
    (tmp_path / "black.npz").write_bytes(zeros(2_000_000))
    assert not read_npz_arrays(tmp_path / "black.npz", ["images"])["images"].any()


# Of a member: the version, encryption, patches, compressions, checksum, the size, the offset
FIELDS = ((6, 2, 99), (8, 2, 1), (8, 2, 32), (10, 2, 1), (10, 2, 14), (10, 2, 12), (16, 4, 1))
FIELDS += ((24, 4, 2**32 - 2), (24, 4, 3), (42, 4, 2**31))


@pytest.mark.parametrize(("field", "size", "number"), FIELDS)
def test_a_list_of_members_that_lies(field, size, number, tmp_path):
    content = zeros(2_000_000)
    place = content.index(b"PK\x01\x02") + field
    changed = content[:place] + number.to_bytes(size, "little") + content[place + size :]
    (tmp_path / "mine.npz").write_bytes(changed)
    with pytest.raises(DataFormatError, match=r"mine\.npz is not a plain `.npz` archive"):
        read_npz_arrays(tmp_path / "mine.npz", ["images"])


def test_what_is_no_archive_of_images(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(DataNotFoundError, match=r"mine.npz does not exist"):
        read_npz(path)
    np.savez(path, image=np.zeros(1))
    with pytest.raises(DataFormatError, match=r"no array `images`. Did you mean `image`"):
        read_npz(path)
    for content in (b"", npy(header()), b"PK\x03\x04abc", zeros(2_000_000)[:1000]):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match=r"not a plain `.npz`"):
            read_npz(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"class_names": np.array("a")}, r"`class_names` must be a row of names; .* \(\)"),
        ({"class_names": np.array([["a"]])}, r"must be a row of names; .* \(1, 1\)"),
        ({"class_names": np.array([2**31 - 1], "<u4").view("<U1")}, "cannot be read"),
        ({"class_names": np.array([b"\xff"])}, "cannot be read"),
        ({"labels": np.array(3)}, "one label for each sample"),
        ({"labels": np.array([2**63], np.uint64)}, "class numbers from 0 up"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8)}, "must be an image to read"),
        ({"images": np.zeros((1, 0, 8, 3), np.uint8)}, "must be an image to read"),
    ],
)
def test_arrays_that_are_no_images(arrays, message, tmp_path):
    good = {"images": np.zeros((1, 8, 8, 3), np.uint8), "labels": np.zeros(1, int)}
    np.savez(tmp_path / "mine.npz", **{**good, **arrays})
    with pytest.raises(ValueError, match=rf"mine\.npz.*{message}"):
        read_npz(tmp_path / "mine.npz")
