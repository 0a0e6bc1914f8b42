"""Packages that import names when these are first used; a stub, `__init__.pyi`, lists them."""

from __future__ import annotations

import ast
from pathlib import Path


def exports_of(package: Path) -> dict[str, str]:
    """Return the module of each name that the stub beside this `__init__.py` imports."""
    stub = ast.parse(package.with_suffix(".pyi").read_text("utf-8"))
    imports = (each for each in stub.body if isinstance(each, ast.ImportFrom))
    return {alias.name: str(each.module) for each in imports for alias in each.names}
