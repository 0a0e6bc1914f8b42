"""Write what is made of the registered methods: the table in docs/methods.md, and their types.

    python scripts/write_methods.py

The types are for editors and type checkers, in `src/ttapca/methods/__init__.pyi`: the package
imports its modules by itself. A test fails when one of both is out of date.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttapca.methods import METHODS, Method
from ttapca.methods.method import GradientMethod, Registration

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
TYPES = Path(__file__).parents[1] / "src" / "ttapca" / "methods" / "__init__.pyi"
BEGIN, END = "<!-- methods: written by scripts/write_methods.py -->", "<!-- end of methods -->"
NEEDS = {
    "model": "the model",
    "data": "unlabelled source data",
    "training": "a training of its own",
}
# What methods with gradient steps have in common, as the text above the table says.
SHARED = {each.name: each.default for each in dataclasses.fields(GradientMethod)}


def types() -> str:
    """The stub file of `ttapca.methods`."""
    classes = {each.method.__name__: each.method.__module__ for each in METHODS.values()}
    classes |= dict.fromkeys(("METHODS", "Method", "Mixture"), Method.__module__)
    # Names in capitals first, as ruff sorts imports.
    found = sorted(((home, name) for name, home in classes.items()), key=in_order)
    lines = [
        '"""Types of `ttapca.methods`; written by scripts/write_methods.py."""',
        "",
        "from typing import Literal",
        "",
        *(f"from {home} import {name} as {name}" for home, name in found),
        "",
        "MethodName = Literal[",
        *(f'    "{name}",' for name in METHODS),
        "]",
    ]
    return "\n".join(lines) + "\n"


def in_order(found: tuple[str, str]) -> tuple[str, bool, str]:
    """Return what a class is sorted by."""
    home, name = found
    return home, not name.isupper(), name


def with_table(page: str) -> str:
    """The page with the table as it must be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def table() -> str:
    """One row for each method, in the order of `ttapca methods`."""
    lines = [
        "| name | class | what it does | paper | needs | options |",
        "|---|---|---|---|---|---|",
    ]
    for each in METHODS.values():
        cells = (
            f"`{each.name}`",
            f"`{each.method.__name__}`",
            each.summary,
            each.paper or "-",
            NEEDS[each.needs],
            shown_options(each) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown_options(method: Registration) -> str:
    """Options with their defaults, but for those that a reader knows from elsewhere.

    All methods with gradient steps have some in common, and a relative has those of the method it
    comes from.
    """
    known = SHARED if issubclass(method.method, GradientMethod) else {}
    root = origin(method)
    options = ", ".join(
        f"`{name}`" if default is None else f"`{name}={shown(default)}`"
        for name, default in method.options.items()
        if not _is_known(name, default, known if root is None else root.options)
    )
    if root is None:
        return options
    return f"those of `{root.name}`" + (f", with {options}" if options else "")


def origin(method: Registration) -> Registration | None:
    """The first method before it whose class and options it shares, if there is one."""
    for other in METHODS.values():
        if other is method:
            return None
        if issubclass(method.method, other.method) and {*other.options} <= {*method.options}:
            return other
    return None


def _is_known(name: str, default: Any, known: Mapping[str, Any]) -> bool:
    return name in known and default == known[name]


def shown(value: Any) -> str:
    """A default as a reader types it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    TYPES.write_text(types())
