"""Forward pass of the filtered stem (p = 16,384, L = 2,000, batch 200), folded against unfolded.

Prints the time that the filter adds to the stem and the size of its basis; both filters are the
same one, and their outputs are compared. Ratios from one run.

    python benchmarks/forward.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

import ttapca
from common import Loader, interleaved, natural_images, stem, verdict
from ttapca.folding import LinearPart

COMPONENTS = 2000
BATCH = 200


def unfolded(fitted: ttapca.FittedFilter) -> ttapca.FittedFilter:
    """The same filter in the space of the layer's output: V = W B."""
    linear = LinearPart(stem().conv1, fitted.shape)
    basis = torch.cat([linear.apply(part).float() for part in fitted.rebuild.T.split(250)]).T
    return dataclasses.replace(
        fitted,
        route="exact",
        shape=fitted.output_shape,
        project=basis,
        rebuild=None,
        input_mean_=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    fitted = ttapca.fit(stem(), "conv1", Loader(natural_images(4000)), COMPONENTS)
    batch = natural_images(BATCH, seed=1).float() / 255
    models = {"plain": stem(), "folded": stem(), "unfolded": stem()}
    attachments = {
        name: ttapca.attach(models[name], version, "relu")
        for name, version in (("folded", fitted), ("unfolded", unfolded(fitted)))
    }
    with torch.no_grad():
        seconds = interleaved(
            {name: lambda model=model: model(batch) for name, model in models.items()}, repeats
        )
        difference = (models["folded"](batch) - models["unfolded"](batch)).abs().max()
    print(f"stem with {COMPONENTS:,} components, batch {BATCH}, median of {repeats}")
    for name, value in seconds.items():
        print(f"  {name:9s} {1000 * value:8.1f} ms")
    print(f"  largest difference of an output: {float(difference):.1e}")
    added = {name: seconds[name] - seconds["plain"] for name in attachments}
    ratio = added["unfolded"] / added["folded"]
    print(f"  added time, unfolded / folded: {ratio:.1f} (goal 3: {verdict(ratio >= 3)})")
    sizes = {
        name: sum(buffer.nbytes for buffer in attachment.filter.buffers())
        for name, attachment in attachments.items()
    }
    two_matrices = 2 * sizes["unfolded"]
    print(
        f"  basis: folded {sizes['folded'] / 1e6:.0f} MB; unfolded {sizes['unfolded'] / 1e6:.0f} MB"
        f" with one matrix for both ways, {two_matrices / 1e6:.0f} MB with two"
    )
    ratio = two_matrices / sizes["folded"]
    print(f"  two matrices against two: {ratio:.1f} (goal 5: {verdict(ratio >= 5)})")
    print(f"  as this library stores them: {sizes['unfolded'] / sizes['folded']:.1f}")


if __name__ == "__main__":
    main()
