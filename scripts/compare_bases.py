"""Compare principal components with cosines for `wiener`, on held-out conditions only.

    python scripts/compare_bases.py NETWORK --home DIR [--normalise cifar10] [--data cifar10]
        [--images 500] [--batch 100] [--seed 0] [--to scripts/results/bases.json]

The filter is at the network's recommended layer, with all components, fitted on all training
images but the last `--images`. These are spoilt as `held_out.py` says, shuffled, and predicted
online: each condition is a stream of its own. Both filters see the same images in the same order.
Fits are timed in seconds of the processor, with one thread. The table has all networks so far.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import ttapca
from held_out import held_out
from ttapca import networks
from ttapca.benchmark.filters import FIT_BATCH, recommended_layer
from ttapca.datasets import Images, TensorBatches, load
from ttapca.networks import ImageNetwork

ROUTES = ("pca", "dct")
RESULTS = Path(__file__).parent / "results" / "bases.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", help="a packaged one, or a file")
    parser.add_argument("--normalise")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--home", type=Path, required=True, help="where data and frost lie")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the images")
    parser.add_argument("--to", type=Path, default=RESULTS)
    asked = parser.parse_args()
    known = json.loads(asked.to.read_text()) if asked.to.exists() else {}
    network = networks.load(asked.network, normalisation=asked.normalise)
    train = load(asked.data, "train", root=asked.home)
    name = f"{Path(asked.network).stem}, batches of {asked.batch}, {asked.images} images"
    name += f", seed {asked.seed}" if asked.seed else ""
    known[name] = compared(network, train, asked)
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    asked.to.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(table(known))


def compared(network: ImageNetwork, train: Images, asked: argparse.Namespace) -> dict[str, Any]:
    """Errors in percent by route and condition, beside those of the plain network."""
    data = held_out(train, asked.images, asked.home)
    found: dict[str, Any] = {"source": {"errors": measured(network, data, asked)}}
    layer = recommended_layer(network, train)
    batches = TensorBatches(train[: len(train) - asked.images], FIT_BATCH)
    for route in ROUTES:
        begun = time.process_time()
        fitted = ttapca.fit(network, layer, batches, route=route)
        seconds = time.process_time() - begun
        adapter = ttapca.adapt(network, "wiener", filter=fitted, forgetting="online")
        try:
            errors = measured(adapter, data, asked)
        finally:
            adapter.detach()
        found[route] = {"seconds": seconds, "route": fitted.route, "errors": errors}
        print(route, fitted, flush=True)
    return found


def measured(
    predict: ttapca.Adapter | ImageNetwork, data: dict[str, Images], asked: argparse.Namespace
) -> dict[str, float]:
    """Errors in percent by condition."""
    errors: dict[str, float] = {}
    for name, images in data.items():
        if isinstance(predict, ttapca.Adapter):
            predict.reset()
        found = networks.evaluate(
            predict, images, batch_size=asked.batch, order="shuffled", seed=asked.seed
        )
        errors[name] = found.error
    return errors


def table(known: dict[str, Any]) -> str:
    """Return the means as a table in Markdown."""
    lines = [
        "| network | untouched | PCA | cosines | cosines - PCA | seconds of the fits |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, found in known.items():
        by_route = {key: found[key]["errors"] for key in ("source", *ROUTES)}
        spoilt = [each for each in by_route["source"] if each != "clean"]
        apart = [by_route["dct"][each] - by_route["pca"][each] for each in spoilt]
        error = stdev(apart) / len(apart) ** 0.5
        cells = [
            f"{mean(errors[each] for each in spoilt):.1f} ({errors['clean']:.1f})"
            for errors in by_route.values()
        ]
        cells.append(f"{mean(apart):+.2f} ± {error:.2f}")
        cells.append(" / ".join(f"{found[route]['seconds']:.0f}" for route in ROUTES))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
