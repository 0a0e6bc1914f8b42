"""Labelled images: fetch them, verify them, read them from any layout.

    from pathlib import Path
    from ttapca.datasets import TensorBatches, load

    test = load("cifar10", root=Path("~/.cache/ttapca").expanduser())   # an `Images`
    for pixels, labels in TensorBatches(test, 200):                     # tensors in [0, 1]
        ...

`load` takes a name or a path and finds out the layout; each `read_...` function knows one layout.
`open_shards` finds images in many files, which are read one after the other or by many processes.
`choose` says which images to use, and in which order. `fetch` gets a data set into a folder, from
the first source that delivers it, and `inventory` says what is in the folder. Nothing here prints
or reads the environment: progress goes to a `Reporter`, and the folder is an argument.

Every reader raises `DataNotFoundError` for something that is missing, `DataFormatError` or
`ShapeError` for a damaged file, which it names, and `OptionError` for an argument that cannot be.
"""

from ttapca.datasets.catalog import DATA_SETS, DataSet, find_data_set
from ttapca.datasets.cifar import (
    corruptions_in,
    read_cifar_binary,
    read_cifar_c,
    read_cifar_python,
    write_cifar_binary,
)
from ttapca.datasets.fetching import Fetched, Holding, fetch, inventory
from ttapca.datasets.images import Choice, Images, Order, TensorBatches, choose, to_tensor
from ttapca.datasets.layouts import (
    CIFAR10_500,
    DIGITS,
    load,
    read_cifar10_500,
    read_digits,
    read_npz,
)
from ttapca.datasets.pictures import read_image_folder
from ttapca.datasets.reading import Split
from ttapca.datasets.shards import Shard, Shards, is_sharded, open_shards
from ttapca.datasets.sources import FROST, fetch_frost, has_frost
from ttapca.support.progress import Reporter, Silent

__all__ = [
    "CIFAR10_500",
    "DATA_SETS",
    "DIGITS",
    "FROST",
    "Choice",
    "DataSet",
    "Fetched",
    "Holding",
    "Images",
    "Order",
    "Reporter",
    "Shard",
    "Shards",
    "Silent",
    "Split",
    "TensorBatches",
    "choose",
    "corruptions_in",
    "fetch",
    "fetch_frost",
    "find_data_set",
    "has_frost",
    "inventory",
    "is_sharded",
    "load",
    "open_shards",
    "read_cifar10_500",
    "read_cifar_binary",
    "read_cifar_c",
    "read_cifar_python",
    "read_digits",
    "read_image_folder",
    "read_npz",
    "to_tensor",
    "write_cifar_binary",
]
