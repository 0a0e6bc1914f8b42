"""Measure a filter that was fitted at 224 x 224 pixels on photographs of other sizes.

    python scripts/image_sizes.py --photos DIR --weights FILE

FILE holds torchvision's MobileNetV2. It prints the tables behind docs/large-images.md: the energies
of bands on clean photographs, and the errors with this filter beside those with one that was fitted
at the size. An hour on one core, or as long as you like with fewer --tested.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from PIL import Image
from torch import Tensor

import ttapca
from ttapca import networks
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.networks import ImageNetwork
from ttapca.spectral.calibration import band_edges, band_means
from ttapca.spectral.filter import SpectralFilter

LAYER, FITTED, BATCH = "features.0.0", (224, 224), 50
# Cut out of the photographs, which have 256 x 256 pixels, or resized as networks of ImageNet do.
SIZES: list[tuple[str, tuple[int, int]]] = [
    ("cut", FITTED),
    *(("cut", size) for size in ((160, 160), (192, 192), (256, 256), (160, 256))),
    *(("resized", size) for size in ((160, 160), (192, 192), (144, 192))),
]


def read(file: Path, how: str, size: tuple[int, int]) -> Tensor:
    """Return the centre of a photograph, as it is or resized with its surroundings."""
    picture, (height, width) = Image.open(file).convert("RGB"), size
    if how == "resized":
        side = round(max(size) * 256 / 224)
        picture = picture.resize((side, side))
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    pixels = np.asarray(picture.crop((left, top, left + width, top + height)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


def blurred(x: Tensor, deviation: float = 2.0) -> Tensor:
    """Blur by a normal distribution."""
    reach = round(3 * deviation)
    place = torch.arange(-reach, reach + 1).float()
    weights = torch.exp(-0.5 * (place / deviation).square())
    weights = (weights / weights.sum()).expand(3, 1, 1, -1)
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, weights, groups=3), weights.mT, groups=3)


def noisy(x: Tensor) -> Tensor:
    """Add white noise."""
    generator = torch.Generator().manual_seed(1)
    return x + 0.18 * torch.randn(x.shape, generator=generator)


def pale(x: Tensor) -> Tensor:
    """Leave a quarter of the contrast."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + 0.25 * (x - mean)


CONDITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clean": lambda x: x,
    "noise": noisy,
    "blur": blurred,
    "contrast": pale,
}


def fitted_at(
    network: ImageNetwork, photos: list[Path], how: str, size: tuple[int, int]
) -> FittedFilter:
    """Fit cosines on photographs."""
    batches = [
        torch.stack([read(file, how, size) for file in photos[first : first + 25]])
        for first in range(0, len(photos), 25)
    ]
    return ttapca.fit(network, LAYER, batches, route="dct")


def energies(
    network: ImageNetwork, fitted: FittedFilter, photos: list[Path], how: str, size: tuple[int, int]
) -> list[float]:
    """Return the mean energies of bands over those of the source."""
    layer, total = fitted.spectral_filter(), torch.zeros(fitted.n_components_)
    for file in photos:
        total += layer.components(network.normalise(read(file, how, size)[None]))[0].square()
    ratios = total / len(photos) / fitted.explained_variance_
    return band_means(ratios, band_edges(fitted.n_components_)).tolist()


def error(
    network: ImageNetwork, fitted: FittedFilter | None, x: Tensor, labels: Tensor
) -> tuple[float, int]:
    """Return the error in percent, and in how many batches all gains were exactly 1."""
    method = "source" if fitted is None else "wiener"
    wrong, alone = 0, 0
    with ttapca.adapt(network, method, filter=fitted) as adapted:
        parts = [each for each in adapted.modules() if isinstance(each, SpectralFilter)]
        for images, wanted in zip(x.split(BATCH), labels.split(BATCH), strict=True):
            wrong += int((adapted(images).argmax(1) != wanted).sum())
            alone += all(bool((part.gains() == 1).all()) for part in parts)
    return 100 * wrong / len(x), alone


@torch.no_grad()
def main() -> None:
    """Print the tables, a line when it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tested", type=int, default=100)
    asked = parser.parse_args()
    photos = sorted(asked.photos.glob("*.jpg"))
    source = [file for number, file in enumerate(photos) if number % 10 in (0, 3, 6)]
    tested = [number for number in range(len(photos)) if number % 10 in (1, 4)][: asked.tested]
    clean = [file for number, file in enumerate(photos) if number % 5 == 1]
    network = networks.load(asked.weights, normalisation="imagenet")
    network.take_any_size()
    fitted = fitted_at(network, source, *SIZES[0])
    for how, size in SIZES:
        found = energies(network, fitted, clean, how, size)
        cells = " | ".join(f"{value:.2f}" for value in found)
        print(f"| {how}, {size[0]} x {size[1]} | {cells} |", flush=True)
    for how, size in SIZES:
        own = fitted if size == FITTED else fitted_at(network, source, how, size)
        images = torch.stack([read(photos[number], how, size) for number in tested])
        cells = []
        for spoil in CONDITIONS.values():
            x = (255 * spoil(images).clamp(0, 1)).round() / 255
            results = [
                error(network, each, x, torch.tensor(tested)) for each in (None, fitted, own)
            ]
            cells.append(" ".join(f"{wrong:.0f} ({alone})" for wrong, alone in results))
        print(f"| {how}, {size[0]} x {size[1]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
