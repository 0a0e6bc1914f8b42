"""From bodies to images: what is taken is exact, what is not says why."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from serving.clients import npy_bytes, picture
from ttapca.datasets.pictures import PictureSize
from ttapca.errors import DataFormatError, OptionError, ShapeError
from ttapca.serving.decoding import FORM, NPY, ImageDecoder, files_of_form
from ttapca.serving.http_errors import HttpError
from ttapca.serving.limits import RequestLimits

COLOUR = (3, 4, 6)
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (5, 4, 6, 3), np.uint8)  # (images, height, width, channels)
EXPECTED = torch.tensor(PIXELS.tolist(), dtype=torch.float64).permute(0, 3, 1, 2) / 255
SQUARE = RANDOM.integers(0, 256, (8, 8, 3), np.uint8)


def form(*files: bytes, field: str = "images", boundary: str = "x") -> bytes:
    """A form as RFC 7578 writes it."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; '
        f'filename="{number}.png"\r\nContent-Type: image/png\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for number, content in enumerate(files)
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def decode(kind: str, body: bytes, shape: tuple[int, ...] = COLOUR, **limits: Any) -> torch.Tensor:
    return ImageDecoder(shape, RequestLimits(**limits)).images(kind, body)


SHARES = PIXELS.astype(np.float64) / 255
BY_CHANNEL = np.moveaxis(SHARES, -1, 1)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (NPY, npy_bytes(PIXELS)),
        (NPY, npy_bytes(np.moveaxis(PIXELS, -1, 1))),
        (NPY, npy_bytes(np.asfortranarray(PIXELS))),
        (NPY, npy_bytes(BY_CHANNEL)),
        (NPY, npy_bytes(SHARES)),
        (NPY, npy_bytes(BY_CHANNEL.astype(">f4"))),
        (f"{NPY}; charset=utf-8", npy_bytes(BY_CHANNEL)),
        (f"{FORM}; boundary=x", form(*map(picture, PIXELS))),
        (f'{FORM.upper()}; Boundary="x"', form(*map(picture, PIXELS))),
    ],
)
def test_all_ways_lead_to_the_same_images(kind: str, body: bytes) -> None:
    found = decode(kind, body)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), EXPECTED, atol=1e-7, rtol=0)


def test_half_precision_and_a_single_picture() -> None:
    halves = (BY_CHANNEL * 0.999).astype(np.float16)
    assert torch.equal(decode(NPY, npy_bytes(halves)), torch.tensor(halves).float())
    single = decode("image/png", picture(PIXELS[2]))
    torch.testing.assert_close(single.double(), EXPECTED[2:3], atol=1e-7, rtol=0)


def test_where_both_orders_fit_bytes_are_pictures_and_numbers_are_planes() -> None:
    cube = RANDOM.integers(0, 256, (2, 3, 3, 3), np.uint8)
    stored = decode(NPY, npy_bytes(cube), (3, 3, 3))
    assert torch.equal(stored, torch.tensor(cube).permute(0, 3, 1, 2) / 255)
    taken = decode(NPY, npy_bytes((cube / 255).astype(np.float32)), (3, 3, 3))
    assert torch.equal(taken, torch.tensor((cube / 255).astype(np.float32)))


def test_networks_that_take_no_pictures() -> None:
    rows = RANDOM.random((4, 7)).astype(np.float32)
    assert torch.equal(decode(NPY, npy_bytes(rows), (7,)), torch.tensor(rows))
    assert torch.equal(decode(NPY, npy_bytes(np.eye(7, dtype=np.uint8)), (7,)), torch.eye(7) / 255)
    with pytest.raises(ShapeError, match=r"takes \(images, 7\)\. Send arrays as `\.npy`"):
        decode("image/png", picture(SQUARE), (7,))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_every_kind(mode: str, channels: int) -> None:
    converted = Image.fromarray(SQUARE).convert(mode)
    file = io.BytesIO()
    converted.save(file, "JPEG" if mode == "CMYK" else "PNG")
    found = decode("image/png", file.getvalue(), (channels, 8, 8))
    opened = Image.open(file).convert("L" if channels == 1 else "RGB")
    expected = torch.tensor(np.asarray(opened)).reshape(1, 8, 8, channels).permute(0, 3, 1, 2) / 255
    assert torch.equal(found, expected)


def test_pictures_of_another_size_are_brought_to_the_networks() -> None:
    tall = RANDOM.integers(0, 256, (24, 16, 3), np.uint8)
    found = decode("image/png", picture(tall), (3, 8, 8))
    resized = np.asarray(Image.fromarray(tall).resize((8, 12)))[2:10]
    assert torch.equal(found[0], torch.tensor(resized).permute(2, 0, 1) / 255)
    decoder = ImageDecoder((3, 8, 8), size=PictureSize(8, 12))
    resized = np.asarray(Image.fromarray(tall).resize((12, 18)))[5:13, 2:10]
    assert torch.equal(
        decoder.images("image/png", picture(tall))[0], torch.tensor(resized).permute(2, 0, 1) / 255
    )
    exact = np.asarray(Image.fromarray(tall).resize((6, 4)))
    found = decode("image/png", picture(tall))
    assert torch.equal(found[0], torch.tensor(exact).permute(2, 0, 1) / 255)
    with pytest.raises(OptionError, match="get the size that the network takes"):
        ImageDecoder((3, 8, 8), size=PictureSize(9))
    with pytest.raises(OptionError, match=r"takes, \(images, 7\)"):
        ImageDecoder((7,), size=PictureSize(7))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int) -> None:
    """What each value of the tag says of the first row and column of the file (EXIF 2.3, 4.6.4)."""
    upright = np.arange(4 * 6, dtype=np.uint8).reshape(4, 6)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    body = picture(np.ascontiguousarray(stored), exif=exif)
    found = decode("image/png", body, (1, 4, 6))
    assert torch.equal(found[0, 0] * 255, torch.tensor(upright).float())


@pytest.mark.parametrize("exif", [b"", b"no", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff"])
def test_damaged_exif_data_say_nothing(exif: bytes) -> None:
    body, plain = picture(SQUARE, exif=exif), picture(SQUARE)
    found, due = (decode("image/png", each, (3, 8, 8)) for each in (body, plain))
    assert torch.equal(found, due)


def bomb(width: int, height: int) -> bytes:
    """A small PNG that states a large size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = zlib.compress(bytes((width + 1) * min(height, 100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def damaged_header(**changes: Any) -> bytes:
    """An `.npy` whose header states something else."""
    header = {"descr": "|u1", "fortran_order": False, "shape": PIXELS.shape, **changes}
    text = f"{header}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + PIXELS.tobytes()


def object_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


BAD: dict[str, tuple[str, bytes, type[Exception], str]] = {
    "no png": ("image/png", b"GIF89a", DataFormatError, "Picture 1 .* it is none of PNG, JPEG"),
    "gif": ("image/png", picture(SQUARE, "GIF"), DataFormatError, "none of PNG, JPEG"),
    "cut png": ("image/png", picture(SQUARE)[:-40], DataFormatError, "Picture 1 cannot be read"),
    "cut jpeg": (
        "image/jpeg",
        picture(np.kron(SQUARE, np.ones((20, 20, 1), np.uint8)), "JPEG")[:-400],
        DataFormatError,
        "Send PNG or JPEG files",
    ),
    "16 bits": (
        "image/png",
        picture(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000),
        DataFormatError,
        "more than 8 bits",
    ),
    "bomb": ("image/png", bomb(6_000, 6_000), HttpError, "at most 20,000,000 pixels .* 36,000,000"),
    "larger bomb": ("image/png", bomb(60_000, 60_000), DataFormatError, "cannot be read"),
    "many pictures": (
        f"{FORM}; boundary=x",
        form(*[picture(SQUARE)] * 9),
        DataFormatError,
        "at most 8 images",
    ),
    "no pictures": (f"{FORM}; boundary=x", form(), DataFormatError, "1 to 8 images; found 0"),
    "second damaged": (
        f"{FORM}; boundary=x",
        form(picture(SQUARE), b"x"),
        DataFormatError,
        "Picture 2",
    ),
    "other field": (
        f"{FORM}; boundary=x",
        form(picture(SQUARE), field="image"),
        DataFormatError,
        "called `images`; found 'image'",
    ),
    "no boundary": (FORM, form(), DataFormatError, "states its boundary"),
    "cut form": (
        f"{FORM}; boundary=x",
        form(picture(SQUARE))[:-8],
        DataFormatError,
        "cut short",
    ),
    "no form": (f"{FORM}; boundary=x", b"hello", DataFormatError, "The form cannot be read"),
    "long boundary": (
        f"{FORM}; boundary={'x' * 9999}",
        b"",
        DataFormatError,
        "The form cannot be read",
    ),
    "type": ("text/html", b"", HttpError, "sent as one of .*; found 'text/html'"),
    "no type": ("", b"", HttpError, "found ''"),
    "json": ("application/json", b"{}", HttpError, "found 'application/json'"),
    "no npy": (NPY, b"PK", DataFormatError, "is not a plain `.npy` array"),
    "pickle": (NPY, pickle.dumps(PIXELS), DataFormatError, "is not a plain `.npy`"),
    "objects": (NPY, object_array(), DataFormatError, "items, not numbers"),
    "long header": (NPY, damaged_header(note="x" * 20_000), DataFormatError, "plain `.npy`"),
    "deep header": (NPY, damaged_header(shape=eval("(" * 60 + ")" * 60)), DataFormatError, "npy"),
    "claims more": (NPY, damaged_header(shape=(2**40, 4, 6, 3)), DataFormatError, "cut short"),
    "negative": (NPY, damaged_header(shape=(-1, 4, 6, 3)), DataFormatError, "shape is not"),
    "claims less": (NPY, damaged_header(shape=(4, 4, 6, 3)), DataFormatError, "longer than"),
    "nothing": (NPY, npy_bytes(PIXELS[:0]), DataFormatError, "1 to 8 images; found 0"),
    "a number": (NPY, npy_bytes(np.uint8(3)), DataFormatError, "1 to 8 images; found 0"),
    "nine": (NPY, npy_bytes(np.repeat(PIXELS, 2, 0)), DataFormatError, "found 10"),
    "shape": (NPY, npy_bytes(PIXELS[:, :3]), ShapeError, r"or \(images, 4, 6, 3\); found \(5, 3"),
    "three axes": (NPY, npy_bytes(PIXELS[0]), ShapeError, r"found \(4, 6, 3\)"),
    "whole numbers": (NPY, npy_bytes(PIXELS.astype(int)), DataFormatError, "found int64"),
    "complex": (NPY, npy_bytes(PIXELS.astype(complex)), DataFormatError, "npy|complex"),
    "text": (NPY, npy_bytes(PIXELS.astype(str)), DataFormatError, "Images must be uint8"),
    "levels": (NPY, npy_bytes(PIXELS.astype(np.float32)), DataFormatError, "Divide pixels by 255"),
    "below": (NPY, npy_bytes(BY_CHANNEL - 1.0), DataFormatError, "from 0 to 1; found -1"),
    "nan": (NPY, npy_bytes(BY_CHANNEL * np.nan), DataFormatError, "found nan"),
    "infinity": (NPY, npy_bytes(BY_CHANNEL + np.inf), DataFormatError, "found inf"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_images_says_why(name: str) -> None:
    kind, body, error, message = BAD[name]
    with pytest.raises(error, match=message) as raised:
        decode(kind, body, max_images=8, max_pixels=20_000_000)
    assert " at 0x" not in str(raised.value)
    assert len(str(raised.value)) < 700


def test_the_pixels_of_all_pictures_count() -> None:
    body = form(*[picture(np.zeros((100, 100, 3), np.uint8))] * 3)
    kind = f"{FORM}; boundary=x"
    assert len(decode(kind, body, max_pixels=30_000)) == 3
    with pytest.raises(HttpError, match="these have 30,000"):
        decode(kind, body, max_pixels=29_999)


def test_a_narrow_picture_counts_as_large_as_it_would_get() -> None:
    with pytest.raises(HttpError, match="these have 32,000,000"):
        decode("image/png", bomb(1, 500_000), (3, 8, 8), max_pixels=31_000_000)


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_files_of_a_form_come_as_they_are(files: list[bytes]) -> None:
    boundary = "----boundary-that-no-file-has"
    body = form(*files, boundary=boundary)
    assert files_of_form(body, f"{FORM}; boundary={boundary}", 5) == files


def test_httpx_makes_such_forms() -> None:
    import httpx

    files = [("images", ("a.png", picture(each), "image/png")) for each in PIXELS]
    request = httpx.Request("POST", "http://localhost", files=files)
    found = decode(request.headers["content-type"], request.read())
    torch.testing.assert_close(found.double(), EXPECTED, atol=1e-7, rtol=0)
