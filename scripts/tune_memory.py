"""Choose how long a stream is remembered, on held-out conditions only.

    python scripts/tune_memory.py WEIGHTS FILTER --to scripts/results/tuning-memory.json
        --home DIR [--normalise cifar10] [--images 300]

Mean error in percent over eight conditions of `held_out.py`, one after the other, with and without
a reset between them (`online`, `continual`), and on clean images before them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import ttapca
from held_out import held_out
from ttapca import networks
from ttapca.datasets import load

MEMORIES = (100.0, 200.0, 500.0, 2000.0)
STREAMS = (("online", 1), ("online", 16), ("online", 100), ("continual", 16), ("continual", 100))
CONDITIONS = (
    *("gaussian_noise_4", "defocus_blur_4", "frost_4", "contrast_4", "pixelate_4"),
    *("jpeg_compression_4", "gaussian_blur_5", "spatter_5"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("filter", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--normalise")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--images", type=int, default=300)
    asked = parser.parse_args()
    network = networks.load(asked.weights, normalisation=asked.normalise)
    fitted = ttapca.load(asked.filter)
    data = held_out(load("cifar10", "train", root=asked.home), asked.images, asked.home)
    known = json.loads(asked.to.read_text()) if asked.to.exists() else {}
    for forgetting, size in STREAMS:
        for memory in MEMORIES:
            name = f"{forgetting}, batch {size}, memory {memory:g}"
            if name in known:
                continue
            adapter = ttapca.adapt(
                network, "wiener", filter=fitted, forgetting=forgetting, memory=memory
            )
            errors = []
            for condition in ("clean", *CONDITIONS):
                adapter.start_condition()
                errors.append(networks.evaluate(adapter, data[condition], batch_size=size).error)
            adapter.detach()
            known[name] = {"clean": errors[0], "mean": sum(errors[1:]) / len(CONDITIONS)}
            asked.to.write_text(json.dumps(known, indent=1) + "\n")
            print(name, known[name], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
