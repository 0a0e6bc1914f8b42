"""White noise: what the last band surely has of it, all bands have.

The last components of natural images have hardly any variance. White noise has the same in all, so
there it stands out a hundredfold even in a single image, whatever the image shows. In the bands in
the middle, noise and detail are equally strong, and a single image does not tell which it has. But
the level of the noise is known from the end of the spectrum, and with it its share everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants


def with_white_noise(
    excess: Tensor,
    log_energy: Tensor,
    noise: Tensor,
    samples: Tensor | float = 1.0,
    constants: Constants = CONSTANTS,
) -> Tensor:
    """Return by how much log energies exceed those of the source, counting noise in every band.

    The energy by which the last band exceeds the range of source batches gives a level of white
    noise. It is a lower bound, since what lies within the range does not count, and no band may
    have more noise than energy: noise that is not white does not count either. Where noise makes up
    the share q of a band's energy, that band exceeds its own signal by -log(1 - q), whether or not
    this shows in the band itself.

    Args:
        excess: By how much log energies are outside the range of source batches, with sign, shape
            (..., bands).
        log_energy: Logarithm of the energies, shape (..., bands).
        noise: Energy of white noise of variance 1, shape (bands,).
        samples: How many images the energies are those of, shape (...). All of it counts for one,
            and evenly less for more of them: beyond `prior`, each band shows by itself what noise
            there is.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> noise = torch.tensor([1.0, 100.0, 1000.0])
        >>> energy = 1 + 0.5 * noise
        >>> usual = torch.tensor([2.0, 1.0, 1.0])  # the end of the range
        >>> found = (energy / usual).log().clamp(min=0)
        >>> [round(value, 2) for value in with_white_noise(found, energy.log(), noise).tolist()]
        [0.4, 3.93, 6.22]
    """
    fading = (torch.as_tensor(samples, dtype=excess.dtype) - 1) / constants.prior
    if not torch.compiler.is_exporting() and bool((fading >= 1).all()):
        return excess
    energy = log_energy.exp()
    surplus = -energy * torch.expm1(-excess.clamp(min=0))
    least = (energy / noise).amin(-1, keepdim=True)
    # No band exceeds its own signal by more than ratios are believed.
    most = (1 - 1 / constants.largest_ratio) * least
    level = torch.minimum((surplus / noise)[..., -1:], most)
    share = level * noise / energy
    more = (-torch.log1p(-share) - excess).clamp(min=0) * (share > 0)
    return excess + more * (1 - fading.clamp(0, 1))[..., None]
