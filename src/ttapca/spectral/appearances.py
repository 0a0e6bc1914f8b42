"""What an image looks like, in units of how source images vary.

An image is described by the logarithms of its band energies and of its textures
(`ttapca.spectral.image_statistics`), in units in which source images vary by 1 in every direction.
So what an image shows counts little, and what happened to it counts much.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants

Numbers = NDArray[np.float64]

# Source images for each number that describes an image; fewer do not tell how images vary.
FEWEST_SOURCE = 4
# An image without any detail has no logarithm; as a share of what source images have.
LEAST = 1e-3
# In place of a deviation of zero, where a number is the same in all source images.
LEAST_DEVIATION = 1e-6


class Appearances:
    """Describes images in units of how source images vary.

    Args:
        energies: Band energies of source images, shape (images, bands).
        textures: Textures of the same images, shape (images, numbers); None where they have none.
        constants: See `ttapca.spectral.constants`.

    Attributes:
        known: Whether there were enough source images to say how they vary.
        reach: Squared distance of the farthest source image from the mean of the others, in units
            of how these vary.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> energies = torch.rand(500, 3, generator=generator) + 0.5
        >>> source = Appearances(energies)(energies)
        >>> [round(value, 2) for value in source.std(0).tolist()]
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        energies: Tensor,
        textures: Tensor | None = None,
        constants: Constants = CONSTANTS,
    ) -> None:
        self._bands = energies.shape[1]
        measured = _beside(energies, textures)
        self._least = LEAST * measured.median(0).values.clamp(min=torch.finfo(torch.float32).tiny)
        logarithms = (measured + self._least).log()
        self._mean = logarithms.mean(0)
        self._deviation = logarithms.std(0).clamp(min=LEAST_DEVIATION)
        unit = (logarithms - self._mean) / self._deviation
        correlations = unit.T @ unit / (len(unit) - 1)
        ridge = constants.ridge * torch.eye(len(correlations), dtype=torch.float64)
        self._whiten = torch.linalg.cholesky(torch.linalg.inv(correlations + ridge))
        self._unwhiten = torch.linalg.inv(self._whiten).numpy()
        self.known = len(measured) >= FEWEST_SOURCE * self.size
        self.reach = self._reach(float((unit @ self._whiten).square().sum(1).max()), len(unit))

    @staticmethod
    def _reach(farthest: float, images: int) -> float:
        """Return a squared distance as it is if the image is left out of mean and covariance."""
        left = max(1 - images * farthest / (images - 1) ** 2, 1 / images)
        return farthest * images**2 * (images - 2) / (images - 1) ** 3 / left

    @property
    def size(self) -> int:
        """How many numbers describe an image."""
        return len(self._mean)

    def __call__(self, energies: Tensor, textures: Tensor | None = None) -> Tensor:
        """Return one row for each image, float64 on the CPU, shape (images, `size`)."""
        logarithms = (_beside(energies, textures) + self._least).log()
        whitened: Tensor = (logarithms - self._mean) / self._deviation @ self._whiten
        return whitened

    def of_bands(self, away: Numbers) -> Numbers:
        """Return differences of descriptions by band, each in units of its own deviation."""
        found: Numbers = away @ self._unwhiten[:, : self._bands]
        return found


def _beside(energies: Tensor, textures: Tensor | None) -> Tensor:
    both = energies if textures is None else torch.cat([energies, textures.to(energies)], 1)
    return both.detach().to("cpu", torch.float64)
