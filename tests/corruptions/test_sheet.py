"""The contact sheet."""

from __future__ import annotations

import numpy as np
import pytest

from ttapca.corruptions import corrupt
from ttapca.corruptions.sheet import contact_sheet
from ttapca.errors import OptionError, PixelTypeError


def test_cells_hold_the_images_enlarged(images):
    sheet = np.asarray(contact_sheet(images[3], index=3, corruptions=["snow"], severities=[4]))
    clean = sheet[26 : 26 + 128 : 4, 12 : 12 + 128 : 4]
    spoilt = sheet[26 : 26 + 128 : 4, 152 : 152 + 128 : 4]
    assert (clean == images[3]).all()
    assert (spoilt == corrupt(images[3:4], "snow", 4, start=3)[0]).all()
    assert (sheet[:26] < 255).any()  # the captions


def test_large_images_are_not_enlarged(make_images):
    image = make_images(1, 150, 200)[0]
    sheet = contact_sheet(image, corruptions=["contrast"])
    assert sheet.size == (2 * 212 + 12, 176 + 12)


def test_long_captions_are_cut(make_images):
    sheet = contact_sheet(make_images(1, 33, 33)[0], corruptions=["elastic_transform"])
    assert sheet.size == (2 * (33 * 3 + 12) + 12, 33 * 3 + 14 + 12 + 12)


def test_there_must_be_something_to_show(images):
    with pytest.raises(OptionError, match="at least one corruption and one severity"):
        contact_sheet(images[0], corruptions=[])
    with pytest.raises(PixelTypeError, match="uint8"):
        contact_sheet(images[0] / 255)
