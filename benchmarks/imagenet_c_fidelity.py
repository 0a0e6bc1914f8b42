"""How close the corruptions are to the published generator of ImageNet-C, pixel by pixel.

    python benchmarks/imagenet_c_fidelity.py GENERATOR.py --photos DIR --textures DIR [--count 10]

GENERATOR is `corruptions.py` of the package `imagenet_c` 0.0.3, made to run with today's libraries.
It needs scikit-image, Wand and ImageMagick. Every random number that it draws is written down and
given to our function, so that both corrupt an image with the same noise, the same flakes and the
same angle. Printed are the parts of the values that are equal, within one grey level and within
three, the largest difference, and by how much ours are brighter on average.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from scipy import special

from ttapca.corruptions import CORRUPTIONS, IMAGENET_C, SEVERITIES, find, load_table, load_textures

SIDE = 224
DRAWN = ("normal", "uniform", "randint", "poisson")  # the functions of `numpy.random` in use

Draw = tuple[str, tuple[Any, ...], dict[str, Any], Any]  # function, arguments, result


class Recorder:
    """Writes down what `numpy.random` returns while the published generator runs."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        for name in DRAWN:
            setattr(np.random, name, self._recorded(name, getattr(np.random, name)))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*positional: Any, **named: Any) -> Any:
            found = function(*positional, **named)
            self.draws.append((name, positional, named, found))
            return found

        return draw

    def take(self) -> list[Draw]:
        """Return what was drawn since the last time."""
        taken, self.draws = self.draws, []
        return taken


def load_generator(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("generator", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# From the draws of the published generator to our numbers from (0, 1) ----------------------------


def from_normal(draws: list[Draw], **_others: Any) -> np.ndarray:
    _, _, named, found = draws[0]
    return special.ndtr((found - named.get("loc", 0.0)) / named["scale"]).ravel()


def from_uniform(draws: list[Draw], **_others: Any) -> np.ndarray:
    parts = []
    for name, limits, _, found in draws:
        if name == "uniform":
            low, high = limits[:2]
            parts.append((np.ravel(found) - low) / (high - low))
    return np.concatenate(parts)


def for_snow(draws: list[Draw], **_others: Any) -> np.ndarray:
    return np.concatenate([from_normal(draws), from_uniform(draws)])


def for_shot_noise(draws: list[Draw], **_others: Any) -> np.ndarray:
    _, (expected,), _, counts = draws[0]
    below = np.where(counts > 0, special.pdtr(np.maximum(counts - 1, 0), expected), 0.0)
    return np.ravel((below + special.pdtr(counts, expected)) / 2)


def for_impulse_noise(
    _draws: list[Draw], *, image: np.ndarray, made: np.ndarray, amount: float
) -> np.ndarray:
    """Read off the picture which values were struck: skimage has a generator of its own."""
    struck = made != image
    return np.where(struck, np.where(made == 0, amount / 4, amount * 3 / 4), 1 - 1e-9).ravel()


def for_glass_blur(
    draws: list[Draw], *, max_delta: int, iterations: int, **_others: Any
) -> np.ndarray:
    side = 2 * max_delta
    shape = (iterations, SIDE - side, SIDE - side, 2)
    moves = np.array([found for *_, found in draws]).reshape(shape)[:, ::-1, ::-1] + max_delta
    return ((moves[..., 1] * side + moves[..., 0] + 0.5) / side**2).ravel()


def for_frost(draws: list[Draw], **_others: Any) -> np.ndarray:
    ends = [positional[-1] for _, positional, *_ in draws]
    return np.array([(found + 0.5) / end for (*_, found), end in zip(draws, ends, strict=True)])


NUMBERS: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(("gaussian_noise", "speckle_noise", "spatter"), from_normal),
    **dict.fromkeys(("motion_blur", "fog", "elastic_transform"), from_uniform),
    "shot_noise": for_shot_noise,
    "impulse_noise": for_impulse_noise,
    "glass_blur": for_glass_blur,
    "snow": for_snow,
    "frost": for_frost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("generator", type=Path)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--textures", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--corruptions", nargs="*", default=CORRUPTIONS)
    options = parser.parse_args()
    generator, recorder = load_generator(options.generator), Recorder()
    textures, table = load_textures(options.textures), load_table(IMAGENET_C)
    photos = [photo(path) for path in sorted(options.photos.glob("*.jpg"))[: options.count]]
    np.random.seed(0)  # noqa: NPY002 - what the published generator draws from
    print(
        f"{'':<18}{'':<2}{'equal':>9}{'within 1':>10}{'within 3':>10}{'largest':>9}{'brighter':>10}"
    )
    for name in options.corruptions:
        corruption = find(name)
        for severity in SEVERITIES:
            parameters = dict(table.parameters(name, severity))
            arguments = {**parameters, "textures": textures} if name == "frost" else parameters
            differences = []
            for image in photos:
                recorder.take()
                made = np.uint8(getattr(generator, name)(Image.fromarray(image), severity))
                numbers = np.empty(0)
                if name in NUMBERS:
                    numbers = NUMBERS[name](recorder.take(), image=image, made=made, **parameters)
                expected = corruption.draws(SIDE, SIDE, parameters)
                assert numbers.size == expected, (name, numbers.size, expected)
                ours = corruption.apply(image[None], numbers[None], **arguments)[0]
                differences.append(ours.astype(int) - made)
            print(f"{name:<18}{severity:<2}{row(np.array(differences))}", flush=True)


def photo(path: Path) -> np.ndarray:
    with Image.open(path) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    top, left = (pixels.shape[0] - SIDE) // 2, (pixels.shape[1] - SIDE) // 2
    return np.ascontiguousarray(pixels[top : top + SIDE, left : left + SIDE])


def row(differences: np.ndarray) -> str:
    distance = np.abs(differences)
    parts = [(distance <= limit).mean() for limit in (0, 1, 3)]
    words = "".join(f"{100 * part:>9.3f}%" for part in parts)
    return f"{words}{distance.max():>8}{differences.mean():>+10.3f}"


if __name__ == "__main__":
    main()
