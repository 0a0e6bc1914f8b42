"""The nineteen corruptions of CIFAR-C and ImageNet-C, at five severities, with a seed.

- `noise`, `blur`, `weather` and `digital`, the four groups of the paper, hold functions of images,
  their random numbers from (0, 1) and parameters by name; `pixels` holds random numbers, smoothing
  and enlarging for all;
- `catalogue` lists them and reads the strength of each from a table, `cifar_c.toml` or
  `imagenet_c.toml`;
- `apply` corrupts images; `writing` writes whole data sets.

Nothing here prints, reads the environment or knows of adaptation.
"""

from ttapca.support.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
