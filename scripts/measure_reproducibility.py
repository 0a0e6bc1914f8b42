"""What is the same, bit for bit, when `train`, `fit` and adaptation run again: here, and elsewhere.

    python scripts/measure_reproducibility.py [--data ROOT]

Trains the digits network for three epochs, fits two filters and adapts to 400 noisy CIFAR-10
images, with one thread, and compares every number with those of other runs: the same again, two
threads, and torch and oneDNN without the instructions of a modern processor. Prints the table of
docs/reproducibility.md. ROOT is where CIFAR-10 lies, as for every command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import ttapca
from ttapca.cli.arguments import cache_root
from ttapca.datasets import load as load_images
from ttapca.datasets import read_digits, to_tensor
from ttapca.networks import Training, TrainingOptions, build, load

RUNS: dict[str, tuple[int, dict[str, str]]] = {
    "one thread": (1, {}),
    "again": (1, {}),
    "two threads": (2, {}),
    "two threads, again": (2, {}),
    "AVX2 at most": (1, {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"}),
    "no vector instructions": (1, {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"}),
}
METHODS = ("source", "bn", "tent", "wiener", "ttapca-relu")


def measure(root: Path) -> dict[str, dict[str, Tensor]]:
    """Every number that a run leads to, by what it is of."""
    digits = read_digits("train")
    network = build("small-cnn", input_shape=(1, 8, 8))
    options = TrainingOptions(epochs=3, batch_size=64, peak=0.1, padding=1, flip=False)
    training = Training(network, digits, read_digits("test"), options)
    while not training.finished:
        training.run_epoch()
    found = {"`train`": {name: value.clone() for name, value in network.state_dict().items()}}
    model = load("cifar10-resnet20")
    fitted = ttapca.fit(
        model, "conv1", to_tensor(load_images("cifar10", "train", root=root).images[:1000]), 200
    )
    unfolded = ttapca.fit(load("digits-small-cnn"), "bn1", to_tensor(digits.images), 40)
    for name, each in (("`fit`, folded", fitted), ("`fit`, not folded", unfolded)):
        found[name] = {key: value for key, value in vars(each).items() if isinstance(value, Tensor)}
    images = to_tensor(load_images("cifar10", "test", root=root).images[:400])
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    images = (images + 0.2 * noise).clamp(0, 1)
    for method in METHODS:
        given = {"filter": fitted} if ttapca.METHODS[method].method.needs_filter else {}
        adapter = ttapca.adapt(model, method, forgetting="online", **given)
        logits = torch.cat([adapter(batch) for batch in images.split(100)])
        adapter.detach()
        found[f"logits, `{method}`"] = {"logits": logits}
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Nothing, or the largest one over the largest number."""
    if all(torch.equal(one[name], other[name]) for name in one):
        return "same bits"
    worst = max(
        float((one[name].double() - other[name].double()).abs().max() / one[name].abs().max())
        for name in one
        if one[name].abs().max() > 0
    )
    if "logits" not in one:
        return f"{worst:.0e}"
    changed = int((one["logits"].argmax(1) != other["logits"].argmax(1)).sum())
    return f"{worst:.0e}, {changed} of {len(one['logits'])} predictions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=cache_root())
    parser.add_argument("--run", nargs=2, metavar=("THREADS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        torch.set_num_threads(int(options.run[0]))
        torch.save(measure(options.data), options.run[1])
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (threads, variables)) in enumerate(RUNS.items()):
            file = str(Path(folder) / f"{number}.pt")
            command = [sys.executable, __file__, "--data", str(options.data)]
            command += ["--run", str(threads), file]
            subprocess.run(command, env={**os.environ, **variables}, check=True)
            results[name] = torch.load(file)
    first, *others = results.values()
    print("| | " + " | ".join(list(results)[1:]) + " |")
    print("|---" * len(results) + "|")
    for part in first:
        cells = [difference(first[part], other[part]) for other in others]
        print(f"| {part} | " + " | ".join(cells) + " |")
    again = difference_of_all(results["two threads"], results["two threads, again"])
    print(f"\nTwo threads against two threads, again: {again}.")


def difference_of_all(
    one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]
) -> str:
    return "; ".join(sorted({difference(one[part], other[part]) for part in one}))


if __name__ == "__main__":
    main()
