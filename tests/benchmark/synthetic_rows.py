"""Rows that look like a run's, made by a formula: every number can be computed by hand."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from ttapca.benchmark import Results
from ttapca.benchmark.comparisons import Comparison, comparisons
from ttapca.benchmark.rows import CLEAN, Cell, Observation, Outcome, Row
from ttapca.benchmark.tables import ResultTable
from ttapca.corruptions import STANDARD

METHODS = ("source", "bn", "tent", "ttapca-relu", "ttapca-exp")
LEVEL = {"source": 45.0, "bn": 21.0, "tent": 20.0, "ttapca-relu": 20.9, "ttapca-exp": 20.4}
PARAMETERS = {"source": 0, "bn": 0, "tent": 1376, "ttapca-relu": 2000, "ttapca-exp": 2000}
SECONDS = {"source": 0.4, "bn": 0.42, "tent": 1.3, "ttapca-relu": 1.5, "ttapca-exp": 1.5}


def cell(method: str = "source", corruption: str = "fog", **changes: Any) -> Cell:
    place = ("conv1", 2000) if method.startswith("ttapca") else ("", 0)
    steps, lr = (1, 1e-3) if PARAMETERS[method] > 0 else (0, 0.0)
    made = Cell(
        "resnet20", "0123456789abcdef", "cifar10", "generated, seed 0", corruption,
        0 if corruption == CLEAN else 5, "episodic", method, "{}", *place, 200, steps, lr, 1000, 0,
    )  # fmt: skip
    return replace(made, **changes)


def error(of: Cell) -> float:
    """The error of a cell: a level for the method, a wave over corruptions, a bit for the seed."""
    if of.corruption == CLEAN:
        return 8.0 + 0.1 * METHODS.index(of.method)
    wave = 8 * math.cos(STANDARD.index(of.corruption) + 0.3 * METHODS.index(of.method))
    rank = 400 / of.components if of.components else 0
    steps = -0.8 * math.log(of.steps) if of.steps else 0
    batch = 0 if of.method == "source" else 200 / of.batch_size
    online = -1.0 if of.setting == "online" and of.steps else 0
    return LEVEL[of.method] + wave + rank + steps + batch + online + 0.3 * math.sin(7 * of.seed)


def row(of: Cell, **changes: Any) -> Row:
    batches = max(of.images // of.batch_size, 1)
    size = STANDARD.index(of.corruption) if of.corruption != CLEAN else 0
    level = 1.0 - 0.1 * METHODS.index(of.method) + 0.02 * size
    stream = tuple(level + 0.05 * math.sin(at) for at in range(batches))
    outcome = Outcome(
        status="done",
        reason="",
        error=error(of),
        calibration_error=error(of) / 3,
        entropy=sum(stream) / batches,
        error_stream=tuple(error(of) + math.sin(at) for at in range(batches)),
        entropy_stream=stream,
        updates=of.steps * batches,
        skipped=0,
        parameters=PARAMETERS[of.method],
        seconds=SECONDS[of.method] * of.images / 1000 * max(of.steps, 1),
        peak_memory=512.0 + PARAMETERS[of.method] / 50,
        versions={"ttapca": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.2"},
        machine={"cpu": "x86_64", "cores": "2", "threads": "1", "system": "Linux"},
        finished=f"2026-11-15T12:{size:02d}:00+00:00",
        command=f"ttapca bench resnet20.pth --data cifar10 --settings {of.setting}",
    )
    return Row(of, replace(outcome, **changes))


def failed(of: Cell, reason: str = "AttachError: no BatchNorm <layer> & co") -> Row:
    nothing = {"error": None, "calibration_error": None, "entropy": None}
    return row(of, status="failed", reason=reason, error_stream=(), entropy_stream=(), **nothing)


def paper_grid(setting: str = "episodic", **changes: Any) -> list[Row]:
    """All fifteen corruptions and clean images, all five methods, one seed."""
    pairs = itertools.product(METHODS, (*STANDARD, CLEAN))
    return [row(cell(method, name, setting=setting, **changes)) for method, name in pairs]


def sweeps() -> list[Row]:
    """Ranks, steps and batch sizes, three seeds each, on two corruptions."""
    cells = []
    for seed, name, method in itertools.product((0, 1, 2), STANDARD[:2], METHODS):
        base = cell(method, name, seed=seed, images=600)
        ranks = (50, 200, 1000, 2000) if base.components else (0,)
        steps = (1, 3, 10) if base.steps else (0,)
        cells += [replace(base, components=each) for each in ranks]
        cells += [replace(base, steps=each, setting="online") for each in steps]
        cells += [replace(base, batch_size=each) for each in (16, 50, 500)]
    return [row(each) for each in cells]


def everything() -> list[Row]:
    """A whole file: both settings, sweeps, and two measurements that failed."""
    rows = [*paper_grid(), *paper_grid("online"), *sweeps()]
    spoilt = (cell("tent", "frost"), cell("ttapca-exp", "snow", setting="online"))
    return [failed(each.cell) if each.cell in spoilt else each for each in rows]


def with_bits(rows: list[Row], noise: float = 0.5) -> list[Row]:
    """The same rows, and which images were right; their errors are rounded to whole images.

    Some images are hard for all methods under all corruptions; `noise` says how much else matters.
    """
    random = np.random.default_rng(0)
    difficulty = random.standard_normal(max(each.cell.images for each in rows))
    found = []
    for each in rows:
        images, share = each.cell.images, each.outcome.error
        if share is not None:
            hard = difficulty[:images] + noise * random.standard_normal(images)
            count = round(share * images / 100)
            correct = hard.argsort().argsort() < images - count
            facts = {"error": 100 * count / images, "correct": np.packbits(correct).tobytes()}
            each = Row(each.cell, replace(each.outcome, **facts))
        found.append(each)
    return found


def grid(
    errors: dict[str, float],
    names: tuple[str, ...] = ("fog", "snow"),
    *,
    seeds: int = 1,
    noise: float = 0.5,
    **changes: Any,
) -> list[Row]:
    """Methods with given errors, and which images were right."""
    cells = itertools.product(errors, names, range(seeds))
    rows = [
        row(cell(method, name, seed=seed, **changes), error=errors[method])
        for method, name, seed in cells
    ]
    return with_bits(rows, noise)


def without_bits(rows: list[Row]) -> list[Row]:
    """The same rows as ttapca 0.1 wrote them."""
    return [Row(each.cell, replace(each.outcome, correct=b"")) for each in rows]


def wrong(each: Row) -> NDArray[np.float64]:
    """100 for each image that was predicted wrong, in the order of the images."""
    bits = [int(bit) for byte in each.outcome.correct for bit in f"{byte:08b}"]
    return 100.0 - 100.0 * np.array(bits[: each.cell.images])


def mean_wrong(rows: list[Row], method: str) -> NDArray[np.float64]:
    """The mean of `wrong` over the rows of a method."""
    return np.mean([wrong(each) for each in rows if each.cell.method == method], axis=0)


def half_width(values: NDArray[np.float64]) -> float:
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return float(high - low) / 2


def one_comparison(rows: list[Row]) -> Comparison:
    (found,) = comparisons(rows)
    return found


def texts(table: ResultTable, column: str) -> dict[str, str]:
    """The texts of a column, by the name of the line."""
    at = table.columns.index(column)
    return {line[0].text: line[at].text for line in table.rows}


def bold(table: ResultTable, column: str) -> set[str]:
    at = table.columns.index(column)
    return {line[0].text for line in table.rows if line[at].best}


def picture(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((8, 8)).point(lambda value: value // 2 + shade).save(
        stream, "PNG"
    )
    return stream.getvalue()


def observations() -> list[Observation]:
    """A noisy and a blurred stream, seen by both filters."""
    source = tuple(10 * 0.97**at + 0.01 for at in range(200))
    noisy = tuple(math.hypot(each, 1.0) for each in source)
    blurred = tuple(each * math.exp(-at / 80) for at, each in enumerate(source))
    return [
        Observation(
            cell(method, corruption),
            source,
            spectrum,
            tuple(each / (each + strength) for each in source),
            tuple(picture(10 * number) for number in range(6)),
            tuple(picture(10 * number + 60) for number in range(6)),
        )
        for corruption, spectrum in (("gaussian_noise", noisy), ("defocus_blur", blurred))
        for method, strength in (("ttapca-relu", 0.1), ("ttapca-exp", 1.0))
    ]


def write_everything(path: Path) -> Path:
    with Results(path) as results:
        results.add(everything(), observations())
    return path
