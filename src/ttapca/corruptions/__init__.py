"""Nineteen ways in which an image goes wrong, at five severities, with a seed.

They are the corruptions of CIFAR-10-C and CIFAR-100-C: `corrupt` turns clean images into those that
the benchmark holds. Four things are kept apart:

- *what happens to an image*: `noise`, `blur`, `weather`, `digital`, the four groups of the paper;
  pure functions of images, random numbers and parameters;
- *how strong it is*: a table, `cifar_c.toml`, which is data; `catalogue` reads it;
- *which random numbers an image gets*: `random_streams`; they belong to the image's index;
- *whole data sets*: `writing` fills a folder in the layout of CIFAR-C, `sheet` draws one image.

Nothing here prints, reads the environment or knows of adaptation.
"""

from ttapca.corruptions.apply import SMALLEST_SIDE, check_images, corrupt
from ttapca.corruptions.catalogue import (
    CIFAR_C,
    CORRUPTIONS,
    EXTRA,
    SEVERITIES,
    STANDARD,
    Corruption,
    SeverityTable,
    find,
    load_table,
)
from ttapca.corruptions.weather import TEXTURE_FILES, load_textures

__all__ = [
    "CIFAR_C",
    "CORRUPTIONS",
    "EXTRA",
    "SEVERITIES",
    "SMALLEST_SIDE",
    "STANDARD",
    "TEXTURE_FILES",
    "Corruption",
    "SeverityTable",
    "check_images",
    "corrupt",
    "find",
    "load_table",
    "load_textures",
]
