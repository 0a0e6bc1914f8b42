"""Labelled images: fetch them, verify them, read them from any layout.

    from pathlib import Path
    from ttapca.data import TensorBatches, load

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

from ttapca.data.catalog import DATA_SETS, find_data_set
from ttapca.data.choice import Choice, Order, choose
from ttapca.data.cifar import read_cifar_binary, write_cifar_binary
from ttapca.data.cifar_c import corruptions_in, read_cifar_c
from ttapca.data.cifar_python import read_cifar_python
from ttapca.data.digits import read_digits
from ttapca.data.fetching import Fetched, fetch
from ttapca.data.files import read_image_folder, read_npz
from ttapca.data.frost import fetch_frost
from ttapca.data.holdings import Holding, inventory
from ttapca.data.images import Images
from ttapca.data.loading import load
from ttapca.data.progress import Reporter, Silent
from ttapca.data.reading import Split
from ttapca.data.sources import DataSet

if TYPE_CHECKING:
    from ttapca.data.tensors import TensorBatches, to_tensor

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
        from ttapca.data import tensors

        return getattr(tensors, name)
    raise AttributeError(f"module `ttapca.data` has no `{name}`")
