"""Tables of severities."""

from __future__ import annotations

import numpy as np
import pytest

from ttapca.corruptions import CORRUPTIONS, SEVERITIES, corrupt, find, load_table
from ttapca.errors import OptionError


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_table_of_cifar_c_has_what_every_corruption_takes(name):
    table = load_table()
    assert set(table.sections) == set(CORRUPTIONS)
    for severity in SEVERITIES:
        assert set(table.parameters(name, severity)) == find(name).arguments


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


def test_a_table_that_is_not_there_gets_near_names():
    with pytest.raises(OptionError, match=r"found neither for `cifarc`\. Did you mean `cifar-c`"):
        load_table("cifarc")


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
