"""Compare methods on time series whose sensors degrade.

    python scripts/sensors.py --wheels DIR [--worlds vowels,motions] [--seeds 3] [--csv FILE]
    python scripts/sensors.py --table FILE ...

Worlds are data sets that the wheels of `aeon` and `sktime` carry, which are read as files. For each
seed the series are divided in two, a Conv1d network with BatchNorm is trained on the first half,
filters are fitted on the same half, and the other half is a stream: clean, and with each of the
seven degradations of `ttapca.corruptions.sensors` at severities 3 and 5, shuffled and sorted by
class, in batches of 50, 16 and 1. The seed is that of the division, the training, the device and
the order. All methods have their defaults, online; `roid` goes without views of images.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import clean_zoo
import ttapca
from clean_zoo import MissingDataError, Places
from ttapca.corruptions import sensors

CLEAN = "clean"
SEVERITIES = (3, 5)
BATCHES = (50, 16, 1)
ORDERS = ("shuffled", "sorted")
SHUFFLED = "wiener-shuffled"  # told that samples come in no order
METHODS = ("source", "bn", "tent", "roid", "lame", "wiener", SHUFFLED)
DRAWS = 2000


@dataclass(frozen=True)
class Row:
    """The errors of one stream.

    Attributes:
        world: The data set.
        seed: Of the division, the training, the device and the order.
        degradation: Or `clean`.
        severity: 0 if clean.
        order: Of the stream.
        batch: Samples in a batch.
        method: Of `ttapca.METHODS`, or `wiener` with `order="shuffled"`.
        samples: Of the stream.
        wrong: How many of them were predicted wrong.
        alarms: How often `on_shift` told that a shift begins.
        seconds: How long the stream took.
    """

    world: str
    seed: int
    degradation: str
    severity: int
    order: str
    batch: int
    method: str
    samples: int
    wrong: int
    alarms: int
    seconds: float

    @property
    def error(self) -> float:
        """In percent."""
        return 100 * self.wrong / self.samples


@dataclass(frozen=True)
class Source:
    """Where a data set is, and how it is cut.

    Attributes:
        package: Whose wheel carries it.
        name: Of its folder and its files.
        length: Of a window.
        most: Windows of a series, at most.
        epochs: Of training.
    """

    package: str
    name: str
    length: int
    most: int = 1
    epochs: int = 60


WORLDS = {
    "vowels": Source("aeon", "JapaneseVowels/JapaneseVowels_eq", 25),  # 9 speakers, 12 x 25
    "motions": Source("aeon", "BasicMotions/BasicMotions", 20, most=5),  # 4 motions, 6 x 20
    "power": Source("aeon", "ItalyPowerDemand/ItalyPowerDemand", 24),  # 2 seasons, 1 x 24
    "gestures": Source("aeon", "GunPoint/GunPoint", 150, epochs=150),  # 2 gestures, 1 x 150
    "arrows": Source("aeon", "ArrowHead/ArrowHead", 251, epochs=150),  # 3 outlines, 1 x 251
    "leaves": Source("aeon", "OSULeaf/OSULeaf", 427, epochs=150),  # 6 outlines, 1 x 427
}


def main() -> None:
    asked = arguments()
    if asked.table:
        show([row for path in asked.table for row in read(path)])
        return
    rows: list[Row] = []
    with asked.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Row)])
        writer.writeheader()
        for name in asked.worlds:
            begun = time.perf_counter()
            try:
                for row in measured(name, asked):
                    rows.append(row)
                    writer.writerow(asdict(row))
                    file.flush()
            except MissingDataError as error:
                print(f"{name}: left out, {error}", flush=True)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    show(rows)


def arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=clean_zoo.WHEELS)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ttapca-zoo").expanduser())
    parser.add_argument("--worlds", type=names, default=list(WORLDS))
    parser.add_argument("--degradations", type=names, default=list(sensors.DEGRADATIONS))
    parser.add_argument("--severities", type=numbers, default=list(SEVERITIES))
    parser.add_argument("--batches", type=numbers, default=list(BATCHES))
    parser.add_argument("--orders", type=names, default=list(ORDERS))
    parser.add_argument("--methods", type=names, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--singles", type=int, default=150, help="samples of a stream one by one")
    parser.add_argument("--csv", type=Path, default=Path("sensors.csv"))
    parser.add_argument("--table", type=Path, nargs="+", help="only show these files")
    return parser.parse_args()


def read(path: Path) -> Iterator[Row]:
    """Yield the rows of a file."""
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield Row(**{each.name: kinds[str(each.type)](row[each.name]) for each in fields(Row)})


# Measuring.


def measured(name: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows of a world."""
    source = WORLDS[name]
    places = Places(clean_zoo.SHARED, asked.wheels, clean_zoo.CIFAR, asked.cache)
    paths = [f"{source.name}_{part}.ts" for part in ("TRAIN", "TEST")]
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        samples, labels, whose = clean_zoo.windows_of(
            places, source.package, paths, source.length, source.most, seed=seed
        )
        classes = int(torch.cat(labels).max()) + 1
        network = clean_zoo.trained(
            f"sensors-{name}",
            lambda: clean_zoo.series_net(samples[0].shape[1], classes),  # noqa: B023 - called now
            samples[0],
            labels[0],
            places,
            epochs=source.epochs,
            seed=seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few samples, which some of these are
            groups = whose if source.most > 1 else None
            fitted = ttapca.fit(network, "0", samples[0].split(100), groups=groups)
        scale = sensors.Scale.of(samples[0].numpy())
        conditions = [(each, at) for each in asked.degradations for at in asked.severities]
        for degradation, severity in [(CLEAN, 0), *conditions]:
            stream = samples[1]
            if degradation != CLEAN:
                made = sensors.degrade(stream.numpy(), degradation, severity, seed, scale=scale)
                stream = torch.from_numpy(made)
            for order in asked.orders:
                for batch in asked.batches:
                    chosen = in_order(labels[1], order, seed, asked.singles if batch == 1 else None)
                    for method in asked.methods:
                        begun = time.perf_counter()
                        wrong, alarms = predict(
                            network, fitted, method, stream[chosen].split(batch), labels[1][chosen]
                        )
                        seconds = round(time.perf_counter() - begun, 2)
                        facts = (name, seed, degradation, severity, order, batch, method)
                        yield Row(*facts, len(chosen), wrong, alarms, seconds)


def in_order(labels: Tensor, order: str, seed: int, most: int | None) -> Tensor:
    """Return which samples make a stream, in order."""
    rows = clean_zoo.shuffled(len(labels), seed)[:most]
    if order == "shuffled":
        return rows
    classes = clean_zoo.shuffled(int(labels.max()) + 1, seed)
    return rows[classes[labels[rows]].argsort(stable=True)]


def predict(
    network: nn.Module,
    fitted: ttapca.FittedFilter,
    method: str,
    batches: tuple[Tensor, ...],
    labels: Tensor,
) -> tuple[int, int]:
    """Return how many samples of a stream are predicted wrong, and how many alarms there were."""
    alarms: list[int] = []
    options: dict[str, Any] = {}
    if method == "roid":
        options = {"consistency": False}  # whose views are of images
    if method in ("wiener", SHUFFLED):
        options = {
            "filter": fitted,
            "on_shift": lambda health: alarms.append(health.images) if health.shifted else None,
        }
    if method == SHUFFLED:
        method, options = "wiener", {**options, "order": "shuffled"}
    with (
        torch.random.fork_rng(),
        ttapca.adapt(network, method, forgetting="online", **options) as adapted,
    ):
        torch.manual_seed(0)
        found = torch.cat([adapted(batch).detach().argmax(1) for batch in batches])
    return int((found != labels).sum()), len(alarms)


# Tables.


def show(rows: list[Row]) -> None:
    """Print the tables of docs/results.md, and what is behind them."""
    methods = [each for each in METHODS if any(row.method == each for row in rows)]
    batches = sorted({row.batch for row in rows}, reverse=True)
    orders = [each for each in ORDERS if any(row.order == each for row in rows)]
    worlds = [each for each in WORLDS if any(row.world == each for row in rows)]
    print("\nMean error in percent of all degradations; in brackets clean.\n")
    for order in orders:
        for batch in batches:
            among = [row for row in rows if (row.order, row.batch) == (order, batch)]
            header(f"{order}, {batch}", methods)
            for world in worlds:
                line(world, [row for row in among if row.world == world], methods)
            line("all", among, methods)
            print()
    print("Share of the excess error of the untouched network that is left, all worlds.\n")
    header("degradation", methods)
    for each in dict.fromkeys(row.degradation for row in rows if row.degradation != CLEAN):
        for severity in sorted({row.severity for row in rows if row.severity}):
            condition = {(CLEAN, 0), (each, severity)}
            kept = [row for row in rows if (row.degradation, row.severity) in condition]
            line(f"{each} {severity}", kept, methods)
    print(
        "\nClean streams that break the law: samples that are wrong beside untouched, and alarms.\n"
    )
    print("| world | seed | order | batch | method | untouched | error | samples | alarms |")
    print("|---|--:|---|--:|---|--:|--:|--:|--:|")
    index = {key(row): row for row in rows}
    for row in rows:
        if "wiener" in row.method and row.degradation == CLEAN:
            before = index[(*key(row)[:-1], "source")]
            allowed = max(1.0, 0.005 * row.samples)
            if row.wrong - before.wrong > allowed or row.alarms:
                facts = (*key(row)[:2], row.order, row.batch, row.method, before.wrong, row.wrong)
                print(f"| {' | '.join(map(str, (*facts, row.samples, row.alarms)))} |")
    clean = [row for row in rows if "wiener" in row.method and row.degradation == CLEAN]
    print(f"\nof {len(clean)} clean streams")


def key(row: Row) -> tuple[Any, ...]:
    return (row.world, row.seed, row.degradation, row.severity, row.order, row.batch, row.method)


def header(title: str, methods: list[str]) -> None:
    ours = [f"excess left, `{each}`" for each in methods if each.startswith("wiener")]
    print(f"| {title} | {' | '.join([*(f'`{each}`' for each in methods), *ours])} |")
    print("|---" + "|--:" * (len(methods) + len(ours)) + "|")


def line(title: str, rows: list[Row], methods: list[str]) -> None:
    """Print mean errors, and how much of the excess ours leaves, with an interval over units.

    Units of the bootstrap are worlds with a seed: their streams share a network and samples.
    """
    cells = []
    for method in methods:
        own = [row for row in rows if row.method == method]
        cells.append(f"{mean_error(own, clean=False):.1f} ({mean_error(own, clean=True):.1f})")
    units = sorted({(row.world, row.seed) for row in rows})
    drawn = np.random.default_rng(0).integers(len(units), size=(DRAWS, len(units)))
    before = np.array([unit_excess(rows, unit, "source") for unit in units])
    for method in methods:
        if method.startswith("wiener"):
            after = np.array([unit_excess(rows, unit, method) for unit in units])
            with np.errstate(all="ignore"):  # of a draw without excess
                shares = 100 * after[drawn].sum(1) / before[drawn].sum(1)
            low, high = np.percentile(shares[np.isfinite(shares)], [2.5, 97.5])
            left = 100 * after.sum() / before.sum()
            interval = f" ({low:.0f} to {high:.0f})" if len(units) > 1 else ""
            cells.append(f"{left:.0f} %{interval}")
    print(f"| {title} | {' | '.join(cells)} |")


def mean_error(rows: list[Row], *, clean: bool) -> float:
    return float(np.mean([row.error for row in rows if (row.degradation == CLEAN) == clean]))


def unit_excess(rows: list[Row], unit: tuple[str, int], method: str) -> float:
    """Return by how much errors of a world and seed are above those of the clean, untouched."""
    own = [row for row in rows if (row.world, row.seed) == unit]
    base = mean_error([row for row in own if row.method == "source"], clean=True)
    return mean_error([row for row in own if row.method == method], clean=False) - base


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
