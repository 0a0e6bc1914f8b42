"""Measure methods on ImageNet photographs, with intervals; hours, and it goes on if cut off.

    python scripts/photographs.py mobilenet_v2 --photos DIR --weights FILE --frost DIR --to FOLDER
    python scripts/photographs.py table --to FOLDER

There is one photograph of each of 1,000 classes. In each of three splits a filter is fitted on 700
of them and methods are tested on the other 300; no photograph is tested twice. Every line of a file
of results says which photographs of a split a method got right in one condition.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ttapca
from ttapca import networks
from ttapca.benchmark import recommended_layer
from ttapca.corruptions import STANDARD, corrupt
from ttapca.datasets import read_image_folder, to_tensor

PHOTOS, SPLITS, TESTED, SEED = 1000, 3, 300, 0
NETWORKS: dict[str, dict[str, Any]] = {
    "mobilenet_v2": {"normalisation": "imagenet"},
    "resnet50": {
        "architecture": "resnet50-early-stride",
        "normalisation": "imagenet-255",
        "eps": 1e-3,
    },
}
# A single photograph has no batch that `bn` could normalise by, or `tent` learn from.
MEASURED = {50: ("source", "bn", "wiener", "tent", "pea"), 1: ("wiener",)}
SLOW = ("tent", "pea")
CONDITIONS = [("clean", 0), *((name, severity) for severity in (5, 3) for name in STANDARD)]
DRAWS = 2000  # of the bootstrap
GOALS = (("wiener", 50, "bn", 50), ("wiener", 1, "source", 50))  # differences that are reported

Cell = tuple[str, int, int, str, int]  # method, batch size, split, corruption, severity


def tested_in(split: int) -> NDArray[np.int64]:
    """The photographs that are tested in a split, in the order of the stream."""
    order = np.random.default_rng(SEED).permutation(PHOTOS)
    return order[split * TESTED : (split + 1) * TESTED]


def cells(asked: argparse.Namespace) -> list[Cell]:
    """Everything that is asked for, split by split, quick methods first."""
    found = [
        (method, size, split, corruption, severity)
        for size, methods in MEASURED.items()
        for method in methods
        for split in asked.splits
        for corruption, severity in CONDITIONS
        if size in asked.sizes and severity in (0, *asked.severities) and method in asked.methods
    ]
    return sorted(found, key=lambda cell: (cell[2], cell[-1] == 3, cell[0] in SLOW))


def run(asked: argparse.Namespace) -> None:
    """Measure what the file of results does not have."""
    photos = read_image_folder(asked.photos, size=224, shorter_side=256)
    network = networks.load(asked.weights, **NETWORKS[asked.network])
    network = network.to(memory_format=torch.channels_last)  # quicker, above all for MobileNetV2
    layer = recommended_layer(network, photos)
    asked.to.mkdir(parents=True, exist_ok=True)
    file = asked.to / f"{asked.network}-{asked.tested}.jsonl"
    known = {tuple(row["cell"]) for row in read(file)}
    wanted = [cell for cell in cells(asked) if cell not in known]
    done = 0
    for (method, size, split), group in itertools.groupby(wanted, key=lambda cell: cell[:3]):
        tested = tested_in(split)
        few = tested[: asked.tested]
        rest = np.setdiff1d(np.arange(len(photos)), tested)
        source = [to_tensor(photos.images[some]) for some in np.array_split(rest, len(rest) // 25)]
        options: dict[str, object] = {}
        if method == "wiener":
            folder = asked.to / f"{asked.network}-filter-{split}"
            if not folder.exists():
                ttapca.fit(network, layer, source).save(folder)
            options["filter"] = ttapca.load(folder)
        if method == "pea":
            options["source"] = source
        with ttapca.adapt(network, method, forgetting="online", **options) as adapted:
            for cell in group:
                pixels = spoilt(photos.images, tested, *cell[3:], asked.frost, asked.to)
                right, seconds = measured(adapted, pixels[: len(few)], few, size)
                row = {"cell": cell, "seconds": seconds, "right": few[right].tolist()}
                with file.open("a") as to:
                    to.write(json.dumps(row) + "\n")
                done += 1
                error = 100 * (1 - right.mean())
                words = f"{error:.1f} % wrong, {seconds:.0f} s"
                print(f"{done} of {len(wanted)}: {cell}: {words}", flush=True)


def spoilt(
    photos: NDArray[np.uint8],
    rows: NDArray[np.int64],
    corruption: str,
    severity: int,
    frost: Path,
    to: Path,
) -> NDArray[np.uint8]:
    """The chosen photographs, corrupted; kept on disk, since every method wants them."""
    if not severity:
        return photos[rows]
    file = to / "corrupted" / f"{corruption}-{severity}-{rows[0]}.npy"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        pixels = corrupt(photos[rows], corruption, severity, indices=rows, textures=frost)
        part = file.with_suffix(".part.npy")
        np.save(part, pixels)
        part.replace(file)
    return np.load(file)


def measured(
    adapted: ttapca.Adapter, pixels: NDArray[np.uint8], labels: NDArray[np.int64], size: int
) -> tuple[NDArray[np.bool_], float]:
    """Which photographs of a stream that begins here are classified right, and the seconds."""
    adapted.reset()
    found = []
    start = time.perf_counter()
    for first in range(0, len(pixels), size):
        found.append(adapted(to_tensor(pixels[first : first + size])).argmax(1).numpy())
    return np.concatenate(found) == labels, round(time.perf_counter() - start, 1)


def tables(folder: Path) -> str:
    """Markdown tables of all results, with intervals from a bootstrap over photographs."""
    parts = []
    for file in sorted(folder.glob("*.jsonl")):
        network, _, tested = file.stem.removeprefix("photographs-").rpartition("-")
        rows = read(file)
        for severity in sorted({row["cell"][-1] for row in rows} - {0}, reverse=True):
            parts += _tables(network, severity, rows, int(tested))
    return "\n".join(parts)


def _tables(network: str, severity: int, rows: list[dict[str, Any]], tested: int) -> list[str]:
    """One table for the splits that most methods have, and one for each set that others have."""
    right = {
        tuple(row["cell"]): set(row["right"]) for row in rows if row["cell"][-1] in (0, severity)
    }
    splits: dict[tuple[str, int], set[int]] = {}
    for method, size, split, *_ in right:
        whole = all((method, size, split, *each) in right for each in _conditions(severity))
        splits.setdefault((method, size), set()).update({split} if whole else ())
    lines: list[str] = []
    for common in sorted({tuple(sorted(each)) for each in splits.values() if each}, reverse=True):
        # The same photographs for all methods of a table, so that they can be compared.
        measured = sorted(key for key, own in splits.items() if own.issuperset(common))
        tests = [(split, photo) for split in common for photo in tested_in(split)[:tested]]
        ordered = sorted(measured, key=lambda key: -key[1])
        wrong = {key: _wrong(right, *key, tests, severity) for key in ordered}
        where = f"splits {', '.join(map(str, common))}"
        lines.append(f"### {network}, severity {severity}, {len(tests)} photographs, {where}\n")
        lines += _table(wrong, len(tests))
    return lines


Wrong = dict[tuple[str, int], tuple[NDArray[np.bool_], NDArray[np.bool_]]]


def _table(wrong: Wrong, photos: int) -> list[str]:
    drawn = np.random.default_rng(SEED).integers(photos, size=(DRAWS, photos))
    lines = [
        "| method | batch | mean of 15 | " + " | ".join(STANDARD) + " | clean |",
        "|:--|--:|--:|" + "--:|" * (len(STANDARD) + 1),
    ]
    for (method, size), (table, clean) in wrong.items():
        low, high = _interval(table.mean(1)[drawn].mean(1))
        mean = f"{100 * table.mean():.1f} ({low:.1f} to {high:.1f})"
        cells = " | ".join(f"{100 * error:.1f}" for error in (*table.mean(0), clean.mean()))
        lines.append(f"| {method} | {size} | {mean} | {cells} |")
    lines.append("")
    for method, size, rival, rival_size in GOALS:
        if (method, size) in wrong and (rival, rival_size) in wrong:
            gain = wrong[rival, rival_size][0].mean(1) - wrong[method, size][0].mean(1)
            low, high = _interval(gain[drawn].mean(1))
            at = " one at a time" if size == 1 else ""
            lines.append(
                f"`{method}`{at} is {100 * gain.mean():.1f} points under `{rival}` "
                f"({low:.1f} to {high:.1f}).\n"
            )
    return lines


def _conditions(severity: int) -> list[tuple[str, int]]:
    return [*((name, severity) for name in STANDARD), ("clean", 0)]


def _wrong(
    right: dict[tuple[Any, ...], set[int]],
    method: str,
    size: int,
    tests: list[tuple[int, int]],
    severity: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which photographs are wrong, (photographs, corruptions), and on clean ones."""
    columns = [
        [photo not in right[method, size, split, *condition] for split, photo in tests]
        for condition in _conditions(severity)
    ]
    table = np.array(columns).T
    return table[:, :-1], table[:, -1]


def _interval(means: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(100 * means, (0.025, 0.975))
    return float(low), float(high)


def read(file: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of results."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=[*NETWORKS, "table"])
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--frost", type=Path, help="photographs of frost: `ttapca data get frost`")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(MEASURED))
    parser.add_argument("--severities", type=int, nargs="+", default=[5, 3])
    parser.add_argument("--splits", type=int, nargs="+", default=list(range(SPLITS)))
    parser.add_argument("--tested", type=int, default=TESTED, help="photographs of each split")
    parser.add_argument("--methods", nargs="+", default=list(MEASURED[50]))
    asked = parser.parse_args()
    if asked.network == "table":
        print(tables(asked.to))
    else:
        run(asked)


if __name__ == "__main__":
    main()
