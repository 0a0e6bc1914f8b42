"""A basis in half precision: the folder on disk, and how the errors of a trained network change.

Without a trained network only the sizes on disk are measured, of a filter for random weights.

    python benchmarks/storage.py [--network FILE --train DIR --corrupted DIR]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import measuring
import ttapca
from common import (
    CORRUPTIONS,
    SEVERITY,
    add_trained_options,
    errors_of,
    fitted_stem,
    is_trained,
    trained_network,
    training_batches,
)
from measuring import Goal, Result, Table
from ttapca import models

PRECISIONS = ("float32", "bfloat16", "float16")
COMPONENTS = 2000
METHODS = ("wiener", "ttapca-relu", "ttapca-exp")


def run(options: argparse.Namespace) -> Result:
    if is_trained(options):
        network, batches = trained_network(options), training_batches(options)
        fitted = ttapca.fit(network, "conv1", batches, COMPONENTS)
    else:
        fitted = fitted_stem(models.build("resnet20").eval(), COMPONENTS)
    sizes, loaded = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in PRECISIONS:
            folder = Path(scratch) / precision
            fitted.save(folder, dtype=precision)
            sizes[precision] = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            loaded[precision] = ttapca.load(folder)
    tables = [
        Table(
            f"On disk, {fitted.n_components_:,} components",
            ["precision", "MB"],
            [[name, f"{size:.1f}"] for name, size in sizes.items()],
        )
    ]
    half = min(sizes["bfloat16"], sizes["float16"])
    goals = [Goal("basis on disk, half precision", half, f"{half:.1f} MB", 25, unit=" MB")]
    found: dict[str, dict[str, dict[str, float]]] = {}
    if is_trained(options):
        for method in (name for name in METHODS if name in ttapca.RECIPES):
            found[method] = {
                name: errors_of(options, each, method) for name, each in loaded.items()
            }
        tables.append(error_table(found, options))
        goals += error_goals(found)
    return Result(
        title="Half precision",
        text=(
            "The two matrices of a folded filter at the first layer; means and singular values are "
            "always kept in float64, and the filter computes in float32 whatever it was stored as."
        ),
        tables=tables,
        goals=goals,
        numbers={"sizes": sizes, "errors": found},
    )


def error_table(
    found: dict[str, dict[str, dict[str, float]]], options: argparse.Namespace
) -> Table:
    rows = [
        [method, precision, *(f"{error:.2f}" for error in by_corruption.values())]
        for method, by_precision in found.items()
        for precision, by_corruption in by_precision.items()
    ]
    title = f"Error in percent, first {options.images:,} images, severity {SEVERITY}, episodic"
    return Table(title, ["method", "stored as", *CORRUPTIONS], rows)


def error_goals(found: dict[str, dict[str, dict[str, float]]]) -> list[Goal]:
    out = []
    for method, by_precision in found.items():
        for precision in PRECISIONS[1:]:
            full, narrow = by_precision["float32"], by_precision[precision]
            mean = sum(narrow[name] - full[name] for name in full) / len(full)
            what = f"{method}: change of the mean error by {precision}"
            out.append(Goal(what, abs(mean), f"{mean:+.3f} points", 0.05))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained_options(parser)
    measuring.command("storage", run, parser)


if __name__ == "__main__":
    main()
