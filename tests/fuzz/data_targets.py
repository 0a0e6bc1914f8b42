"""The layouts of images and the shards that `ttapca.datasets` reads, and photographs of frost."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from fuzz.mutations import (
    ANY_FILE,
    Mutate,
    Target,
    in_some_file,
    in_zip_member,
    mutate_bytes,
    mutate_json,
)
from ttapca.corruptions import TEXTURE_FILES, load_textures
from ttapca.datasets import Images, inventory, load, open_shards, write_cifar_binary
from ttapca.datasets.cifar import CIFAR10_BINARY, CIFAR100_BINARY, CifarVersion

COUNT = 5


def some_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def use(images: Images) -> None:
    """Touch every pixel and label."""
    images.fingerprint()
    images.channel_means()
    for batch in images.batches(2):
        repr(batch)


def read_train_and_test(path: Path) -> None:
    use(load(path, "test"))
    use(load(path, "train"))


def inside(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    return folder / name


# CIFAR -------------------------------------------------------------------------------------------


def make_binary(version: CifarVersion, folder: Path) -> Path:
    images = Images(some_pixels(COUNT, 32, 32, 3), np.arange(COUNT), version.class_names)
    path = inside(folder, version.folder)
    write_cifar_binary(path, version, {"test": images, "train": images})
    return path


# Arrays and pictures -----------------------------------------------------------------------------


def make_npz(save: Callable[..., None], folder: Path) -> Path:
    path = folder / "mine.npz"
    labels, names = np.arange(COUNT), np.array(list("abcde"))
    save(path, images=some_pixels(COUNT, 8, 8, 3), labels=labels, class_names=names)
    return path


def lying_header(content: bytes, random: Random) -> bytes:
    """Put another header in front of an array's bytes, well-formed or not."""
    shapes = ("(5, 8, 8, 3)", "(10**12,)", "(1000000000000,)", "(-1, 8)", "()", "(0,)", "(5L, 8L)")
    shapes += ("(3, 1000000000, 1000000000)", "[5, 8]", "(" * 300, "(5.0,)", "((5,),)", "('x',)")
    kinds = ("'|u1'", "'<i8'", "'O'", "'|S0'", "'<U1000000'", "'V8'", "'m8'", "[('a', '<i4')]")
    kinds += ("'<f16'", "'|b1'", "'i4,i4'", "'(1000,1000)f8'", "None", "{}", "'" + "(" * 500 + "'")
    kind, shape = random.choice(kinds), random.choice(shapes)
    order = random.choice(("False", "True", "3", "x"))
    header = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}\n"
    body = random.choice((content[-960:], b"", bytes(3)))
    size = random.choice((len(header), len(header), len(header), 0, 65535))
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + header.encode() + body


def make_corrupted(folder: Path) -> Path:
    path = inside(folder, "CIFAR-10-C")
    np.save(path / "fog.npy", some_pixels(2 * COUNT, 8, 8, 3))
    np.save(path / "labels.npy", np.tile(np.arange(COUNT, dtype=np.uint8), 2))
    manifest = {"severities": [1, 3], "class_names": list("abcde"), "seed": 0}
    (path / "corruptions.json").write_text(json.dumps(manifest))
    return path


def make_root(folder: Path) -> Path:
    path = inside(folder, "root")
    make_corrupted(path)
    make_binary(CIFAR100_BINARY, path)
    return path


def make_pictures(folder: Path) -> Path:
    cats, dogs = inside(folder, "pictures/cat"), inside(folder, "pictures/dog")
    picture = Image.fromarray(some_pixels(12, 10, 3))
    for suffix in ("png", "jpg", "webp", "bmp", "gif", "tif"):
        picture.save(cats / f"tom.{suffix}")
    picture.convert("L").save(dogs / "grey.png")
    picture.convert("P").save(dogs / "palette.png", transparency=3)
    picture.convert("RGBA").save(dogs / "clear.tiff", compression="tiff_deflate")
    picture.convert("CMYK").save(dogs / "print.jpeg")
    return folder / "pictures"


# Shards and photographs ---------------------------------------------------------------------------


def make_shard(form: int, folder: Path) -> Path:
    """A WebDataset tar file of pictures, an array and classes."""
    picture, array = io.BytesIO(), io.BytesIO()
    pixels = some_pixels(8, 8, 3)
    Image.fromarray(pixels).save(picture, "PNG")
    np.save(array, pixels)
    with tarfile.open(folder / "shard.tar", "w", format=form) as tar:
        for number, (kind, image) in enumerate(
            (("png", picture), ("npy", array), ("png", picture))
        ):
            for ending, content in ((kind, image.getvalue()), ("cls", b"%d" % number)):
                entry = tarfile.TarInfo(f"{number * 60 * 'long/'}{number}.{ending}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return folder / "shard.tar"


def make_shards(folder: Path) -> Path:
    path = inside(folder, "shards")
    np.save(path / "a.npy", some_pixels(5, 8, 8, 3))
    np.save(path / "a.labels.npy", np.arange(5))
    np.savez_compressed(path / "b.npz", images=some_pixels(4, 8, 8, 3), labels=np.arange(4))
    return path


def read_shards(path: Path) -> None:
    for batch in open_shards(path if path.is_file() else path / "*.np?", batch_size=2):
        (batch[0] if isinstance(batch, tuple) else batch).sum()


def tar_header(content: bytes, random: Random) -> bytes:
    """Change fields in one or two headers, and make their checksums right."""
    places = [at for at in range(0, len(content), 512) if content[at + 257 : at + 262] == b"ustar"]
    fields = ((0, 100), (124, 12), (124, 12), (156, 1), (157, 100), (345, 155))
    found = bytearray(content)
    for place in random.sample(places, min(len(places), random.randint(1, 2))):
        field, size = random.choice(fields)
        value = random.choice((b"7" * 11, b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"0" * 11, b"../x"))
        value = random.choice(b"01234567xgLKSDV").to_bytes(1, "big") if size == 1 else value
        found[place + field : place + field + len(value[:size])] = value[:size]
        total = sum(found[place : place + 148]) + 8 * 32 + sum(found[place + 156 : place + 512])
        found[place + 148 : place + 156] = b"%06o\0 " % total
    return bytes(found)


def make_textures(folder: Path) -> Path:
    path = inside(folder, "frost")
    for name in TEXTURE_FILES:
        Image.fromarray(some_pixels(9, 8, 3)).save(path / name)
    return path


JSON: tuple[Mutate, ...] = (*ANY_FILE, *(in_some_file(mutate_json, "*.json"),) * 3)
ARRAYS: tuple[Mutate, ...] = (*JSON, *(in_some_file(lying_header, "*.npy"),) * 3)
ZIPS: tuple[Mutate, ...] = (*ANY_FILE, *(in_some_file(in_zip_member(mutate_bytes)),) * 3)
NPZ: tuple[Mutate, ...] = (*ZIPS, *(in_some_file(in_zip_member(lying_header)),) * 3)
SHARDS = (*ANY_FILE, *(in_some_file(lying_header, "*.npy"),) * 3)
SHARDS += (in_some_file(in_zip_member(lying_header), "*.npz"),) * 3
TARS = (*ANY_FILE, *(in_some_file(tar_header),) * 3)


def read(path: Path) -> None:
    use(load(path))


TARGETS = [
    Target("cifar10-binary", partial(make_binary, CIFAR10_BINARY), read_train_and_test),
    Target("cifar100-binary", partial(make_binary, CIFAR100_BINARY), read_train_and_test),
    Target("npz", partial(make_npz, np.savez), read, NPZ),
    Target("npz-compressed", partial(make_npz, np.savez_compressed), read, NPZ),
    Target(
        "cifar-c",
        make_corrupted,
        lambda path: use(load(path, corruption="fog", severity=3)),
        ARRAYS,
    ),
    Target("inventory", make_root, lambda path: inventory(path), ARRAYS),
    Target("pictures", make_pictures, lambda path: use(load(path, size=8))),
    Target("pictures-of-one-size", make_pictures, read),
    Target("shard-tar", partial(make_shard, tarfile.PAX_FORMAT), read_shards, TARS),
    Target("shard-tar-gnu", partial(make_shard, tarfile.GNU_FORMAT), read_shards, TARS),
    Target("shards", make_shards, read_shards, SHARDS),
    Target("textures", make_textures, load_textures),
]
