"""Errors by class: a method can have a good mean and give up a class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ttapca.benchmark.cells import ClassLabels
from ttapca.benchmark.comparisons import SOURCE, Comparison
from ttapca.benchmark.tables import BOLD, INTERVAL, TEST, ResultTable, Value, interval_note
from ttapca.benchmark.uncertainty import ImageTally, Standing, standings

SHOWN = 20  # classes


def class_table(comparison: Comparison, labels: Sequence[ClassLabels]) -> ResultTable | None:
    """Return the error of each method on the images of each class.

    Of many classes, those are shown in which methods differ most.

    Returns:
        A line for each class, a column for each method. None where it is not known which images
        were predicted right, or which class they have; or there are fewer than two classes.
    """
    ours, tallies = comparison.conditions, comparison.tallies()
    found = [each for each in labels if (each.data, len(each.numbers)) == (ours.data, ours.images)]
    classes = np.array(found[0].numbers) if found else np.zeros(0, np.int64)
    present = np.unique(classes).tolist()
    if len(present) < 2 or not tallies:
        return None
    shares = {  # by class: how often its images were predicted wrong, by line
        number: [
            ImageTally(each.wrong[classes == number], each.predictions) for each in tallies.values()
        ]
        for number in present
    }
    methods = comparison.lines.method[list(tallies)]
    kept = _differing(shares, [at for at, name in enumerate(methods) if name != SOURCE])
    body, widest = [], 0.0
    for number in kept:
        ranked = standings(shares[number])
        widest = max(widest, *(each.error.half_width for each in ranked))
        images = int((classes == number).sum())
        values = (_value(each, several=len(ranked) > 1) for each in ranked)
        body.append(
            (Value(found[0].names[number]), Value(f"{images:,}", images, "number"), *values)
        )
    count = len(comparison.corruptions)
    over = f", mean over {count} corruptions" if count > 1 else ""
    which = f"the {len(kept)} of {len(present)} classes in which methods differ most"
    notes = [
        f"Classification error in percent by true class{over}"
        + (f"; {which}." if len(kept) < len(present) else "."),
        f"{INTERVAL}: at most ±{widest:.1f}. {BOLD.replace('column', 'line')} {TEST}",
    ]
    columns = ("class", "images", *comparison.lines.label[list(tallies)])
    return ResultTable(f"{ours.title}: by class", columns, tuple(body), tuple(notes))


def _differing(shares: dict[int, list[ImageTally]], adapted: Sequence[int]) -> list[int]:
    """Return the classes in which methods differ most, in the order of their numbers."""

    def span(number: int) -> float:
        errors = [
            shares[number][at].wrong.mean() / shares[number][at].predictions for at in adapted
        ]
        return float(max(errors) - min(errors)) if errors else 0.0

    return sorted(sorted(shares, key=span, reverse=True)[:SHOWN])


def _value(standing: Standing, *, several: bool) -> Value:
    error, best = standing.error, several and standing.rank == 1
    note = interval_note(error, decimals=1)
    return Value(f"{error.mean:.1f}", error.mean, "number", best, note, standing.rank)
