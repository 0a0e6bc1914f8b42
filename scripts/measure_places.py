"""Measure where a closed-form filter is worth having, and in which basis.

The tables are in docs/closed-form-evidence.md.

    python scripts/measure_places.py cifar --home DIR --corrupted CIFAR_C --filters DIR
    python scripts/measure_places.py digits --filters DIR [--seeds 3]
    python scripts/measure_places.py table

`cifar` is the ResNet-20 of the package, `digits` a small vision transformer that is trained here.
Every row is written as soon as it is measured, and every filter when it is fitted: run it again to
go on. The constants of `wiener` are its defaults; nothing is chosen by these numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ttapca
from digits_transformer import digits_transformer
from ttapca import networks
from ttapca.benchmark import ImageSource
from ttapca.corruptions import STANDARD
from ttapca.datasets import Images, TensorBatches, load, read_cifar_c, read_digits
from ttapca.fitting.plan import RouteChoice

SEVERITY = 5
RESULTS = Path(__file__).parent / "results" / "places.json"


@dataclass(frozen=True)
class Place:
    """A layer and a basis: what one filter is fitted with."""

    layer: str
    route: RouteChoice = "pca"
    components: int | None = None


@dataclass(frozen=True)
class Row:
    """Filters at some places, and how they are run."""

    places: tuple[str, ...] = ()
    batch: int = 250
    images: int = 500
    method: str = "wiener"
    options: dict[str, Any] = field(default_factory=dict)


# `cosines` at the stem are those of the pixels. The stages have 16,384 and 8,192 outputs, which is
# too many for all components: what lies outside is scaled by the last gain.
CIFAR_PLACES = {
    "stem": Place("conv1"),
    "pixels": Place("normalise"),
    "cosines": Place("conv1", "dct"),
    "stem bn cosines": Place("bn1", "dct"),
    "stage 1": Place("layer1", "randomised", 1000),
    "stage 1 cosines": Place("layer1", "dct"),
    "stage 2": Place("layer2", "randomised", 1000),
}
CIFAR_TRAINING_IMAGES = 10_000

DIGITS_PLACES = {
    "patches": Place("patches"),
    "pixels": Place("normalise"),
    "cosines": Place("patches", "dct"),
    "block 1": Place("blocks.0"),
}


def combined(
    places: list[tuple[str, ...]], batch: int, images: int, **options: Any
) -> dict[str, Row]:
    """A row for each combination, named by it."""
    note = ", ".join(["", *(f"{name} {value}" for name, value in options.items())])
    return {
        f"{' + '.join(one)}{note}, batch {batch}": Row(one, batch, images, options=options)
        for one in places
    }


CIFAR_ROWS = {
    "source": Row(method="source"),
    "bn": Row(method="bn"),
    "statistics alone": Row(("stem",), options={"shrink": 0.0, "restore": 0.0}),
    **combined([("stem",), ("pixels",), ("cosines",)], 250, 500),
    **combined([("stem",), ("pixels",), ("cosines",)], 250, 500, statistics="source"),
    "source, 100 images": Row(images=100, method="source"),
    **combined([("stem",), ("pixels",), ("cosines",)], 1, 100),
    **combined([("stem", "stem bn cosines"), ("stage 1 cosines",)], 250, 500),
    **combined([("stem", "stage 1 cosines")], 250, 500),
    **combined([("stage 1",), ("stem", "stage 1")], 250, 500),
    **combined([("stage 1",), ("stem", "stage 1")], 250, 500, statistics="source"),
    **combined([("stage 1",), ("stem", "stage 1")], 1, 100),
    **combined([("stage 2",), ("stem", "stage 2"), ("stem", "stage 1", "stage 2")], 250, 500),
}

DIGITS_COMBINED = [("patches",), ("pixels",), ("cosines",), ("block 1",), ("patches", "block 1")]
DIGITS_ROWS = {
    "source": Row(images=596, method="source"),
    **combined(DIGITS_COMBINED, 100, 596),
    "source, 200 images": Row(images=200, method="source"),
    **combined(DIGITS_COMBINED, 1, 200),
}


class Subject:
    """A network, its data, and the filters that are fitted on it when they are first needed."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        train: Images,
        conditions: dict[str, Images],
        places: dict[str, Place],
        filters: Path,
    ) -> None:
        self.name, self.network, self.train = name, network, train
        self.conditions, self.places = conditions, places
        self._folder = filters / name.replace(" ", "-").replace(",", "")

    def filter(self, place: str) -> ttapca.FittedFilter:
        """The filter of a place, fitted now or before."""
        folder = self._folder / place.replace(" ", "-")
        if not folder.exists():
            wish = self.places[place]
            data = TensorBatches(self.train, 250)
            fitted = ttapca.fit(self.network, wish.layer, data, wish.components, route=wish.route)
            fitted.save(folder)
        return ttapca.load(folder)

    def measure(self, row: Row) -> dict[str, Any]:
        """Error in percent by condition, and what the filters are."""
        filters = [self.filter(place) for place in row.places]
        options = row.options | ({"filter": filters} if filters else {})
        adapter = ttapca.adapt(self.network, row.method, **options)
        try:
            errors = {
                name: networks.evaluate(adapter, images[: row.images], batch_size=row.batch).error
                for name, images in self.conditions.items()
            }
        finally:
            adapter.detach()
        spoilt = [error for name, error in errors.items() if name != "clean"]
        return {
            "images": row.images,
            "filters": [f"{one.route}: {one!r}" for one in filters],
            "mean": sum(spoilt) / len(spoilt),
            "errors": errors,
        }


def measure_all(subject: Subject, rows: dict[str, Row], to: Path) -> None:
    known = json.loads(to.read_text()) if to.exists() else {}
    mine = known.setdefault(subject.name, {})
    for name, row in rows.items():
        if name in mine:
            continue
        mine[name] = subject.measure(row)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps(known, indent=1) + "\n")
        found = mine[name]
        print(
            f"{subject.name}: {name}: mean {found['mean']:.2f}, "
            f"clean {found['errors']['clean']:.2f}",
            flush=True,
        )


def cifar(asked: argparse.Namespace) -> list[tuple[Subject, dict[str, Row]]]:
    conditions = {"clean": load("cifar10", "test", root=asked.home)[:500]}
    for corruption in STANDARD:
        conditions[corruption] = read_cifar_c(asked.corrupted, corruption, SEVERITY)[:500]
    train = load("cifar10", "train", root=asked.home)[:CIFAR_TRAINING_IMAGES]
    name = "cifar10-resnet20"
    network = networks.load(name)
    return [(Subject(name, network, train, conditions, CIFAR_PLACES, asked.filters), CIFAR_ROWS)]


def digits(asked: argparse.Namespace) -> list[tuple[Subject, dict[str, Row]]]:
    source = ImageSource(read_digits("test"))
    conditions = {"clean": read_digits("test")}
    conditions |= {name: source.images([(name, SEVERITY)]) for name in STANDARD}
    found = []
    for seed in range(asked.seeds):
        name = f"digits transformer, seed {seed}"
        network = digits_transformer(seed)
        # The filters belong to these weights: the same seed gives them again on the same machine.
        train = read_digits("train")
        subject = Subject(name, network, train, conditions, DIGITS_PLACES, asked.filters)
        found.append((subject, DIGITS_ROWS))
    return found


PARTS: dict[str, Callable[[argparse.Namespace], list[tuple[Subject, dict[str, Row]]]]] = {
    "cifar": cifar,
    "digits": digits,
}


def print_table(to: Path) -> None:
    """Mean and clean error of every row, over the seeds of a network, and how it compares.

    The comparison is with the first single filter of the same size of batch and statistics: the
    mean over corruptions and seeds of the difference, and its standard error.
    """
    networks: dict[str, list[dict[str, Any]]] = {}
    for name, rows in json.loads(to.read_text()).items():
        networks.setdefault(name.split(", seed")[0], []).append(rows)
    for name, seeds in networks.items():
        print(f"{name}\n| row | images | mean | clean | against the first |\n|---|--:|--:|--:|--:|")
        first: dict[str, str] = {}
        for row in seeds[0]:
            rest = row.split(", ", 1)[1] if ", batch" in row else ""
            base = first.setdefault(rest, row)
            away = torch.tensor(
                [
                    [rows[row]["errors"][c] - rows[base]["errors"][c] for c in STANDARD]
                    for rows in seeds
                ]
            ).mean(0)
            mean = sum(rows[row]["mean"] for rows in seeds) / len(seeds)
            clean = sum(rows[row]["errors"]["clean"] for rows in seeds) / len(seeds)
            error = float(away.std()) / len(away) ** 0.5
            versus = f"{float(away.mean()):+.1f} ± {error:.1f}" if rest and row != base else ""
            count = seeds[0][row]["images"]
            print(f"| {row} | {count} | {mean:.1f} | {clean:.1f} | {versus} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "table"])
    parser.add_argument("--filters", type=Path, help="where fitted filters are kept")
    parser.add_argument("--home", type=Path, help="where CIFAR-10 lies")
    parser.add_argument("--corrupted", type=Path, help="a folder of the CIFAR-C layout")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--to", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.part == "table":
        print_table(asked.to)
        return
    for subject, rows in PARTS[asked.part](asked):
        measure_all(subject, rows, asked.to)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
