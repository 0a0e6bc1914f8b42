"""Labelled images: fetch them, verify them, read them from any layout.

`load` takes a name or a path and finds out the layout; each `read_...` function knows one layout.
`open_shards` finds images in many files, `choose` says which images to use, `fetch` gets a data set
into a folder, and `inventory` lists the folder. Nothing here prints or reads the environment.

Every reader raises `DataNotFoundError` for something that is missing, `DataFormatError` or
`ShapeError` for a damaged file, which it names, and `OptionError` for an argument that cannot be.
"""

from ttapca.datasets.cifar import (
    corruptions_in,
    read_cifar_binary,
    read_cifar_c,
    read_cifar_python,
    write_cifar_binary,
)
from ttapca.datasets.fetching import Fetched, Holding, fetch, inventory
from ttapca.datasets.images import Choice, Images, Order, Series, TensorBatches, choose, to_tensor
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
from ttapca.datasets.sources import DATA_SETS, FROST, DataSet, fetch_frost, find_data_set, has_frost

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
    "Series",
    "Shard",
    "Shards",
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
