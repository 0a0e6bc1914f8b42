"""`ttapca methods`: list the methods that can be put on a model."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import typer
from rich.console import Console

from ttapca.cli.arguments import AsJson

NEEDS = {"model": "the model", "data": "source data, unlabelled", "training": "its own training"}
INDENT = "    "
WIDEST = 100  # characters; longer lines are hard to read


def methods(as_json: AsJson = False) -> None:
    """List the methods, what each does, what it needs and which options it has."""
    from ttapca.methods import METHODS

    if as_json:
        rows = [
            {
                "name": each.name,
                "summary": each.summary,
                "paper": each.paper,
                "needs": NEEDS[each.needs],
                "options": {name: _plain(value) for name, value in each.options.items()},
            }
            for each in METHODS.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = min(Console().width, WIDEST)
    for each in METHODS.values():
        typer.secho(each.name, bold=True)
        options = ", ".join(f"{name}={_plain(value)}" for name, value in each.options.items())
        lines = [each.summary, each.paper, f"needs: {NEEDS[each.needs]}", f"options: {options}"]
        for text in lines:
            if text not in ("", "options: "):
                typer.echo(_indented(text, width))


def _plain(value: Any) -> Any:
    """Return a default as JSON can hold it; None means that the method decides."""
    return list(value) if isinstance(value, tuple) else value


def _indented(text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=INDENT,
        subsequent_indent=INDENT * 2,
        break_long_words=False,
        break_on_hyphens=False,
    )
