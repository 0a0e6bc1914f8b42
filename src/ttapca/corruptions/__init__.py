"""The nineteen corruptions of CIFAR-C and ImageNet-C, at five severities, with a seed.

- `noise`, `blur`, `weather` and `digital`, the four groups of the paper, hold functions of images,
  their random numbers from (0, 1) and parameters by name; `pixels` holds random numbers, smoothing
  and enlarging for all;
- `catalogue` lists them and reads the strength of each from a table, `cifar_c.toml` or
  `imagenet_c.toml`;
- `apply` corrupts images; `writing` writes whole data sets.

Nothing here prints, reads the environment or knows of adaptation.
"""

from ttapca.corruptions.apply import check_images, corrupt, corrupt_any_size
from ttapca.corruptions.catalogue import (
    CIFAR_C,
    CORRUPTIONS,
    EXTRA,
    IMAGENET_C,
    SEVERITIES,
    STANDARD,
    Corruption,
    SeverityTable,
    default_table,
    find,
    load_table,
)
from ttapca.corruptions.weather import TEXTURE_FILES, load_textures

__all__ = [
    "CIFAR_C",
    "CORRUPTIONS",
    "EXTRA",
    "IMAGENET_C",
    "SEVERITIES",
    "STANDARD",
    "TEXTURE_FILES",
    "Corruption",
    "SeverityTable",
    "check_images",
    "corrupt",
    "corrupt_any_size",
    "default_table",
    "find",
    "load_table",
    "load_textures",
]
