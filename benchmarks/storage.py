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
from ttapca import networks

PRECISIONS = ("float32", "bfloat16", "float16")
COMPONENTS = 2000
HALF = "float16"
METHODS = ("wiener", "ttapca-relu", "ttapca-exp")


def run(options: argparse.Namespace) -> Result:
    if is_trained(options):
        network, batches = trained_network(options), training_batches(options)
        fitted = ttapca.fit(network, "conv1", batches, COMPONENTS)
    else:
        fitted = fitted_stem(networks.build("resnet20").eval(), COMPONENTS)
    sizes, loaded = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in PRECISIONS:
            folder = Path(scratch) / precision
            fitted.save(folder, dtype=precision)
            sizes[precision] = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            loaded[precision] = ttapca.load(folder)
    found: dict[str, dict[str, dict[str, float]]] = {}
    if is_trained(options):
        for method in (name for name in METHODS if name in ttapca.METHODS):
            found[method] = {
                name: errors_of(options, each, method) for name, each in loaded.items()
            }
    return result(sizes, found, options.images)


def result(
    sizes: dict[str, float], found: dict[str, dict[str, dict[str, float]]], images: int
) -> Result:
    """The goals are for float16; of bfloat16 the text tells what it costs."""
    size = sizes[HALF]
    text = (
        "The two matrices of a folded filter at the first layer; means and singular values are "
        "kept in float64, and the filter computes in float32."
    )
    tables = [
        Table(
            f"On disk, {COMPONENTS:,} components",
            ["precision", "MB"],
            [[name, f"{each:.1f}"] for name, each in sizes.items()],
        )
    ]
    goals = [Goal(f"basis on disk, {HALF}", size, f"{size:.1f} MB", 25, unit=" MB")]
    if found:
        tables.append(error_table(found, images))
        for method in found:
            change = mean_change(found[method], HALF)
            what = f"{method}: change of the mean error by {HALF}"
            goals.append(Goal(what, abs(change), f"{change:+.3f} points", 0.05))
        costs = [f"{mean_change(found[method], 'bfloat16'):+.2f} ({method})" for method in found]
        text += (
            f" bfloat16, which has three bits less than {HALF}, changes the mean error by "
            f"{', '.join(costs)} points, and is only for filters whose numbers {HALF} cannot hold."
        )
    return Result(
        title="Half precision",
        text=text,
        tables=tables,
        goals=goals,
        numbers={"sizes": sizes, "errors": found},
    )


def error_table(found: dict[str, dict[str, dict[str, float]]], images: int) -> Table:
    rows = [
        [method, precision, *(f"{error:.2f}" for error in by_corruption.values())]
        for method, by_precision in found.items()
        for precision, by_corruption in by_precision.items()
    ]
    title = f"Error in percent, first {images:,} images, severity {SEVERITY}, episodic"
    return Table(title, ["method", "stored as", *CORRUPTIONS], rows)


def mean_change(by_precision: dict[str, dict[str, float]], precision: str) -> float:
    """In percent points, against float32, over the corruptions."""
    full, narrow = by_precision["float32"], by_precision[precision]
    return sum(narrow[name] - full[name] for name in full) / len(full)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained_options(parser)
    measuring.command("storage", run, parser)


if __name__ == "__main__":
    main()
