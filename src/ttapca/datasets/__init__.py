"""Labelled images: fetch them, verify them, read them from any layout.

`load` takes a name or a path and finds out the layout; each `read_...` function knows one layout.
`open_shards` finds images in many files, `choose` says which images to use, `fetch` gets a data set
into a folder, and `inventory` lists the folder. Nothing here prints or reads the environment.

Every reader raises `DataNotFoundError` for something that is missing, `DataFormatError` or
`ShapeError` for a damaged file, which it names, and `OptionError` for an argument that cannot be.
"""

from ttapca.support.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
