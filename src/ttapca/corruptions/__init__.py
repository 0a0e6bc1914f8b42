"""Nineteen ways in which an image goes wrong, at five severities, with a seed.

They are the corruptions of CIFAR-10-C and CIFAR-100-C: `corrupt` turns clean images into those that
the benchmark holds. Four things are kept apart:

- *what happens to an image*: `noise`, `blur`, `weather`, `spatter`, `digital`; pure functions of
  images, random numbers and parameters;
- *how strong it is*: a table, `cifar_c.toml`, which is data;
- *which random numbers an image gets*: `streams`; they belong to the image's index, not to a batch;
- *photographs of frost*: `textures` reads them; `ttapca.datasets.fetch_frost` gets them.

Nothing here prints, reads the environment or knows of adaptation.
"""

from ttapca.corruptions.apply import SMALLEST_SIDE, check_images, corrupt
from ttapca.corruptions.registry import CORRUPTIONS, EXTRA, STANDARD, Corruption, find
from ttapca.corruptions.table import CIFAR_C, SEVERITIES, Table, load_table
from ttapca.corruptions.textures import TEXTURE_FILES, load_textures

__all__ = [
    "CIFAR_C",
    "CORRUPTIONS",
    "EXTRA",
    "SEVERITIES",
    "SMALLEST_SIDE",
    "STANDARD",
    "TEXTURE_FILES",
    "Corruption",
    "Table",
    "check_images",
    "corrupt",
    "find",
    "load_table",
    "load_textures",
]
