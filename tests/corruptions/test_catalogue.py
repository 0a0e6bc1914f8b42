"""Tables of severities."""

from __future__ import annotations

import numpy as np
import pytest

from ttapca.corruptions import (
    CIFAR_C,
    CORRUPTIONS,
    IMAGENET_C,
    SEVERITIES,
    corrupt,
    default_table,
    find,
    load_table,
)
from ttapca.errors import OptionError

TABLES = (CIFAR_C, IMAGENET_C)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_what_every_corruption_takes(table):
    found = load_table(table)
    assert found.name == table
    assert set(found.sections) == set(CORRUPTIONS)
    for name in CORRUPTIONS:
        for severity in SEVERITIES:
            assert set(found.parameters(name, severity)) == find(name).arguments


def test_lengths_that_are_published_in_pixels_are_those_of_224():
    published = {
        "amplitude_fraction": (488, 488, 12.2, 17.08, 29.28),
        "deviation_fraction": (170.8, 19.52, 2.44, 2.44, 2.44),
        "affine_fraction": (24.4, 48.8, 4.88, 4.88, 4.88),
    }
    for severity in SEVERITIES:
        found = load_table(IMAGENET_C).parameters("elastic_transform", severity)
        for name, value in found.items():
            assert 224 * value == pytest.approx(published[name][severity - 1], rel=1e-12)


def test_the_published_numbers_of_enlargements():
    table = load_table(IMAGENET_C)
    steps = [table.parameters("zoom_blur", severity) for severity in SEVERITIES]
    counts = [len(np.arange(1.0, each["stop"], each["step"])) for each in steps]
    assert counts == [12, 16, 11, 13, 11]  # rounding lets the first one reach its end


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *(((32, 32), CIFAR_C), ((64, 300), CIFAR_C), ((95, 224), CIFAR_C)),
        *(((96, 96), IMAGENET_C), ((224, 224), IMAGENET_C), ((480, 640), IMAGENET_C)),
    ],
)
def test_the_size_decides_if_no_table_is_asked_for(size, name, make_images):
    assert default_table(*size) == name
    images = make_images(1, *size)
    by_default = corrupt(images, "contrast", 3)
    for table in TABLES:
        same = by_default == corrupt(images, "contrast", 3, table=table)
        assert same.all() == (table == name)


def test_another_table_is_a_file(tmp_path, images):
    path = tmp_path / "mine.toml"
    path.write_text("[contrast]\nfactor = [0.9, 0.8, 0.7, 0.6, 1.0]\n")
    table = load_table(path)
    assert table.name == "mine"
    spoilt = corrupt(images, "contrast", 5, table=path)
    assert abs(spoilt.astype(int) - images).max() <= 1
    assert (corrupt(images, "contrast", 5, table=table) == spoilt).all()
    with pytest.raises(OptionError, match="`mine` has none for `fog`"):
        corrupt(images, "fog", 1, table=table)
    path.write_text("[contrast]\nfactor = 0.25\n")  # an edited file is read again
    assert load_table(path).parameters("contrast", 1) == {"factor": 0.25}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[contrast", "must be a TOML file"),
        ("contrast = 3", r"bad.toml: `contrast` must be an object.*found 3"),
        (
            "[contrast]\nfactor = [1, 2]",
            r"`contrast.factor` must be one value or a list of 5.*found \[1, 2\]",
        ),
        ("[contrast]\nfactor = nan", r"`contrast.factor` must be .*found nan"),
        ("[contrast]\nfactor = true", r"`contrast.factor` must be"),
        ("name = 3", r"bad.toml: `name` must be text; found 3"),
        ("a = " + "[" * 5000, r"bad.toml is not readable TOML: it is nested too deep"),
        ("[contrast]\nfaktor = 1.0", r"lacks \['factor'\] and has unknown \['faktor'\]"),
    ],
)
def test_a_bad_table_says_what_is_wrong(tmp_path, images, content, message):
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(OptionError, match=message):
        corrupt(images, "contrast", 1, table=path)


@pytest.mark.parametrize(("name", "near"), [("cifarc", "cifar-c"), ("imagenet", "imagenet-c")])
def test_a_table_that_is_not_there_gets_near_names(name, near):
    message = rf"one of cifar-c, imagenet-c, or .* for `{name}`\. Did you mean `{near}`"
    with pytest.raises(OptionError, match=message):
        load_table(name)


def test_whole_numbers_are_as_good_as_real_ones(tmp_path, images):
    path = tmp_path / "mine.toml"
    frost = (
        "[frost]\nimage_weight = {0}\nfrost_weight = 0.5\ntexture_scale = 0.2\ntexture_count = 5\n"
    )
    textures = (np.full((400, 400, 3), 100, np.uint8),) * 6
    found = []
    for weight in ("2", "2.0"):
        path.write_text(frost.format(weight))
        table = load_table(path)
        assert isinstance(table.parameters("frost", 3)["texture_count"], int)
        found.append(corrupt(images, "frost", 3, table=table, textures=textures))
    assert (found[0] == found[1]).all()
