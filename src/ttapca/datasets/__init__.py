"""Labelled images: fetch them, verify them, read them from any layout.

    from pathlib import Path
    from ttapca.datasets import TensorBatches, load

    test = load("cifar10", root=Path("~/.cache/ttapca").expanduser())   # an `Images`
    for pixels, labels in TensorBatches(test, 200):                     # tensors in [0, 1]
        ...

`load` takes a name or a path and finds out the layout; the `read_...` functions each know one.
`choose` says which of them to use, and in which order: a folder of pictures lies class by class.
`fetch` gets a data set into a folder, from the first source that delivers, and `inventory` says
what is in it. Nothing here prints or reads the environment: progress goes to a `Reporter`, and the
folder is passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttapca.datasets.catalog import DATA_SETS, find_data_set
from ttapca.datasets.choice import Choice, Order, choose
from ttapca.datasets.cifar import read_cifar_binary, write_cifar_binary
from ttapca.datasets.cifar_c import corruptions_in, read_cifar_c
from ttapca.datasets.cifar_python import read_cifar_python
from ttapca.datasets.digits import read_digits
from ttapca.datasets.fetching import Fetched, fetch
from ttapca.datasets.files import read_image_folder, read_npz
from ttapca.datasets.frost import fetch_frost
from ttapca.datasets.images import Images
from ttapca.datasets.inventory import Holding, inventory
from ttapca.datasets.loading import load
from ttapca.datasets.progress import Reporter, Silent
from ttapca.datasets.reading import Split
from ttapca.datasets.sources import DataSet

if TYPE_CHECKING:
    from ttapca.datasets.tensors import TensorBatches, to_tensor

__all__ = [
    "DATA_SETS",
    "Choice",
    "DataSet",
    "Fetched",
    "Holding",
    "Images",
    "Order",
    "Reporter",
    "Silent",
    "Split",
    "TensorBatches",
    "choose",
    "corruptions_in",
    "fetch",
    "fetch_frost",
    "find_data_set",
    "inventory",
    "load",
    "read_cifar_binary",
    "read_cifar_c",
    "read_cifar_python",
    "read_digits",
    "read_image_folder",
    "read_npz",
    "to_tensor",
    "write_cifar_binary",
]


def __getattr__(name: str) -> Any:
    # The only part that needs torch, which takes seconds to import: fetching and listing do not.
    if name in {"TensorBatches", "to_tensor"}:
        from ttapca.datasets import tensors

        return getattr(tensors, name)
    raise AttributeError(f"module `ttapca.datasets` has no `{name}`")
