"""Changed views of images, for methods that ask a network to predict them alike.

Everything is drawn on the CPU, from a generator that is passed in, so a seed gives the same views
on every device and the global random state is not used. Changes of brightness, contrast and noise
are relative to each image's own spread: they mean the same for pixels from 0 to 1 and for
standardised ones, and nothing is clipped to a range that the method cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Generator, Tensor

from ttapca.adaptation.optimisation import Run
from ttapca.errors import InputTypeError, LayerOutputError, ShapeError
from ttapca.support.inputs import map_first_tensor
from ttapca.support.outputs import Outputs

# Runs the model on images, with its further inputs as they are.
Forward = Callable[[Tensor], Tensor]

# Changed versions that a mixed view is made of, as many as AugMix has.
CHAINS = 3

# Columns of the numbers that are drawn for each image.
TURN, ZOOM, ACROSS, DOWN, SHEAR, CONTRAST, BRIGHTNESS, MIRROR = range(8)
DRAWN = 8


@dataclass(frozen=True)
class Jitter:
    """A random change of each image of a batch, within these limits."""

    degrees: float = 0.0  # of a rotation
    shift: float = 0.0  # share of width and height; rounded to whole pixels
    zoom: float = 0.0  # relative change of size
    shear: float = 0.0  # share of the height
    brightness: float = 0.0  # in standard deviations of the image
    contrast: float = 0.0  # relative change
    noise: float = 0.0  # deviation of Gaussian noise, in standard deviations of the image
    flip: bool = False  # mirrors half of the images, left to right

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """Change every image, shape (batch, channels, height, width), by its own draws."""
        draws = _uniform(images, DRAWN, generator)  # (batch, 8), from -1 to 1
        grid = F.affine_grid(self._maps(images, draws), list(images.shape), align_corners=False)
        moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        spread, mean = torch.std_mean(moved, dim=(1, 2, 3), correction=0, keepdim=True)
        contrast = (1 + self.contrast * draws[:, CONTRAST]).view(-1, 1, 1, 1)
        brightness = (self.brightness * draws[:, BRIGHTNESS]).view(-1, 1, 1, 1)
        changed = mean + contrast * (moved - mean) + brightness * spread
        if self.noise:
            noise = torch.randn(images.shape, generator=generator, dtype=torch.float64)
            changed = changed + self.noise * spread * noise.to(changed)
        return changed

    def _maps(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return the affine maps from output to input pixels, shape (batch, 2, 3)."""
        height, width = images.shape[-2:]
        angle = draws[:, TURN] * (self.degrees * torch.pi / 180)
        size = 1 + self.zoom * draws[:, ZOOM]
        cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
        # Coordinates run from -1 to 1 in both directions, whatever the sides.
        across = 2 / width * torch.round(self.shift * width * draws[:, ACROSS])
        down = 2 / height * torch.round(self.shift * height * draws[:, DOWN])
        mirror = torch.ones_like(angle)
        if self.flip:
            mirror = torch.where(draws[:, MIRROR] < 0, -1.0, 1.0)
        sheared = self.shear * draws[:, SHEAR] - sin
        first = torch.stack([mirror * cos, sheared * height / width, across], 1)
        second = torch.stack([mirror * sin * width / height, cos, down], 1)
        return torch.stack([first, second], 1).to(images.dtype)


# Random crops after padding by an eighth: with flips, as networks for CIFAR are trained.
CROP = Jitter(shift=1 / 8)
# In place of a chain of AugMix at its lowest severity.
GENTLE = Jitter(degrees=3, shift=1 / 32, shear=0.03, brightness=0.1, contrast=0.3)
# The limits of CoTTA's official code, which RoTTA's uses as well; their 40 % of brightness are 0.8
# spreads of an average image.
STRONG = Jitter(
    degrees=15, shift=1 / 16, zoom=0.1, brightness=0.8, contrast=0.3, noise=0.02, flip=True
)
# The same without moving pixels, whose predictions would have to be moved back.
STRONG_COLOURS = replace(STRONG, degrees=0.0, shift=0.0, zoom=0.0, flip=False)


def mixed_views(image: Tensor, count: int, generator: Generator, *, flip: bool = True) -> Tensor:
    """Return views of one image, each a mixture of itself and of three gently changed versions."""
    # After AugMix (Hendrycks et al., 2020): the weights of the versions come from a flat Dirichlet
    # distribution, the weight of the unchanged image from a uniform one.
    base = replace(CROP, flip=flip)(image.expand(count, -1, -1, -1), generator)
    versions = GENTLE(base.repeat(CHAINS, 1, 1, 1), generator).view(CHAINS, *base.shape)
    uniform = _uniform(base, CHAINS + 1, generator).T.add(1).div(2)  # (4, count), from 0 to 1
    exponential = -torch.log1p(-uniform[:CHAINS])
    weights = (exponential / exponential.sum(0)).view(CHAINS, -1, 1, 1, 1)
    own = uniform[CHAINS].view(-1, 1, 1, 1)
    return own * base + (1 - own) * (weights * versions).sum(0)


def refuse_pixels(method: str, outputs: Outputs, logits: Tensor, way_out: str) -> None:
    """Raise for predictions of every pixel, which would have to move with the views."""
    if outputs.of_pixels(logits):
        raise LayerOutputError(
            f"`{method}` compares an image with moved views of it, so it needs one prediction for "
            f"each image; found logits of shape {tuple(logits.shape)}, of every pixel. {way_out}"
        )


def images_and_forward(
    method: str, run: Run, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Forward]:
    """Return the images, a model's first tensor, and a function that runs it on other images."""
    given = (value for value in (*inputs, *options.values()) if isinstance(value, Tensor))
    images = next(given, None)
    if images is None or images.dim() != 4:
        found = "no tensor" if images is None else f"shape {tuple(images.shape)}"
        raise ShapeError(
            f"`{method}` changes images: the model's first tensor is a batch of shape (batch, "
            f"channels, height, width); found {found}. Choose another method for such inputs."
        )
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise InputTypeError(
            f"`{method}` changes images of floating point; found a tensor of {kind}. Prepare the "
            "images as in training, for example batch.float() / 255 for pixels from 0 to 255."
        )

    def forward(views: Tensor) -> Tensor:
        args, kwargs = map_first_tensor(lambda _: views, inputs, options)
        return run(*args, **kwargs)

    return images, forward


def _uniform(images: Tensor, count: int, generator: Generator) -> Tensor:
    """Return uniform draws from -1 to 1 for each image, shape (batch, count)."""
    draws = torch.rand(len(images), count, generator=generator, dtype=torch.float64)
    return draws.mul(2).sub(1).to(images)
