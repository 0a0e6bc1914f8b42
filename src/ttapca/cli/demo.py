"""`ttapca demo`: the whole idea on real data, in seconds and without a download."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import ttapca
from ttapca.cli import digits as world

BATCH = 100
COMPONENTS = 40
METHODS: tuple[ttapca.MethodName, ...] = ("source", "bn", "ttapca-relu", "ttapca-exp")

# Errors in percent, by (setting, method) and then by condition.
Errors = dict[tuple[str, ttapca.MethodName], dict[str, float]]


def demo(
    seed: Annotated[int, typer.Option(help="Of the split, the training and the noise.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 30,
) -> None:
    """Train a small network on handwritten digits, corrupt the test digits, and repair it."""
    out, log = Console(), Console(stderr=True)
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    digits = world.load_digits(generator)

    def bar(epochs: range) -> Iterable[int]:
        return track(epochs, "training a network on digits", console=log, transient=True)

    model = world.train(digits, epochs, seed, bar)
    fitted = ttapca.fit(model, "conv1", digits.train_images, n_components=COMPONENTS)
    conditions = {
        name: corrupt(digits.test_images, generator) for name, corrupt in world.CONDITIONS.items()
    }
    errors = {
        (setting, method): {
            name: _error(model, method, fitted, images, digits.test_labels, setting)
            for name, images in conditions.items()
        }
        for setting in ("episodic", "online")
        for method in METHODS
    }
    out.print(_table(errors))
    out.print(
        f"{len(digits.test_labels)} test digits, batches of {BATCH}, seed {seed}. The filter sits "
        f"after `conv1`: {fitted.n_components_} components of {len(fitted.mean_)} outputs hold "
        f"{100 * float(fitted.explained_variance_ratio_.sum()):.1f} % of the variance.",
        highlight=False,
    )
    log.print(f"done in {time.perf_counter() - start:.1f} s", style="dim", highlight=False)


def _error(
    model: nn.Module,
    method: ttapca.MethodName,
    fitted: ttapca.FittedFilter,
    images: torch.Tensor,
    labels: torch.Tensor,
    setting: str,
) -> float:
    adapted = ttapca.adapt(model, method, filter=fitted, episodic=setting == "episodic")
    wrong = sum(
        int((adapted(batch).argmax(1) != truth).sum())
        for batch, truth in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True)
    )
    adapted.detach()
    return 100 * wrong / len(labels)


def _table(errors: Errors) -> Table:
    names = list(world.CONDITIONS)
    table = Table(title="Classification error [%]", title_justify="left")
    for heading in ("setting", "method"):
        table.add_column(heading)
    for heading in (*names, "mean of corrupted"):
        table.add_column(heading, justify="right")
    for setting in dict.fromkeys(setting for setting, _ in errors):
        rows = {
            method: [*row.values(), sum(list(row.values())[1:]) / (len(row) - 1)]
            for (where, method), row in errors.items()
            if where == setting
        }
        best = [min(column) for column in zip(*rows.values(), strict=True)]
        for method, row in rows.items():
            cells = [
                f"[bold]{value:.1f}[/bold]" if value == least else f"{value:.1f}"
                for value, least in zip(row, best, strict=True)
            ]
            table.add_row(setting, method, *cells)
        table.add_section()
    return table
