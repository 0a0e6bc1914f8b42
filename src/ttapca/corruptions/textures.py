"""The photographs of frost, read from a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from ttapca.corruptions.pixels import Pixels
from ttapca.errors import DataFormatError, DataNotFoundError

TEXTURE_FILES = (
    "frost1.png",
    "frost2.png",
    "frost3.png",
    "frost4.jpg",
    "frost5.jpg",
    "frost6.jpg",
)
_MAX_PIXELS = 50_000_000  # a picture of more takes a gigabyte while it is decoded
_REMEDY = (
    "`ttapca data get frost` fetches them; `ttapca.datasets.fetch_frost(root)` does so from Python "
    "and returns the folder to pass as `textures=`."
)


def load_textures(folder: str | Path | None) -> tuple[Pixels, ...]:
    """Read the six photographs.

    Args:
        folder: Where they lie; None when the caller named no folder.

    Returns:
        RGB images, (height, width, 3) each, in the published order.

    Raises:
        DataNotFoundError: No folder was named, or a photograph is missing. The message says how to
            get them.
        DataFormatError: A photograph cannot be read.
    """
    if folder is None:
        raise DataNotFoundError(
            f"Frost needs photographs, and no folder of them was given. {_REMEDY}"
        )
    folder = Path(folder)
    missing = [name for name in TEXTURE_FILES if not (folder / name).is_file()]
    if missing:
        raise DataNotFoundError(
            f"Frost needs {len(TEXTURE_FILES)} photographs; {folder} lacks {', '.join(missing)}. "
            f"{_REMEDY}"
        )
    return tuple(_read(folder / name) for name in TEXTURE_FILES)


def _read(path: Path) -> Pixels:
    try:
        with path.open("rb") as file, Image.open(file, formats=("PNG", "JPEG")) as opened:
            if opened.width * opened.height > _MAX_PIXELS:
                raise DataFormatError(f"it has more than {_MAX_PIXELS:,} pixels")
            return np.asarray(opened.convert("RGB"))
    except Exception as error:  # Pillow's readers fail in many ways
        raise DataFormatError(
            f"Frost's photographs must be readable images; {path} is not: {error}. Delete it. "
            f"{_REMEDY}"
        ) from error
