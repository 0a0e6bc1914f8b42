"""Measure what a closed-form filter costs on clean test images, for several sizes of batch.

Give a name, the weights and the filter, and with --to where the numbers go.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import ttapca
from ttapca import networks
from ttapca.datasets import load

SIZES = (200, 64, 16, 4, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("weights", type=Path)
    parser.add_argument("filter", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--normalise")
    parser.add_argument("--clean", default="cifar10")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--images", type=int, default=2000)
    asked = parser.parse_args()
    network = networks.load(asked.weights, normalisation=asked.normalise)
    images = load(asked.clean, "test", root=asked.home)[: asked.images]
    errors = {"source": networks.evaluate(network, images).error}
    adapter = ttapca.adapt(network, "wiener", filter=ttapca.load(asked.filter))
    for size in SIZES:
        errors[str(size)] = networks.evaluate(adapter, images, batch_size=size).error
        print(asked.name, size, errors["source"], errors[str(size)], flush=True)
    known = json.loads(asked.to.read_text()) if asked.to.exists() else {}
    known[f"{asked.name}, {asked.images} images"] = errors
    asked.to.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
