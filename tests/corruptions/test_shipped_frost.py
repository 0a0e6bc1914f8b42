"""The photographs of frost that ship are what frost makes of the original ones for small images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ttapca.cli.app import run
from ttapca.cli.arguments import cache_root
from ttapca.corruptions import TEXTURE_FILES, corrupt, load_textures
from ttapca.corruptions.catalogue import load_table
from ttapca.corruptions.pixels import stream_key, uniforms
from ttapca.corruptions.weather import SHRUNK_FOLDER, SHRUNK_SIDES
from ttapca.datasets import FROST, has_frost
from ttapca.errors import DataFormatError, DataNotFoundError


def shipped() -> list[np.ndarray]:
    paths = [SHRUNK_FOLDER / Path(name).with_suffix(".png") for name in TEXTURE_FILES]
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def test_a_piece_of_one_of_them_is_laid_over(images: np.ndarray) -> None:
    photographs = shipped()
    assert tuple(min(each.shape[k] for each in photographs) for k in (0, 1)) == SHRUNK_SIDES
    found = corrupt(images, "frost", 5, seed=3)
    p = load_table("cifar-c").parameters("frost", 5)
    numbers = uniforms(stream_key(3, "frost", 5), np.arange(len(images)), 3)
    for image, spoilt, (which, down, right) in zip(images, found, numbers, strict=True):
        photograph = photographs[int(which * p["texture_count"])].astype(float)
        top = int(down * (photograph.shape[0] - 32))
        left = int(right * (photograph.shape[1] - 32))
        piece = photograph[top : top + 32, left : left + 32]
        mixed = p["image_weight"] * image + p["frost_weight"] * piece
        assert np.array_equal(spoilt, np.minimum(mixed, 255).astype(np.uint8))


def test_the_bytes_are_those_of_the_original_photographs(make_images) -> None:
    if not has_frost(cache_root()):
        pytest.skip("the photographs are not there: ttapca data get frost")
    for images in (make_images(6), make_images(6, 62, 95)):
        for severity in (1, 5):
            original = corrupt(images, "frost", severity, textures=cache_root() / FROST)
            assert np.array_equal(corrupt(images, "frost", severity), original)


@pytest.mark.parametrize("shape", [(63, 32), (32, 97)])
def test_larger_images_need_the_original_ones(make_images, shape: tuple[int, int]) -> None:
    with pytest.raises(DataNotFoundError, match="ttapca data get frost"):
        corrupt(make_images(1, *shape), "frost", 1)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "frost5.jpg",
            lambda path: path.write_bytes(b"damaged"),
            "is not a readable picture: .* Delete it",
        ),
        ("frost2.png", Image.new("1", (8000, 8000)).save, "more than 50,000,000"),
    ],
)
def test_a_damaged_photograph_is_named(name, damage, message, tmp_path) -> None:
    for each in TEXTURE_FILES:
        Image.new("RGB", (5, 4)).save(tmp_path / each)
    damage(tmp_path / name)
    with pytest.raises(DataFormatError, match=rf"{name} .*{message}"):
        load_textures(tmp_path)


def test_the_command_line_does_without_a_download(images, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(12))
    words = ["--corruptions", "frost", "--severities", "2", "--jobs", "1"]
    assert run(["corrupt", str(tmp_path / "data.npz"), "--to", str(tmp_path / "c"), *words]) == 0
    capsys.readouterr()
    assert np.array_equal(np.load(tmp_path / "c" / "frost.npy"), corrupt(images, "frost", 2))
