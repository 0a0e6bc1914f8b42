"""Measure the clean law: data as those of the source lose at most half a point, and raise no alarm.

    python scripts/clean_law.py --cache DIR [--worlds digits,vowels] [--samples 32,400]
        [--batches 1,100] [--orders shuffled,sorted] [--methods wiener] [--forgetting online]
        [--seeds 3] [--images 2000] [--singles 600] [--csv FILE] [--shared DIR] [--wheels DIR]
    python scripts/clean_law.py --table FILE ...

Every cell fits a filter on so many samples of the source (drawn by the seed), and predicts a
stream of clean held-out samples with the untouched network and with the method. The difference
of the errors is paired, with an interval of 95 %. A cell is broken if the error is more than half
a point higher and the interval is above zero, or if an online stream raised an alarm.

P-values are those of single batches (`Health.p_value` of an episodic adapter); if nothing has
shifted, they are uniform between 0 and 1. They are collected over the seeds, by world, samples and
batch, and compared with that by the distance of Kolmogorov and Smirnov. `--table` shows the
tables of files of earlier runs.

Worlds are in `clean_zoo.py`; those whose data are missing are left out, and a line says so.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import clean_zoo
import ttapca
from clean_zoo import UNLABELLED, MissingDataError, Places, World
from ttapca.adaptation.health import Health

SAMPLES = (32, 64, 128, 400, 1000, 4000)
BATCHES = (1, 16, 100)
ORDERS = ("shuffled", "sorted")
METHODS = ("wiener", "match", "two-sided")
FORGETTING = ("episodic", "online")
LAW = 0.5  # points
RARE = 0.01  # p-values that a hundredth of clean batches may have
DRAWS = 500  # of frames, for the interval of a mean intersection over union
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Cell:
    """What was measured on one stream.

    Attributes:
        world: The name of the world.
        samples: How many samples the filter was fitted on.
        batch: Samples in a batch.
        order: Of the stream.
        method: Of the closed form.
        forgetting: As for `ttapca.adapt`.
        seed: Draws the samples of the fit, and the order of the stream.
        stream: How many samples the stream has.
        untouched: Error of the untouched network in percent; of a segmentation, 100 - mean IoU.
        error: Error of the method.
        difference: Points by which it is higher.
        margin: Half of the interval of 95 % of the difference.
        changed: Share of predictions that are others, in percent.
        rare: Share of batches with a p-value below 0.01, in percent; of episodic streams.
        alarms: How often `on_shift` told that a shift begins; of online streams.
        seconds: How long the stream took.
        p_values: Of the batches of an episodic stream in no order.
    """

    world: str
    samples: int
    batch: int
    order: str
    method: str
    forgetting: str
    seed: int
    stream: int
    untouched: float
    error: float
    difference: float
    margin: float
    changed: float
    rare: float
    alarms: int
    seconds: float
    p_values: str

    @property
    def at_least(self) -> int:
        """The largest of the usual numbers of samples that the fit had at least."""
        return max((each for each in SAMPLES if each <= self.samples), default=self.samples)

    @property
    def broken(self) -> bool:
        """Whether the cell breaks the law, and not by chance alone."""
        return (self.difference > LAW and self.difference > self.margin) or self.alarms > 0


def main() -> None:
    asked = arguments()
    if asked.table:
        show([cell for path in asked.table for cell in read(path)])
        return
    places = Places(asked.shared, asked.wheels, asked.cifar, asked.cache)
    cells: list[Cell] = []
    with asked.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Cell)])
        writer.writeheader()
        for cell in measured(asked, places):
            cells.append(cell)
            writer.writerow(asdict(cell))
            file.flush()
    show(cells)


def arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ttapca-zoo").expanduser())
    parser.add_argument("--shared", type=Path, default=clean_zoo.SHARED)
    parser.add_argument("--wheels", type=Path, default=clean_zoo.WHEELS)
    parser.add_argument("--cifar", type=Path, default=clean_zoo.CIFAR)
    parser.add_argument("--worlds", type=names, default=list(clean_zoo.WORLDS))
    parser.add_argument("--samples", type=numbers, default=list(SAMPLES))
    parser.add_argument("--batches", type=numbers, default=list(BATCHES))
    parser.add_argument("--orders", type=names, default=list(ORDERS))
    parser.add_argument("--methods", type=names, default=list(METHODS))
    parser.add_argument("--forgetting", type=names, default=list(FORGETTING))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--images", type=int, default=2000, help="samples of a stream, at most")
    parser.add_argument("--singles", type=int, default=600, help="the same for batches of one")
    parser.add_argument("--csv", type=Path, default=Path("clean-law.csv"))
    parser.add_argument("--table", type=Path, nargs="+", help="only show these files")
    return parser.parse_args()


def read(path: Path) -> Iterator[Cell]:
    """Yield the cells of a file."""
    kinds = {"int": int, "float": float, "str": str}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values = {each.name: kinds[str(each.type)](row[each.name]) for each in fields(Cell)}
            yield Cell(**values)


# Measuring.


def measured(asked: argparse.Namespace, places: Places) -> Iterator[Cell]:
    """Yield all cells, world by world."""
    for name in asked.worlds:
        begun = time.perf_counter()
        try:
            world = clean_zoo.WORLDS[name](places)
        except MissingDataError as error:
            print(f"{name}: left out, {error}", flush=True)
            continue
        broken = count = 0
        for seed in range(asked.seeds):
            for cell in cells_of(name, world, seed, asked):
                broken, count = broken + cell.broken, count + 1
                yield cell
        seconds = time.perf_counter() - begun
        print(f"{name}: {broken} of {count} cells broken, {seconds:.0f} s", flush=True)


def cells_of(name: str, world: World, seed: int, asked: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of a world and a seed."""
    available = len(world.source)
    for samples in dict.fromkeys(min(each, available) for each in asked.samples):
        fitted = fit(world, samples, seed)
        for order in asked.orders:
            for batch in asked.batches:
                most = asked.singles if batch == 1 else asked.images
                rows = rows_of(world, order, seed, most)
                before = predicted(world.network, world.held_out[rows].split(200))
                for method in asked.methods:
                    for forgetting in asked.forgetting:
                        yield measure(
                            world,
                            fitted,
                            rows,
                            before,
                            facts=(name, samples, batch, order, method, forgetting, seed),
                        )


def fit(world: World, samples: int, seed: int) -> ttapca.FittedFilter:
    """Fit on some samples of the source: in no order, but frames in theirs."""
    rows = clean_zoo.shuffled(len(world.source), seed)[:samples]
    if world.in_order:
        rows = rows.sort().values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few samples; that these are few is the point
        groups = None if world.groups is None else [world.groups[row] for row in rows.tolist()]
        return ttapca.fit(world.network, world.layer, world.source[rows].split(100), groups=groups)


def rows_of(world: World, order: str, seed: int, most: int) -> Tensor:
    """Return which held-out samples make a stream, in order."""
    rows = clean_zoo.shuffled(len(world.held_out), seed)[:most]
    if order == "shuffled":
        return rows
    if world.in_order:
        return rows.sort().values
    classes = clean_zoo.shuffled(int(world.labels.max()) + 1, seed)
    return rows[classes[world.labels[rows]].argsort(stable=True)]


@torch.no_grad()
def predicted(model: torch.nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Return the classes that a model predicts."""
    return torch.cat([model(batch).argmax(1) for batch in batches])


def measure(
    world: World,
    fitted: ttapca.FittedFilter,
    rows: Tensor,
    before: Tensor,
    facts: tuple[str, int, int, str, str, str, int],
) -> Cell:
    """Predict a stream with a method, and compare it with the untouched network."""
    _, _, size, order, method, forgetting, _ = facts
    begun, alarms, p_values = time.perf_counter(), [], []

    def told(health: Health) -> None:
        if health.shifted:
            alarms.append(health.images)

    watches = {"on_shift": told} if forgetting == "online" else {}
    found = []
    with ttapca.adapt(
        world.network, method, filter=fitted, forgetting=forgetting, **watches
    ) as adapted:
        for batch in world.held_out[rows].split(size):
            found.append(adapted(batch).argmax(1))
            p_value = adapted.health.p_value  # None of samples that are all implausible
            if forgetting == "episodic" and len(batch) == size and p_value is not None:
                p_values.append(p_value)
    after, labels = torch.cat(found), world.labels[rows]
    known = labels != UNLABELLED
    untouched, error, margin = compared(before, after, labels)
    return Cell(
        *facts,
        stream=len(rows),
        untouched=round(untouched, 3),
        error=round(error, 3),
        difference=round(error - untouched, 3),
        margin=round(margin, 3),
        changed=round(percent((before != after)[known]), 3),
        rare=round(percent(torch.tensor(p_values) < RARE), 3) if p_values else 0.0,
        alarms=len(alarms),
        seconds=round(time.perf_counter() - begun, 2),
        p_values=" ".join(f"{each:.4f}" for each in p_values) if order == "shuffled" else "",
    )


def percent(flags: Tensor) -> float:
    return 100 * float(flags.double().mean())


def compared(before: Tensor, after: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Return both errors in percent, and half of the interval of their difference."""
    if labels.dim() == 1:
        wrong = [(each != labels).double() for each in (before, after)]
        difference = wrong[1] - wrong[0]
        margin = 1.96 * float(difference.std()) / len(labels) ** 0.5
        return percent(wrong[0]), percent(wrong[1]), 100 * margin
    counts = [confusions(each, labels) for each in (before, after)]
    untouched, error = (missed(each.sum(0)) for each in counts)
    drawn = np.random.default_rng(0).multinomial(
        len(labels), [1 / len(labels)] * len(labels), DRAWS
    )
    sums = [torch.einsum("dn,nij->dij", torch.tensor(drawn).double(), each) for each in counts]
    differences = [missed(last) - missed(first) for first, last in zip(*sums, strict=True)]
    return untouched, error, 1.96 * float(np.std(differences))


def confusions(found: Tensor, labels: Tensor) -> Tensor:
    """Return how often each class was predicted for each, shape (frames, classes, classes)."""
    classes = int(labels.max()) + 1
    tables = []
    for one, truth in zip(found, labels, strict=True):
        known = truth != UNLABELLED
        pairs = truth[known] * classes + one[known].clamp(max=classes - 1)
        tables.append(torch.bincount(pairs, minlength=classes**2).view(classes, classes))
    return torch.stack(tables).double()


def missed(confusion: Tensor) -> float:
    """Return 100 minus the mean intersection over union of the classes that occur, in percent."""
    both = confusion.diagonal()
    either = confusion.sum(0) + confusion.sum(1) - both
    return 100 - 100 * float((both / either)[confusion.sum(1) > 0].mean())


# Tables.


def show(cells: list[Cell]) -> None:
    """Print what the cells say, the worst ones first."""
    online = [cell.alarms > 0 for cell in cells if cell.forgetting == "online"]
    print(
        f"\n{sum(cell.broken for cell in cells)} of {len(cells)} cells break the law; "
        f"{sum(online)} of {len(online)} online streams raised an alarm."
    )
    show_worlds(cells)
    show_sizes(cells)
    show_p_values(cells)
    show_worst(cells)


def groups(cells: Iterable[Cell], *names: str) -> dict[tuple[str | int, ...], list[Cell]]:
    """Return cells by what some of their facts are."""
    found: dict[tuple[str | int, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(getattr(cell, name) for name in names), []).append(cell)
    return found


def show_worlds(cells: list[Cell]) -> None:
    """Print a line for each world; behind its largest differences, samples of the fit and batch."""
    print(
        "\n| world | | untouched | worst shuffled | worst sorted | cells > 0.5 | changed "
        "| online streams with alarms |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    found = groups(cells, "world")
    for world in (each for each in clean_zoo.WORLDS if (each,) in found):
        own, worst = found[(world,)], []
        for order in ORDERS:
            among = [cell for cell in own if cell.order == order]
            top = max(among, key=lambda cell: cell.difference, default=None)
            worst.append(
                "" if top is None else f"{top.difference:+.1f} ({top.samples}, {top.batch})"
            )
        online = [cell for cell in own if cell.forgetting == "online"]
        above = sum(cell.difference > LAW for cell in own)
        print(
            f"| {world} | {clean_zoo.WORLDS[world].__doc__} "
            f"| {np.mean([cell.untouched for cell in own]):.1f} "
            f"| {worst[0]} | {worst[1]} | {above} of {len(own)} "
            f"| {np.mean([cell.changed for cell in own]):.2f} % "
            f"| {sum(cell.alarms > 0 for cell in online)} of {len(online)} |"
        )


def show_sizes(cells: list[Cell]) -> None:
    """Print for which samples of the fit and which streams the law holds."""
    print("\n| samples, at least | order | batch | cells > 0.5 | mean difference | alarms |")
    print("|--:|---|--:|--:|--:|--:|")
    for key, own in sorted(groups(cells, "at_least", "order", "batch").items()):
        online = [cell.alarms > 0 for cell in own if cell.forgetting == "online"]
        alarms = f"{100 * np.mean(online):.0f} % of {len(online)}" if online else ""
        print(
            f"| {' | '.join(map(str, key))} | {sum(cell.difference > LAW for cell in own)} of "
            f"{len(own)} | {np.mean([cell.difference for cell in own]):+.2f} | {alarms} |"
        )


def show_p_values(cells: list[Cell]) -> None:
    """Print how p-values of clean batches are distributed; all methods have the same ones."""
    with_values = [each for each in cells if each.p_values]
    if not with_values:
        return
    method = with_values[0].method
    kept = [each for each in with_values if each.method == method]
    names = " | ".join(f"{100 * each:g} %" for each in QUANTILES)
    print(
        "\nQuantiles of p-values of clean batches in no order, which should be the shares above "
        "them. All batches of one fit are alike, so that a few seeds tell little of one world."
    )
    columns = f"batches | {names} | p < 0.01 | distance"
    for facts in (("at_least", "batch"), ("world", "samples", "batch")):
        print(f"\n| {' | '.join(facts)} | {columns} |")
        print("|---" * len(facts) + "|--:" * (len(QUANTILES) + 3) + "|")
        for key, own in sorted(groups(kept, *facts).items()):
            values = np.sort([float(each) for cell in own for each in cell.p_values.split()])
            at = " | ".join(f"{each:.3f}" for each in np.quantile(values, QUANTILES))
            rare = 100 * np.mean(values < RARE)
            print(
                f"| {' | '.join(map(str, key))} | {len(values)} | {at} | {rare:.1f} % "
                f"| {distance(values):.2f} |"
            )


def distance(values: np.ndarray) -> float:
    """Return how far sorted values are from uniform ones, after Kolmogorov and Smirnov."""
    steps = np.arange(len(values) + 1) / len(values)
    return float(max(np.max(steps[1:] - values), np.max(values - steps[:-1])))


def show_worst(cells: list[Cell], most: int = 60) -> None:
    """Print a line for each kind of stream, averaged over seeds, the worst first."""
    facts = ("world", "samples", "batch", "order", "method", "forgetting")
    rows = []
    for key, own in groups(cells, *facts).items():
        difference = float(np.mean([cell.difference for cell in own]))
        margin = float(np.mean([cell.margin for cell in own])) / len(own) ** 0.5
        rows.append((difference, margin, key, own))
    rows.sort(key=lambda row: -row[0])
    print(f"\n| {' | '.join(facts)} | stream | untouched | difference | changed | alarms |")
    print("|---|--:|--:|---|---|---|--:|--:|--:|--:|--:|")
    for difference, margin, key, own in rows[:most]:
        alarms = f"{sum(cell.alarms > 0 for cell in own)} of {len(own)}"
        print(
            f"| {' | '.join(map(str, key))} | {own[0].stream} "
            f"| {np.mean([cell.untouched for cell in own]):.1f} | {difference:+.2f} ± {margin:.2f} "
            f"| {np.mean([cell.changed for cell in own]):.1f} % "
            f"| {alarms if key[-1] == 'online' else ''} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
