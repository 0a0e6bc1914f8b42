"""Choose the constants of the closed form, one after the other, on held-out conditions only.

    python scripts/tune_closed_form.py WEIGHTS FILTER --to scripts/results/tuning.json
        [--normalise cifar10] [--data cifar10] [--home DIR] [--images 200] [--only threshold,last]

Every setting is written as soon as it is measured: run it again to go on. A setting's score is its
mean error over the conditions of `held_out.py`, at batches of 200 and of one, plus twice what it
costs on clean images, where a filter must do nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import ttapca
from held_out import held_out
from ttapca import networks
from ttapca.datasets import Images, load
from ttapca.methods import Mixture, Wiener

# In the order in which they are chosen; each list holds the values that are tried.
CANDIDATES: dict[str, list[float]] = {
    "last": [0.5, 0.7, 0.9, 1.0],
    "first": [0.0, 0.1, 0.2],
    "shrink": [0.75, 1.0, 0.5, 1.25],
    "restore": [0.0, 0.3, 0.6, 0.9],
    "threshold": [0.3, 0.6, 0.8, 0.9],
    "prior": [4.0, 16.0, 64.0],
    "limit": [16.0, 64.0],
}
START = {
    "last": 0.9, "first": 0.1, "shrink": 1.0, "restore": 0.6,
    "threshold": 0.8, "prior": 16.0, "limit": 64.0,
}  # fmt: skip
BATCHES = (200, 1)
SINGLES = 30  # images a condition at a batch of one: each is a forward pass of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("filter", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--normalise")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--home", type=Path, required=True, help="where data and frost lie")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--only", default=",".join(CANDIDATES))
    asked = parser.parse_args()
    network = networks.load(asked.weights, normalisation=asked.normalise)
    fitted = ttapca.load(asked.filter)
    data = held_out(load(asked.data, "train", root=asked.home), asked.images, asked.home)
    ledger = Ledger(asked.to, f"{asked.weights.stem}, {asked.images} images")
    best = dict(START)
    for name in asked.only.split(","):
        scores = {
            value: ledger.score(network, fitted, data, best | {name: value})
            for value in CANDIDATES[name]
        }
        best[name] = min(scores, key=scores.__getitem__)
        print(f"{name}: {best[name]} of", {v: round(s, 2) for v, s in scores.items()}, flush=True)
    print("chosen", best)


class Ledger:
    """What was measured, in a file."""

    def __init__(self, path: Path, network: str) -> None:
        self.path = path
        self.network = network
        self.known = json.loads(path.read_text()) if path.exists() else {}
        self.known.setdefault(network, {})

    def score(
        self,
        network: torch.nn.Module,
        fitted: ttapca.FittedFilter,
        data: dict[str, Images],
        constants: dict[str, float],
    ) -> float:
        """The score of a setting, measured now or before."""
        key = ", ".join(f"{name}={value:g}" for name, value in sorted(constants.items()))
        mine = self.known[self.network]
        if key not in mine:
            mine[key] = measure(network, fitted, data, constants)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")
        errors = mine[key]
        if "source" not in mine:
            mine["source"] = measure(network, None, data, constants)
        source = mine["source"]
        total = 0.0
        for size in map(str, BATCHES):
            spoilt = [error for name, error in errors[size].items() if name != "clean"]
            lost = max(0.0, errors[size]["clean"] - source[size]["clean"])
            total += sum(spoilt) / len(spoilt) + 2 * lost
        print(f"  {total:6.2f}  {key}", flush=True)
        return total


def measure(
    network: torch.nn.Module,
    fitted: ttapca.FittedFilter | None,
    data: dict[str, Images],
    constants: dict[str, float],
) -> dict[str, dict[str, float]]:
    """Error in percent by size of batch and condition; without a filter, of the plain network."""
    found: dict[str, dict[str, float]] = {}
    for size in BATCHES:
        if fitted is None:
            adapter = ttapca.adapt(network, "source")
        else:
            mixture = Mixture(constants["first"], constants["last"], constants["prior"])
            method = Wiener(
                fitted,
                statistics=mixture,
                shrink=constants["shrink"],
                restore=constants["restore"],
                threshold=constants["threshold"],
                largest_ratio=constants["limit"],  # its name in the files of results
            )
            adapter = ttapca.adapt(network, method)
        try:
            found[str(size)] = {
                name: networks.evaluate(
                    adapter, images[:SINGLES] if size == 1 else images, batch_size=size
                ).error
                for name, images in data.items()
            }
        finally:
            adapter.detach()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
