"""Measure methods on test images at severity 5: tables of docs/closed-form-evidence.md.

    python scripts/measure_closed_form.py NAME WEIGHTS FILTER CIFAR_C --to scripts/results/...json
        [--normalise cifar10] [--clean DATA --home DIR] [--rows "bn;wiener"] [--images 2000]

Every row is written as soon as it is measured: run it again to go on. Rows are in `ROWS`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ttapca
from ttapca import networks
from ttapca.corruptions import STANDARD
from ttapca.datasets import Images, load, read_cifar_c


@dataclass(frozen=True)
class Row:
    """A method and how it is run."""

    method: str
    batch: int = 200
    forgetting: str = "episodic"
    options: dict[str, Any] = field(default_factory=dict)
    components: int | None = None
    filtered: bool = True


# Rounding to 256 levels, in the units of CIFAR-10 images whose standard deviation is near 1/4.
FLOOR = (4 / 255) ** 2 / 12


def closed(**options: Any) -> Row:
    return Row("wiener", options=options)


ROWS = {
    "source": Row("source", filtered=False),
    "bn": Row("bn", filtered=False),
    "tent episodic": Row("tent", filtered=False, options={"logits": "after"}),
    "tent online": Row("tent", forgetting="online", filtered=False),
    "wiener": Row("wiener"),
    "wiener, batch 64": Row("wiener", 64),
    "wiener, batch 16": Row("wiener", 16),
    "wiener, batch 4": Row("wiener", 4),
    "wiener, batch 1": Row("wiener", 1),
    "bn, batch 16": Row("bn", 16, filtered=False),
    "bn, batch 4": Row("bn", 4, filtered=False),
    "wiener online": Row("wiener", forgetting="online"),
    "wiener online, batch 64": Row("wiener", 64, forgetting="online"),
    "wiener online, batch 16": Row("wiener", 16, forgetting="online"),
    "wiener online, batch 4": Row("wiener", 4, forgetting="online"),
    "wiener online, batch 1": Row("wiener", 1, forgetting="online"),
    "bn, batch 64": Row("bn", 64, filtered=False),
    "bn, batch 1": Row("bn", 1, filtered=False),
    "tent online, batch 16": Row("tent", 16, forgetting="online", filtered=False),
    "tent online, batch 1": Row("tent", 1, forgetting="online", filtered=False),
    "match": Row("match"),
    "two-sided": Row("two-sided"),
    "tent online over wiener": Row(
        "tent", forgetting="online", options={"gain": "wiener", "statistics": "mixed"}
    ),
    "eata online over wiener": Row(
        "eata", forgetting="online", options={"gain": "wiener", "statistics": "mixed"}
    ),
    "ttapca-closed online": Row("ttapca-closed", forgetting="online", components=1000),
    "filter alone": closed(statistics="source"),
    "filter, batch statistics": closed(statistics="batch"),
    "filter, even mixture 0.3": closed(statistics=ttapca.Mixture(0.3, 0.3, 0.0)),
    "statistics alone": closed(shrink=0.0, restore=0.0),
    "filter alone, batch 1": Row("wiener", 1, options={"statistics": "source"}),
    "threshold 0.2, batch 1": Row("wiener", 1, options={"threshold": 0.2}),
    "exponents (1, 0)": closed(shrink=1.0, restore=0.0),
    "exponents (1, 1/4)": closed(shrink=1.0, restore=0.25),
    "exponents (1, 1/2)": closed(shrink=1.0, restore=0.5),
    "exponents (1/2, 1/2)": closed(shrink=0.5, restore=0.5),
    "window of 51": closed(window=51),
    "window of 11": closed(window=11),
    "no smoothing": closed(window=1),
    "centred": closed(center=1.0),
    "noise floor of 8 bits": closed(floor=FLOOR),
    "components 50": Row("wiener", components=50),
    "components 250": Row("wiener", components=250),
    "components 500": Row("wiener", components=500),
    "components 1000": Row("wiener", components=1000),
    "components 2000": Row("wiener", components=2000),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("weights", type=Path)
    parser.add_argument("filter", type=Path)
    parser.add_argument("corrupted", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--normalise")
    parser.add_argument("--clean", default="cifar10")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--rows", default="source;bn;wiener")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--severity", type=int, default=5)
    asked = parser.parse_args()
    network = networks.load(asked.weights, normalisation=asked.normalise)
    fitted = ttapca.load(asked.filter)
    data = {"clean": load(asked.clean, "test", root=asked.home)[: asked.images]}
    for corruption in STANDARD:
        spoilt = read_cifar_c(asked.corrupted, corruption, asked.severity)
        data[corruption] = spoilt[: asked.images]
    known = json.loads(asked.to.read_text()) if asked.to.exists() else {}
    mine = known.setdefault(f"{asked.name}, {asked.images} images", {})
    for name in asked.rows.split(";"):
        row = ROWS[name]
        if name in mine:
            continue
        mine[name] = measure(network, fitted, data, row)
        asked.to.parent.mkdir(parents=True, exist_ok=True)
        asked.to.write_text(json.dumps(known, indent=1) + "\n")
        spoilt_errors = [error for key, error in mine[name].items() if key != "clean"]
        mean = sum(spoilt_errors) / len(spoilt_errors)
        print(f"{asked.name}: {name}: mean {mean:.2f}, clean {mine[name]['clean']:.2f}", flush=True)


def measure(
    network: torch.nn.Module, fitted: ttapca.FittedFilter, data: dict[str, Images], row: Row
) -> dict[str, float]:
    """Error in percent by condition."""
    options = dict(row.options)
    if row.filtered:
        options["filter"] = fitted.truncated(row.components) if row.components else fitted
    adapter = ttapca.adapt(network, row.method, forgetting=row.forgetting, **options)
    found = {}
    try:
        for name, images in data.items():
            adapter.start_condition()
            found[name] = networks.evaluate(adapter, images, batch_size=row.batch).error
    finally:
        adapter.detach()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
