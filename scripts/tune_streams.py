"""Measure the parts and constants of `wiener` on streams, with images that the network never saw.

    python scripts/tune_streams.py WEIGHTS FILTER DATA --to scripts/results/tuning-streams.json
        [--home DIR] [--images 500] [--only parts,SURE] [--streams shuffled,sorted] [--table]

DATA holds the images that the network was not trained on, as its `test` split: on images that it
has memorised, its clean error is 0, and nothing that is chosen there holds elsewhere. Conditions
are those of `held_out.py`. Every number is written as soon as it is measured: run it again to go
on. `--table` prints what is known.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ttapca
from held_out import held_out
from ttapca import networks
from ttapca.datasets import Images, load, to_tensor

CONDITIONS = (
    *("clean", "speckle_noise_5", "gaussian_blur_5", "spatter_5", "saturate_5"),
    *("impulse_noise_4", "fog_4", "contrast_4", "jpeg_compression_4"),
)
SINGLES = 200  # images a condition at a batch of one: each is a forward pass of its own

# By name: what an ablation leaves out, or adds.
PARTS: dict[str, dict[str, Any]] = {
    "wiener": {},
    "without composition": {"composition": False},
    "without outliers": {"outliers": False},
    "without states": {"states": 1},
    "without means": {"center": 0.0},
    "without an image's own statistics": {"statistics": ttapca.Mixture(alone=0.0)},
    "with the mirrored image": {"views": 2},
    "source statistics": {"statistics": "source"},
}
# By name: the module of a constant, and the values that are tried; the first is the one in use.
CONSTANTS: dict[str, tuple[str, list[float]]] = {
    "SURE": ("ttapca.spectral.composition", [6.0, 3.0, 12.0]),
    "CLASS_MEMORY": ("ttapca.spectral.composition", [20.0, 5.0, 80.0]),
    "SOURCE_SAMPLES": ("ttapca.spectral.composition", [1.0, 20.0]),
    "SOURCE_PER_CLASS": ("ttapca.spectral.composition", [2.0, 0.5, 8.0]),
    "GLANCE_WEIGHT": ("ttapca.spectral.composition", [0.5, 0.25, 0.75]),
    "ALIKE": ("ttapca.adaptation.composition_passes", [0.75, 0.5, 0.9]),
    "SURPRISE": ("ttapca.adaptation.composition_passes", [0.25, 0.1, 0.5]),
    "ORDERED": ("ttapca.adaptation.composition_passes", [0.3, 0.1, 0.6]),
    "LIKENESS": ("ttapca.spectral.closed_form_rule", [0.1, 0.03, 0.3]),
}


@dataclass(frozen=True)
class Order:
    """How a stream comes.

    Attributes:
        batch: Images in a batch.
        forgetting: As for `ttapca.adapt`.
        by_class: Whether the images of a class come one after another.
        joint: Whether all conditions are one stream: "mixed" in every batch, or "changing".
    """

    batch: int = 100
    forgetting: str = "online"
    by_class: bool = False
    joint: str = ""


STREAMS = {
    "shuffled": Order(),
    "sorted": Order(by_class=True),
    "episodic": Order(forgetting="episodic"),
    "episodic sorted": Order(forgetting="episodic", by_class=True),
    "sorted 16": Order(16, by_class=True),
    "mixed": Order(200, joint="mixed"),
    "changing": Order(joint="changing"),
    "one image": Order(1, forgetting="episodic"),
    "one image sorted": Order(1, by_class=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("filter", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True, help="where frost lies")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--only", default=",".join(["parts", *CONSTANTS]))
    parser.add_argument("--streams", default=",".join(STREAMS))
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    known: dict[str, dict[str, dict[str, float]]] = {}
    if asked.to.exists():
        known = json.loads(asked.to.read_text())
    if asked.table:
        print(table(known))
        return
    model = networks.load(asked.weights).eval()
    fitted = ttapca.load(asked.filter)
    data = held_out(load(asked.data, "test"), asked.images, asked.home)
    for name, options in lines(asked.only.split(",")):
        for stream in asked.streams.split(","):
            if stream not in known.setdefault(name, {}):
                found = errors(model, data, STREAMS[stream], filter=fitted, **options)
                known[name][stream] = found
                asked.to.write_text(json.dumps(known, indent=1) + "\n")
                print(f"{name:28s} {stream:18s} {shown(found)}", flush=True)


def lines(only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what to measure: a name, and options of `wiener`; constants are set meanwhile."""
    if "parts" in only:
        yield from PARTS.items()
    for name, (place, values) in CONSTANTS.items():
        module = importlib.import_module(place)
        if getattr(module, name, None) != values[0]:  # setting it elsewhere would change nothing
            raise SystemExit(f"`{name}` must be {values[0]:g} in {place}; correct CONSTANTS.")
        for value in values[1:] if name in only else ():
            setattr(module, name, value)
            yield f"{name} = {value:g}", {}
        setattr(module, name, values[0])


@torch.no_grad()
def errors(
    model: torch.nn.Module, data: dict[str, Images], order: Order, **options: Any
) -> dict[str, float]:
    """Return the error in percent for each condition, and the forward passes for a batch."""
    calls = [0]
    handle = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    wrong: dict[str, list[Tensor]] = {name: [] for name in CONDITIONS}
    batches = 0
    with ttapca.adapt(model, "wiener", forgetting=order.forgetting, **options) as adapted:  # type: ignore[arg-type]
        for stream in streams(data, order):
            adapted.reset()
            for pixels, labels, names in stream:
                batches += 1
                missed = adapted(pixels).argmax(1) != labels
                for each, name in zip(missed, names, strict=True):
                    wrong[name].append(each)
    handle.remove()
    found = {name: 100 * float(torch.stack(each).double().mean()) for name, each in wrong.items()}
    return found | {"passes": calls[0] / batches}


Batch = tuple[Tensor, Tensor, list[str]]


def streams(data: dict[str, Images], order: Order) -> Iterator[Iterator[Batch]]:
    """Yield streams of batches, each with pixels, labels and conditions."""
    random = np.random.default_rng(0)
    rows: list[list[tuple[str, int]]] = []
    for name in CONDITIONS:
        labels = np.asarray(data[name].labels)
        chosen = random.permutation(len(labels))
        if order.by_class:
            chosen = chosen[np.argsort(labels[chosen], kind="stable")]
        if order.batch == 1:
            chosen = chosen[np.linspace(0, len(chosen) - 1, SINGLES).astype(int)]
        rows.append([(name, int(number)) for number in chosen])
    if order.joint:
        together = [row for some in rows for row in some]
        if order.joint == "mixed":
            together = [together[number] for number in random.permutation(len(together))]
        rows = [together]
    for some in rows:
        yield batches_of(data, some, order.batch)


def batches_of(data: dict[str, Images], rows: list[tuple[str, int]], size: int) -> Iterator[Batch]:
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        pixels = to_tensor(np.stack([np.asarray(data[name].images[row]) for name, row in some]))
        labels = torch.as_tensor([int(data[name].labels[row]) for name, row in some])
        yield pixels, labels, [name for name, _ in some]


def shown(found: dict[str, float]) -> str:
    spoilt = [value for name, value in found.items() if name not in ("clean", "passes")]
    return f"{np.mean(spoilt):.1f} ({found['clean']:.1f}) {found['passes']:.2f}"


def table(known: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return all that was measured: mean error, clean error in brackets, passes for a batch."""
    head = ["", *STREAMS]
    rows = [
        [name, *(shown(each[stream]) if stream in each else "" for stream in STREAMS)]
        for name, each in known.items()
    ]
    marks = ["---", *["--:"] * len(STREAMS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
