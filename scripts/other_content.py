"""Measure `wiener` on photographs that show something else, in no order; two minutes a network.

    python scripts/other_content.py WEIGHTS --normalise cifar10 --root DIR

Fifteen changes of CIFAR-10's test images that no filter of the spectrum can undo, such as turning
or inverting them. What is asked: that `wiener` makes nothing worse than the untouched network.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import ttapca
from ttapca import datasets, networks
from ttapca.benchmark import recommended_layer
from ttapca.datasets import to_tensor

FITTED, IMAGES, BATCH = 10_000, 600, 200


def changes(x: Tensor) -> dict[str, Tensor]:
    """The images, changed in fifteen ways."""
    grey, blurred = x.mean(1, keepdim=True).expand_as(x), functional.avg_pool2d(x, 5, 1, 2)
    cos, sin = math.cos(math.pi / 6), math.sin(math.pi / 6)
    turn = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(x), 2, 3)
    grid = functional.affine_grid(turn, list(x.shape), align_corners=False)
    sample = {"padding_mode": "reflection", "align_corners": False}
    occluded, framed = x.clone(), torch.zeros_like(x)
    occluded[..., 16:] = 0.5
    framed[..., 4:-4, 4:-4] = x[..., 4:-4, 4:-4]
    detail = x - functional.avg_pool2d(x, 3, 1, 1)
    return {
        "turned by 90 degrees": x.rot90(1, (2, 3)),
        "turned by 30 degrees": functional.grid_sample(x, grid, **sample),
        "upside down": x.flip(2),
        "inverted": 1 - x,
        "grey": grey,
        "red and blue exchanged": x.flip(1),
        "black and white": (grey > grey.mean((2, 3), keepdim=True)).float(),
        "four levels": (3 * x).round() / 3,
        "dark": x**2.5,
        "edges": (2 * (x - blurred) + 0.5).clamp(0, 1),
        "sharpened": (x + 1.5 * detail).clamp(0, 1),
        "near": functional.interpolate(x[..., 8:24, 8:24], scale_factor=2, mode="bilinear"),
        "far, on grey": functional.pad(functional.avg_pool2d(x, 2), (8, 8, 8, 8), value=0.5),
        "half hidden": occluded,
        "in a black frame": framed,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--normalise", help="for files of weights")
    parser.add_argument("--root", type=Path, required=True, help="folder that holds CIFAR-10")
    asked = parser.parse_args()
    network = networks.load(asked.weights, normalisation=asked.normalise)
    train, test = (datasets.load("cifar10", part, root=asked.root) for part in ("train", "test"))
    source = list(to_tensor(train.images[:FITTED]).split(BATCH))
    fitted = ttapca.fit(network, recommended_layer(network, train), source)
    labels = torch.as_tensor(test.labels[:IMAGES])
    print('| photographs | untouched | `wiener` | `order="shuffled"` |\n|---|--:|--:|--:|')
    sums = torch.zeros(3)
    found = changes(to_tensor(test.images[:IMAGES]))
    for name, images in found.items():
        errors = []
        for order in (None, "auto", "shuffled"):
            if order is None:
                with torch.no_grad():
                    logits = torch.cat([network(batch) for batch in images.split(BATCH)])
            else:
                options = {"filter": fitted, "forgetting": "online", "order": order}
                with ttapca.adapt(network, "wiener", **options) as adapted:
                    logits = torch.cat([adapted(batch) for batch in images.split(BATCH)])
            errors.append(float(100 * (logits.argmax(1) != labels).double().mean()))
        sums += torch.tensor(errors)
        print(f"| {name} | " + " | ".join(f"{each:.1f}" for each in errors) + " |", flush=True)
    print("| mean | " + " | ".join(f"{each / len(found):.1f}" for each in sums.tolist()) + " |")


if __name__ == "__main__":
    main()
