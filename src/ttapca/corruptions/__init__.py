"""The nineteen corruptions of CIFAR-10-C and CIFAR-100-C, at five severities, with a seed.

- `noise`, `blur`, `weather` and `digital`, the four groups of the paper, hold functions of images,
  random numbers and parameters; `pixels` holds what they share, the random numbers included;
- `catalogue` lists them and reads the strength of each from a table, `cifar_c.toml`;
- `apply` corrupts images and draws a contact sheet; `writing` writes whole data sets.

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
