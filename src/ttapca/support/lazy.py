"""Packages that import names when these are first used; a stub, `__init__.pyi`, lists them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, *others: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, which has `others` itself."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8"))
    imports = (each for each in stub.body if isinstance(each, ast.ImportFrom))
    homes = {alias.name: str(each.module) for each in imports for alias in each.names}
    every = [*others, *homes]

    def get(name: str) -> Any:
        """Import a public name or a module of the package."""
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module `{package}` has no attribute `{name}`") from None

    return every, get, lambda: sorted(every)
