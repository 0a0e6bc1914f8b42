"""`ttapca methods`: what can be put on a model."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer
from rich.console import Console

NEEDS = {"model": "the model", "data": "source data, unlabelled", "training": "its own training"}
INDENT = "    "
WIDEST = 100  # letters: longer lines are hard to read on a wide screen too


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods, what each does, what it needs and which options it has."""
    from ttapca.methods.registry import RECIPES, own_options

    if as_json:
        rows = [
            {
                "name": name,
                "summary": recipe.summary,
                "needs": NEEDS[recipe.source],
                "options": own_options(name),
            }
            for name, recipe in RECIPES.items()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = min(Console().width, WIDEST)
    for name, recipe in RECIPES.items():
        typer.secho(name, bold=True)
        options = ", ".join(own_options(name))
        for text in (recipe.summary, f"needs: {NEEDS[recipe.source]}", f"options: {options}"):
            if text != "options: ":
                typer.echo(_indented(text, width))


def _indented(text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=INDENT,
        subsequent_indent=INDENT * 2,
        break_long_words=False,
        break_on_hyphens=False,
    )
