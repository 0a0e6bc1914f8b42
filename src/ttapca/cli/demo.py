"""`ttapca demo`: the whole idea on real data, in seconds and without a download."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ttapca.cli.reporting import StepReporter

if TYPE_CHECKING:
    from ttapca.cli.digits import Outcome


def demo(
    seed: Annotated[int, typer.Option(help="Of the training and the noise.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 30,
) -> None:
    """Train a small network on handwritten digits, corrupt the test digits, and repair it."""
    out, log = Console(), Console(stderr=True)
    start = time.perf_counter()

    from ttapca.cli import digits  # torch takes seconds to import: only who needs it waits
    from ttapca.models.digits_network import training_steps

    with StepReporter("training a network on digits", training_steps(epochs), console=log) as bar:
        outcome = digits.run(seed, epochs, bar)
    out.print(_table(outcome))
    out.print(
        f"{outcome.test_images} test digits, batches of {digits.BATCH}, seed {seed}. The filter "
        f"sits after `conv1`: {outcome.fitted.n_components_} components of "
        f"{len(outcome.fitted.mean_)} outputs hold "
        f"{100 * float(outcome.fitted.explained_variance_ratio_.sum()):.1f} % of the variance.",
        highlight=False,
    )
    log.print(f"done in {time.perf_counter() - start:.1f} s", style="dim", highlight=False)


def _table(outcome: Outcome) -> Table:
    table = Table(title="Classification error [%]", title_justify="left")
    for heading in ("setting", "method"):
        table.add_column(heading)
    for heading in (*outcome.conditions, "mean of corrupted"):
        table.add_column(heading, justify="right")
    for setting, rows in outcome.errors.items():
        full = {
            method: [*errors, sum(errors[1:]) / len(errors[1:])] for method, errors in rows.items()
        }
        best = [min(column) for column in zip(*full.values(), strict=True)]
        for method, values in full.items():
            cells = [
                f"[bold]{value:.1f}[/bold]" if value == least else f"{value:.1f}"
                for value, least in zip(values, best, strict=True)
            ]
            table.add_row(setting, method, *cells)
        table.add_section()
    return table
