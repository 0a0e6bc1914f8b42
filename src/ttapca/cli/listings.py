"""`ttapca layers` and `ttapca methods`: list the places for a filter, and the methods."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console
from typer import Option

from ttapca.benchmark import paper
from ttapca.cli import arguments
from ttapca.cli.console import plain_table, print_json
from ttapca.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from torch import nn

    from ttapca.fitting.plan import FitPlan
    from ttapca.networks import LayerFacts, LayerTable

NEEDS = {"model": "the model", "data": "source data, unlabelled", "training": "its own training"}
INDENT = "    "
WIDEST = 100  # characters; longer lines are hard to read
FITTED_IMAGES = 10_000
TABLE_WIDTH = 140  # if the output is no terminal
COMPONENTS = "Components of the filter whose cost is shown (default: 2,000; all cosines)."


def layers(
    options: arguments.ModelOptions,
    input_shape: arguments.InputShape = None,
    components: Annotated[int | None, Option(min=1, help=COMPONENTS)] = None,
    images: Annotated[
        int, Option(min=32, help="Images of the fit whose route and memory are shown.")
    ] = FITTED_IMAGES,
    route: arguments.RouteOption = "auto",
    as_json: arguments.AsJson = False,
) -> None:
    """List the layers of a network, what a filter and its fit cost at each, and which to choose.

    MODEL may also be an architecture without weights, such as wrn-28-10.
    """
    from ttapca import networks
    from ttapca.networks.network import CIFAR_SHAPE

    source = options.source()
    if source.name in networks.ARCHITECTURES and source.name not in networks.packaged():
        source.refuse("weights", "architecture")
        network: nn.Module = networks.build(source.name)
    else:  # the normalisation makes no difference here, and not every file states it
        network = source.load(assumed="none", doubt=False)
    shape = arguments.input_shape(input_shape, network) or CIFAR_SHAPE
    if components is None and route not in ("auto", "dct"):
        components = paper.COMPONENTS
    try:
        table = networks.describe_layers(network, shape, components)
    except ShapeError as error:  # the shape is an option here
        raise OptionError(f"{error} Name it with --input CxHxW.") from error
    plans = _planned_fits(network, shape, table, components, images, route)
    if as_json:
        facts = dataclasses.asdict(table)
        for layer in facts["layers"]:
            plan = plans[layer["name"]]
            layer["fit"] = None if plan is None else dataclasses.asdict(plan)
        print_json(facts | {"images": images})
    else:
        _print(table, shape, plans, images)


def _print(
    table: LayerTable, shape: tuple[int, ...], plans: dict[str, FitPlan | None], images: int
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    costs = ("output", "p", "folds", "components", "filter [MB]", "cost [%]", "route", "[GB]")
    grid = plain_table("layer", "kind", *(f">{heading}" for heading in costs))
    for layer in table.layers:
        style = "bold" if layer.name == table.recommended else None
        grid.add_row(*_row(layer, plans[layer.name]), style=style)
    console.print(grid)
    recommended = f"Recommended: {table.recommended}"
    if table.recommended is None:
        recommended = "No layer returns one tensor per forward pass, so none can carry a filter."
    console.print(
        f"\n{table.parameters:,} parameters, {table.multiply_adds / 1e6:,.1f} million "
        f"multiply-adds for an image of {'x'.join(map(str, shape))}. The cost of a filter is "
        "relative to that.\n"
        f"Route and memory are those of a fit of {images:,} images; a layer without any needs more "
        f"memory than there is.\n{recommended}"
    )
    if table.advice:
        console.print(table.advice)


def _row(layer: LayerFacts, plan: FitPlan | None) -> list[str]:
    shape = "x".join(map(str, layer.output_shape))
    row = [layer.name, layer.kind, shape, f"{layer.outputs:,}"]
    if layer.calls != 1:
        return [*row, f"called {layer.calls} times"]
    cost = math.nan if layer.relative_cost is None else 100 * layer.relative_cost
    row += ["yes" if layer.folds else "no", f"{layer.components:,}"]
    row += [f"{layer.filter_bytes / 1e6:,.1f}", f"{cost:,.1f}"]
    return row if plan is None else [*row, plan.route, f"{plan.memory_bytes / 1e9:.1f}"]


def _planned_fits(
    network: nn.Module,
    shape: tuple[int, ...],
    table: LayerTable,
    components: int | None,
    images: int,
    route: str | None,
) -> dict[str, FitPlan | None]:
    """Return the plan of a fit at each layer; None if it needs more memory than there is."""
    import torch

    from ttapca._checks import OneOf, check_option
    from ttapca.errors import OutOfMemoryError
    from ttapca.fitting.channel_statistics import found_logits
    from ttapca.fitting.plan import Problem, RouteChoice, plan_of
    from ttapca.spectral.basis_choice import cosines_serve
    from ttapca.spectral.cosine_transform import has_cosines
    from ttapca.support.modules import device_and_dtype, evaluation_mode

    check_option("route", route, OneOf(get_args(RouteChoice)))
    device, dtype = device_and_dtype(network, network)
    with torch.no_grad(), evaluation_mode(network):
        logits = found_logits(network(torch.zeros(2, *shape, device=device, dtype=dtype)))
    plans: dict[str, FitPlan | None] = dict.fromkeys(layer.name for layer in table.layers)
    for layer in table.layers:
        filtered = layer.input_shape if layer.folds else layer.output_shape
        all_cosines = components is None and cosines_serve(filtered or (), shape)
        problem = Problem(
            layer.input_shape,
            layer.output_shape,
            layer.folds,
            None if all_cosines else min(layer.components, images - 1),
            images,
            classes=0 if logits is None else logits.shape[1],
            data_shape=shape,
        )
        impossible = route == "folded" and not problem.folds
        impossible |= route == "dct" and not has_cosines(problem.filtered_shape)
        if not impossible:
            with suppress(OutOfMemoryError):
                plans[layer.name] = plan_of(problem, cast("RouteChoice", route))
    return plans


def methods(as_json: arguments.AsJson = False) -> None:
    """List the methods, what each does, what it needs and which options it has."""
    from ttapca.methods import METHODS

    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "summary": each.summary,
            "paper": each.paper,
            "url": each.url,
            "needs": NEEDS[each.needs],
            "outputs": list(each.method.outputs),
            "options": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in each.options.items()
            },
        }
        for each in METHODS.values()
    ]
    if as_json:
        print_json(rows)
        return
    wrapper = textwrap.TextWrapper(
        min(Console().width, WIDEST),
        initial_indent=INDENT,
        subsequent_indent=INDENT * 2,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for row in rows:
        typer.secho(row["name"], bold=True)
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        lines = (
            row["summary"],
            f"{row['paper']} {row['url']}".strip(),
            f"needs: {row['needs']}",
            f"outputs: {', '.join(row['outputs'])}",
            f"options: {options}" if options else "",
        )
        for text in filter(None, lines):
            typer.echo(wrapper.fill(text))
