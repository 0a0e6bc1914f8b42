"""The contact sheet: one image and what each corruption makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ttapca.corruptions.apply import check_images, corrupt
from ttapca.corruptions.catalogue import CIFAR_C, STANDARD
from ttapca.corruptions.pixels import Pixels
from ttapca.corruptions.weather import load_textures
from ttapca.errors import OptionError

_CELL = 128  # pixels that an image is enlarged to, or nearly
_GAP = 12
_TEXT = 14
_COLUMNS = 4  # fifteen corruptions and the clean image fill four by four
_PAPER, _INK = (255, 255, 255), (20, 20, 20)

Captioned = tuple[str, Pixels]


def contact_sheet(
    image: Pixels,
    *,
    index: int = 0,
    corruptions: Sequence[str] = STANDARD,
    severities: Sequence[int] = (5,),
    seed: int = 0,
    table: str | Path = CIFAR_C,
    textures: str | Path | tuple[Pixels, ...] | None = None,
) -> Image.Image:
    """Draw an image next to its corruptions, with captions, enlarged pixel by pixel.

    With one severity, the sheet is a grid that starts with the clean image. With several, each
    corruption has a row: the clean image, then one severity after another.

    Args:
        image: uint8, (height, width, 3).
        index: Which image of its data set it is; decides its random numbers.
        corruptions: In the order in which they are shown.
        severities: One or more.
        seed: As in `corrupt`, like the rest.
        table: The severities.
        textures: For frost.

    Raises:
        OptionError: There is nothing to show. Also all errors of `corrupt`.

    Example:
        >>> image = np.full((32, 32, 3), 100, dtype=np.uint8)
        >>> contact_sheet(image, corruptions=["fog", "snow"]).size
        (432, 166)
    """
    if not corruptions or not severities:
        raise OptionError("A sheet shows at least one corruption and one severity; found none.")
    images = image[None] if isinstance(image, np.ndarray) else image
    check_images(images)
    if "frost" in corruptions and not isinstance(textures, tuple):
        textures = load_textures(textures)  # once, rather than for every severity

    def spoilt(name: str, severity: int) -> Pixels:
        made = corrupt(images, name, severity, seed, start=index, table=table, textures=textures)
        return np.asarray(made[0])

    if len(severities) == 1:
        cells = [("clean", image), *((name, spoilt(name, severities[0])) for name in corruptions)]
        return _draw(cells, min(_COLUMNS, len(cells)))
    cells = []
    for name in corruptions:
        cells.append((name, image))
        cells.extend((f"severity {each}", spoilt(name, each)) for each in severities)
    return _draw(cells, 1 + len(severities))


def _draw(cells: Sequence[Captioned], columns: int) -> Image.Image:
    height, width = cells[0][1].shape[:2]
    factor = max(1, _CELL // min(height, width))
    across, down = width * factor + _GAP, height * factor + _TEXT + _GAP
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * across + _GAP, rows * down + _GAP), _PAPER)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(_TEXT)
    for place, (caption, pixels) in enumerate(cells):
        left, top = _GAP + place % columns * across, _GAP + place // columns * down
        words = caption.replace("_", " ")
        while pen.textlength(words, font) > width * factor:
            words = words[:-1]
        pen.text((left, top - _GAP // 2), words, _INK, font)
        large = Image.fromarray(pixels).resize(
            (width * factor, height * factor), Image.Resampling.NEAREST
        )
        sheet.paste(large, (left, top + _TEXT))
    return sheet
