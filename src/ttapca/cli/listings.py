"""`ttapca layers` and `ttapca methods`: list the places for a filter, and the methods."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from ttapca import networks
from ttapca.cli import arguments
from ttapca.cli.console import plain_table, print_json
from ttapca.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from torch import nn

NEEDS = {"model": "the model", "data": "source data, unlabelled", "training": "its own training"}
SHOWN = ("name", "summary", "paper", "url")
INDENT = "    "
WIDEST = 100  # characters; longer lines are hard to read
TABLE_WIDTH = 140  # if the output is no terminal


def layers(
    options: arguments.ModelOptions,
    input_shape: arguments.InputShape = None,
    components: Annotated[int | None, Option(min=1)] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """List the layers of a network, what a filter costs at each, and which to choose."""
    from ttapca.networks.network import CIFAR_SHAPE

    source = options.source()
    if source.name in networks.ARCHITECTURES and source.name not in networks.packaged():
        source.refuse("weights", "architecture")
        network: nn.Module = networks.build(source.name)
    else:  # the normalisation makes no difference here, and not every file states it
        network = source.load(assumed="none", doubt=False)
    shape = arguments.input_shape(input_shape, network) or CIFAR_SHAPE
    try:
        table = networks.describe_layers(network, shape, components)
    except ShapeError as error:  # the shape is an option here
        raise OptionError(f"{error} Name it with --input CxHxW.") from error
    if as_json:
        print_json(dataclasses.asdict(table))
    else:
        _print(table, shape)


def _print(table: networks.LayerTable, shape: tuple[int, ...]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    costs = ("output", "p", "folds", "components", "filter [MB]", "cost [%]")
    grid = plain_table("layer", "kind", *(f">{heading}" for heading in costs))
    for layer in table.layers:
        style = "bold" if layer.name == table.recommended else None
        grid.add_row(*_row(layer), style=style)
    console.print(grid)
    recommended = f"Recommended: {table.recommended}"
    if table.recommended is None:
        recommended = "No layer returns one tensor per forward pass, so none can carry a filter."
    console.print(
        f"\n{table.parameters:,} parameters, {table.multiply_adds / 1e6:,.1f} million "
        f"multiply-adds for an image of {'x'.join(map(str, shape))}. The cost of a filter is "
        f"relative to that.\n{recommended}"
    )
    if table.advice:
        console.print(table.advice)


def _row(layer: networks.LayerFacts) -> list[str]:
    shape = "x".join(map(str, layer.output_shape))
    row = [layer.name, layer.kind, shape, f"{layer.outputs:,}"]
    if layer.calls != 1:
        return [*row, f"called {layer.calls} times"]
    cost = math.nan if layer.relative_cost is None else 100 * layer.relative_cost
    row += ["yes" if layer.folds else "no", f"{layer.components:,}"]
    return [*row, f"{layer.filter_bytes / 1e6:,.1f}", f"{cost:,.1f}"]


def methods(as_json: arguments.AsJson = False) -> None:
    """List the methods, what each does, what it needs and which options it has."""
    from ttapca.methods import METHODS

    rows: list[dict[str, Any]] = []
    for each in METHODS.values():
        row: dict[str, Any] = {name: getattr(each, name) for name in SHOWN}
        row |= {"needs": NEEDS[each.needs], "outputs": list(each.method.outputs)}
        options = each.options.items()
        row["options"] = {k: list(v) if isinstance(v, tuple) else v for k, v in options}
        rows.append(row)
    if as_json:
        print_json(rows)
        return
    width = min(Console().width, WIDEST)
    form: dict[str, Any] = {"initial_indent": INDENT, "subsequent_indent": INDENT * 2}
    form |= {"break_long_words": False, "break_on_hyphens": False}
    for row in rows:
        typer.secho(row["name"], bold=True)
        given = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        lines = (
            row["summary"],
            f"{row['paper']} {row['url']}".strip(),
            f"needs: {row['needs']}",
            f"outputs: {', '.join(row['outputs'])}",
            f"options: {given}" if given else "",
        )
        for text in filter(None, lines):
            typer.echo(textwrap.fill(text, width, **form))
