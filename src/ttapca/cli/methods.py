"""`ttapca methods`: what can be put on a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

NEEDS = {"model": "the model", "data": "source data, unlabelled", "training": "its own training"}


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods, what each does, what it needs and which options it has."""
    from ttapca.recipes import RECIPES, own_options

    rows = [
        {
            "name": name,
            "summary": recipe.summary,
            "needs": NEEDS[recipe.source],
            "options": own_options(name),
        }
        for name, recipe in RECIPES.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table()
    table.add_column("method", no_wrap=True)
    for heading in ("what it does, and its options", "needs"):
        table.add_column(heading)
    for row in rows:
        options = f"\n[dim]{', '.join(row['options'])}[/dim]" if row["options"] else ""
        table.add_row(str(row["name"]), f"{row['summary']}{options}", str(row["needs"]))
    Console().print(table)
