"""The paper's network on this machine: WRN-28-10, a batch of 200 through fit, adapt and predict.

The weights are random (the published ones are 146 MB and change no time); the images have the
spectrum of photographs. Prints seconds and the peak memory of a process for each stage.

    python benchmarks/wrn.py [--images 2000] [--components 1000] [--batch 200]
"""

from __future__ import annotations

import argparse

import torch

import ttapca
from common import Loader, in_own_process, natural_images, timed
from ttapca import models

NETWORK = "wrn-28-10"
LAYER = "conv1"
METHODS = ("source", "bn", "ttapca-relu")


def fitted(images: int, components: int) -> tuple[torch.nn.Module, float, ttapca.FittedFilter]:
    network = models.build(NETWORK).eval()
    loader = Loader(natural_images(images))
    seconds, result = timed(lambda: ttapca.fit(network, LAYER, loader, components))
    return network, seconds, result


def fit_only(images: int, components: int) -> tuple[float, object]:
    _, seconds, result = fitted(images, components)
    return seconds, str(result)


def predict(method: str, images: int, components: int, batch: int) -> tuple[float, object]:
    """One batch, as the method predicts it, the filter being there already."""
    network, _, result = fitted(images, components)
    adapted = ttapca.adapt(network, method, filter=result)
    samples = natural_images(batch, seed=1).float() / 255
    seconds, logits = timed(lambda: adapted(samples))
    return seconds, (adapted.n_parameters, bool(torch.isfinite(logits).all()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--components", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=200)
    options = parser.parse_args()
    table = models.describe_layers(models.build(NETWORK), (3, 32, 32), options.components)
    print(
        f"{NETWORK}: {table.parameters:,} parameters, {table.multiply_adds / 1e9:.2f} billion "
        f"multiply-adds an image, {torch.get_num_threads()} threads"
    )
    fit = in_own_process(fit_only, options.images, options.components)
    print(f"  fit `{LAYER}` on {options.images:,} images: {fit.result}")
    print(f"  {'stage':28s} {'seconds':>9s} {'peak GB':>8s} {'adapted':>8s}")
    print(f"  {'fit':28s} {fit.seconds:9.1f} {fit.peak_gb:8.2f}")
    for method in METHODS:
        row = in_own_process(predict, method, options.images, options.components, options.batch)
        parameters, finite = row.result
        name = f"{method}, batch of {options.batch}"
        print(f"  {name:28s} {row.seconds:9.1f} {row.peak_gb:8.2f} {parameters:8,}")
        if not finite:
            raise SystemExit(f"{method} gave logits that are not finite")


if __name__ == "__main__":
    main()
