"""Methods of the literature and of this library, one file per method.

A method is a typed, frozen dataclass that registers itself (see `ttapca.methods.method`). All
modules of this package are imported here, so that a new method is one new file. Their types, for
editors and type checkers, are in `__init__.pyi`, which scripts/write_methods.py writes.
"""

import importlib
import pkgutil
from typing import Literal

from ttapca.methods.method import METHODS, Method, Mixture

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
for _name in sorted(METHODS, key=lambda name: METHODS[name].year):
    METHODS[_name] = METHODS.pop(_name)

_classes = {each.method.__name__: each.method for each in METHODS.values()}
globals().update(_classes)

MethodName = Literal[tuple(METHODS)]

__all__ = ["METHODS", "Method", "MethodName", "Mixture", *_classes]
