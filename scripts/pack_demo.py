"""Write what the demo needs and the package ships: images, photographs of frost, and a filter.

    python scripts/pack_demo.py images      # 500 test images of CIFAR-10
    python scripts/pack_demo.py frost       # the photographs of frost at a fifth of their size
    python scripts/pack_demo.py filter      # of cifar10-resnet20, on all training images

and, after `ttapca demo`, what README and the tests know of its numbers:

    python scripts/pack_demo.py numbers     # from ttapca-demo/results.sqlite

It needs `ttapca data get cifar10 frost`. Nothing is chosen by results: the images are the first
fifty of each class in the order of the test set.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ttapca import networks
from ttapca.benchmark import Results, read_preset
from ttapca.benchmark.comparisons import frame
from ttapca.benchmark.demo_report import mean_errors
from ttapca.benchmark.filters import FIT_BATCH, recommended_layer, usual_fit
from ttapca.cli.arguments import cache_root
from ttapca.corruptions import TEXTURE_FILES, load_textures
from ttapca.corruptions.weather import SHRUNK_BY, SHRUNK_FOLDER, shrunk
from ttapca.datasets import FROST, TensorBatches, load
from ttapca.datasets.layouts import CIFAR10_500, SHEET_COLUMNS, SHIPPED_FOLDER
from ttapca.networks.checkpoints import FILTER_SUFFIX

EACH = 50  # images of a class
NETWORK = "cifar10-resnet20"
ROOT = Path(__file__).parents[1]
COLUMNS = [
    *("model", "weights", "data", "corrupted", "corruption", "severity", "setting", "method"),
    *("layer", "components", "batch_size", "steps", "lr", "images", "seed", "error"),
]
README_ROWS = {  # by their words: setting, and whether the images are clean
    "fifteen corruptions, batches of 250": ("episodic", False),
    "one photograph at a time, sorted by class": ("correlated", False),
    "clean, batches of 250": ("episodic", True),
}

IMAGES_CARD = """\
# cifar10-500

500 test images of CIFAR-10, 32 x 32 pixels in colour, without loss: the first {each} of each class,
in the order of the test set (rows 0 to {last} of it). They were not chosen by any result.

- `cifar10-500.png`: {columns} images in a row, from the left, then the next row.
- `cifar10-500.json`: their labels, and their rows in the test set of 10,000 images.

SHA-256 of pixels and labels (`Images.fingerprint()`): `{fingerprint}`

Source: <https://www.cs.toronto.edu/~kriz/cifar.html>. Please cite it as its author asks:

> Alex Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009.

`scripts/pack_demo.py images` writes these files. In ttapca: `--data cifar10-500`, or
`ttapca.datasets.load("cifar10-500")`.
"""

FROST_CARD = """\
# Photographs of frost

The six photographs that the published generator of CIFAR-C lays over images for the corruption
`frost`, at a fifth of their size, which is how it uses them for images of 32 x 32 pixels; stored
without loss.

Source: the Python package `imagecorruptions` 1.1.2 (Apache License 2.0), which took them from the
code of Hendrycks and Dietterich, *Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations*, 2019, <https://github.com/hendrycks/robustness> (Apache License 2.0).

Changed by ttapca: shrunk by OpenCV's bilinear `resize`, and written as PNG. Larger images need the
photographs themselves: `ttapca data get frost`. `scripts/pack_demo.py frost` writes these files.
"""


def write_png(pixels: NDArray[np.uint8], path: Path) -> None:
    Image.fromarray(pixels).save(path, format="PNG", optimize=True)
    print(f"{path}  {path.stat().st_size:,} bytes")


def pack_images() -> None:
    test = load("cifar10", "test", root=cache_root())
    rows = np.sort(np.concatenate([np.flatnonzero(test.labels == k)[:EACH] for k in range(10)]))
    chosen = test.subset(rows)
    SHIPPED_FOLDER.mkdir(exist_ok=True)
    count, side = len(rows) // SHEET_COLUMNS, chosen.images.shape[1]
    tiles = chosen.images.reshape(count, SHEET_COLUMNS, side, side, 3).swapaxes(1, 2)
    write_png(
        tiles.reshape(count * side, SHEET_COLUMNS * side, 3), SHIPPED_FOLDER / f"{CIFAR10_500}.png"
    )
    facts = {"labels": chosen.labels.tolist(), "rows": rows.tolist()}
    (SHIPPED_FOLDER / f"{CIFAR10_500}.json").write_text(json.dumps(facts) + "\n")
    card = IMAGES_CARD.format(
        each=EACH, last=rows[-1], columns=SHEET_COLUMNS, fingerprint=chosen.fingerprint()
    )
    (SHIPPED_FOLDER / f"{CIFAR10_500}.md").write_text(card)


def pack_frost() -> None:
    SHRUNK_FOLDER.mkdir(exist_ok=True)
    photographs = load_textures(cache_root() / FROST)
    for name, photograph in zip(TEXTURE_FILES, photographs, strict=True):
        path = (SHRUNK_FOLDER / name).with_suffix(".png")
        write_png(shrunk(photograph, SHRUNK_BY, 1, 1), path)
    (SHRUNK_FOLDER / "README.md").write_text(FROST_CARD)


def pack_filter() -> None:
    network = networks.load(NETWORK)
    train = load("cifar10", "train", root=cache_root())
    layer, batches = recommended_layer(network, train), TensorBatches(train, FIT_BATCH)
    folder = networks.packaged()[NETWORK].with_name(NETWORK + FILTER_SUFFIX)
    shutil.rmtree(folder, ignore_errors=True)
    usual_fit(network, layer, batches, route="dct").save(folder)
    for path in sorted(folder.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")


def pack_numbers() -> None:
    with Results("ttapca-demo/results.sqlite", readonly=True) as results:
        rows = frame(results.rows())
    rows[COLUMNS].round({"error": 2}).to_csv(ROOT / "docs/results/demo.csv", index=False)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    means = mean_errors(rows)[list(read_preset("demo").methods)]
    for words, place in README_ROWS.items():
        errors = [f"{error:.1f}" for error in means.loc[place]]
        errors = [f"**{each}**" if each == min(errors, key=float) else each for each in errors]
        line = f"| {words} | {' | '.join(errors)} |"
        text, found = re.subn(rf"^\| {words} \|.*$", line, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"README.md has {found} rows `{words}`, and must have one.")
    (ROOT / "README.md").write_text(text, encoding="utf-8")


PARTS = {
    "images": pack_images,
    "frost": pack_frost,
    "filter": pack_filter,
    "numbers": pack_numbers,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=PARTS)
    PARTS[parser.parse_args().what]()
