"""How close the corruptions are to the published generator's output for 200 images.

    python benchmarks/corruption_fidelity.py REFERENCE.npz --textures DIR [--seeds 20]

REFERENCE holds `clean` and `<corruption>_<severity>` for severities 1 and 5. Without chance: the
part of the values that are equal, and within one grey level. With chance: mean, deviation and root
mean square in four frequency bands of what was added, ours (mean over seeds) / reference, and in
brackets how many deviations between our own draws lie between the two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ttapca.corruptions import CORRUPTIONS, corrupt, find, load_table, load_textures

BANDS = ((0.5, 4.0), (4.0, 8.0), (8.0, 12.0), (12.0, 32.0))  # cycles an image


def statistics(spoilt: np.ndarray, clean: np.ndarray) -> np.ndarray:
    added = spoilt.astype(float) - clean
    side = clean.shape[1]
    power = (np.abs(np.fft.fft2(added, axes=(1, 2))) ** 2).mean(axis=(0, 3)) / side**2
    frequencies = np.fft.fftfreq(side) * side
    radius = np.hypot(frequencies[:, None], frequencies[None, :])
    bands = [np.sqrt(power[(low <= radius) & (radius < high)].mean()) for low, high in BANDS]
    return np.array([added.mean(), added.std(), *bands])


def has_chance(name: str, severity: int) -> bool:
    return find(name).draws(32, 32, load_table().parameters(name, severity)) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("--textures", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    reference = np.load(options.reference)
    textures = load_textures(options.textures)
    clean = reference["clean"]
    for name in CORRUPTIONS:
        for severity in (1, 5):
            expected = reference[f"{name}_{severity}"]
            if not has_chance(name, severity):
                difference = np.abs(corrupt(clean, name, severity).astype(int) - expected)
                equal, near = (difference == 0).mean(), (difference <= 1).mean()
                print(f"{name:<18}{severity}  equal {equal:8.3%}  within one {near:8.3%}")
                continue
            drawn = [
                statistics(corrupt(clean, name, severity, seed, textures=textures), clean)
                for seed in range(options.seeds)
            ]
            centre, spread = np.mean(drawn, axis=0), np.std(drawn, axis=0, ddof=1)
            target = statistics(expected, clean)
            columns = zip(centre, target, (target - centre) / spread, strict=True)
            shown = "  ".join(f"{ours:.2f}/{theirs:.2f} ({z:+.1f})" for ours, theirs, z in columns)
            print(f"{name:<18}{severity}  {shown}")


if __name__ == "__main__":
    main()
