"""The filtered first layer alone (p = 16,384, L = 2,000): folded against unfolded, by batch.

Both filters are the same one, and their outputs are compared.

    python benchmarks/forward.py [--rounds 15] [--batches 200 1]
"""

from __future__ import annotations

import argparse
import functools

import torch

import measuring
import ttapca
from common import fitted_stem, natural_images, stem, unfolded
from measuring import Goal, Result, Spread, Table, ratio

COMPONENTS = 2000


def run(options: argparse.Namespace) -> Result:
    fitted = fitted_stem(stem(), COMPONENTS)
    models = {"plain": stem(), "folded": stem(), "unfolded": stem()}
    versions = {"folded": fitted, "unfolded": unfolded(fitted, stem().conv1)}
    attachments = {name: ttapca.attach(models[name], version) for name, version in versions.items()}
    tables, goals, numbers = [], [], {}
    for number in options.batches:
        batch = natural_images(number, seed=1).float() / 255
        with torch.no_grad():
            seconds = measuring.interleaved(
                {name: functools.partial(model, batch) for name, model in models.items()},
                options.rounds,
            )
            difference = (models["folded"](batch) - models["unfolded"](batch)).abs().max()
        added = {
            name: [one - two for one, two in zip(seconds[name], seconds["plain"], strict=True)]
            for name in versions
        }
        over = ratio(added["unfolded"], added["folded"])
        rows = [[name, Spread.of(values).show(1000)] for name, values in seconds.items()]
        rows.append(["added, unfolded over folded", over.show()])
        rows.append(["largest difference of an output", f"{float(difference):.1e}"])
        tables.append(Table(f"Batch of {number}", ["", "ms"], rows))
        if number > 1:
            what = f"added time, unfolded over folded, batch of {number}"
            goals.append(Goal(what, over.median, over.show(), 3, at_least=True))
        numbers[str(number)] = seconds
    sizes = {
        name: sum(buffer.nbytes for buffer in attachment.filter.buffers()) / 1e6
        for name, attachment in attachments.items()
    }
    return Result(
        title="Filtered layer",
        text=(
            f"The first layer with {COMPONENTS:,} components and unit gains, {options.rounds} "
            f"rounds. The folded filter holds two matrices, {sizes['folded']:.0f} MB; the unfolded "
            f"one holds one that serves both ways, {sizes['unfolded']:.0f} MB."
        ),
        tables=tables,
        goals=goals,
        numbers=numbers,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[200, 1])
    measuring.command("forward", run, parser)


if __name__ == "__main__":
    main()
