"""Labelled images: fetch them, verify them, read them from any layout.

`load` takes a name or a path and finds out the layout; each `read_...` function knows one layout.
`open_shards` finds images in many files, `choose` says which images to use, `fetch` gets a data set
into a folder, and `inventory` lists the folder. Nothing here prints or reads the environment.

Every reader raises `DataNotFoundError` for something that is missing, `DataFormatError` or
`ShapeError` for a damaged file, which it names, and `OptionError` for an argument that cannot be.
"""

from ttapca.datasets.cifar import corruptions_in as corruptions_in
from ttapca.datasets.cifar import read_cifar_binary as read_cifar_binary
from ttapca.datasets.cifar import read_cifar_c as read_cifar_c
from ttapca.datasets.cifar import read_cifar_python as read_cifar_python
from ttapca.datasets.cifar import write_cifar_binary as write_cifar_binary
from ttapca.datasets.fetching import Fetched as Fetched
from ttapca.datasets.fetching import Holding as Holding
from ttapca.datasets.fetching import fetch as fetch
from ttapca.datasets.fetching import inventory as inventory
from ttapca.datasets.images import Choice as Choice
from ttapca.datasets.images import Images as Images
from ttapca.datasets.images import Order as Order
from ttapca.datasets.images import Series as Series
from ttapca.datasets.images import TensorBatches as TensorBatches
from ttapca.datasets.images import choose as choose
from ttapca.datasets.images import to_tensor as to_tensor
from ttapca.datasets.layouts import CIFAR10_500 as CIFAR10_500
from ttapca.datasets.layouts import DIGITS as DIGITS
from ttapca.datasets.layouts import load as load
from ttapca.datasets.layouts import read_cifar10_500 as read_cifar10_500
from ttapca.datasets.layouts import read_digits as read_digits
from ttapca.datasets.layouts import read_npz as read_npz
from ttapca.datasets.pictures import read_image_folder as read_image_folder
from ttapca.datasets.reading import Split as Split
from ttapca.datasets.shards import Shard as Shard
from ttapca.datasets.shards import Shards as Shards
from ttapca.datasets.shards import is_sharded as is_sharded
from ttapca.datasets.shards import open_shards as open_shards
from ttapca.datasets.sources import DATA_SETS as DATA_SETS
from ttapca.datasets.sources import FROST as FROST
from ttapca.datasets.sources import DataSet as DataSet
from ttapca.datasets.sources import fetch_frost as fetch_frost
from ttapca.datasets.sources import find_data_set as find_data_set
from ttapca.datasets.sources import has_frost as has_frost
