"""`deyo`: entropy of samples whose prediction rests on the shape of an object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Generator, Tensor

from ttapca._checks import Count, Positive, Seed, Share
from ttapca.adaptation.optimisation import GradientSteps, Run, log_predictions, mean_entropy
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, register
from ttapca.methods.sar import LAST_BLOCKS, affine_but
from ttapca.methods.views import images_and_forward
from ttapca.support.outputs import softmax_entropy
from ttapca.support.tensors import at_least_float32


@register("deyo", paper="Lee et al. (ICLR 2024)")
@dataclass(frozen=True, kw_only=True)
class DeYO(GradientMethod):
    """Scale and shift, learned by the entropy of samples that need the shape of their object.

    With E the entropy, y the predicted class of x, and x' the image x with its patches shuffled,

        PLPD(x) = p_y(x) - p_y(x')

    is large if the prediction rests on a shape, which shuffling destroys. The loss is the mean over
    the samples with E(x) < tau_E and PLPD(x) > tau_P of

        (exp(E_0 - E(x)) + exp(PLPD(x))) E(x)

    with the first factor as a constant. The paper: https://arxiv.org/abs/2403.07366.

    Thresholds are those of the official code for ImageNet. It steps by SGD; Adam with a learning
    rate of 0.001 is how mariodoebler/test-time-adaptation runs it on CIFAR-10-C.

    Attributes:
        entropy_margin: tau_E, as a share of the largest entropy, ln C for C classes.
        weight_margin: E_0, as a share of ln C.
        shape_margin: tau_P.
        patches: An image is cut into `patches` x `patches`, which are shuffled.
        leave_out: Shell patterns of layers whose scale and shift stay as they are, as in `sar`.
        seed: Draws the order of the patches.
    """

    outputs = CLASSES

    entropy_margin: Positive = 0.5
    weight_margin: Positive = 0.4
    shape_margin: Share = 0.2
    patches: Count = 4
    leave_out: Sequence[str] = LAST_BLOCKS
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by samples that need their shape."""
        return self.assembly(affine_but(self.leave_out), predictor=ShapeSteps(self))


class ShapeSteps(GradientSteps):
    """Lowers the entropy of samples whose prediction suffers from shuffled patches."""

    def __init__(self, options: DeYO) -> None:
        super().__init__(mean_entropy, reads="classes", **options.stepping(), seed=options.seed)
        self.options = options

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Return the loss over the samples that take part; None if there are none."""
        given, largest = self.options, math.log(logits.shape[1])
        images, forward = images_and_forward("deyo", run, inputs, options)
        probabilities = log_predictions(logits).detach().exp()  # (batch, classes)
        entropy = softmax_entropy(logits)
        if not bool(torch.isfinite(entropy).all()):
            return entropy.mean()  # not finite: the step is skipped, and counted as such
        sure = entropy < given.entropy_margin * largest
        if not bool(sure.any()):
            return None
        with torch.no_grad():
            shuffled = forward(shuffled_patches(images[sure], given.patches, self.generator))
        own, entropy = probabilities[sure], entropy[sure]
        predicted = own.argmax(1, keepdim=True)
        destroyed = log_predictions(shuffled).exp()
        difference = (own - destroyed).gather(1, predicted).squeeze(1)
        shaped = difference > given.shape_margin
        if not bool(shaped.any()):
            return None
        entropy, difference = entropy[shaped], difference[shaped]
        weight = torch.exp(given.weight_margin * largest - entropy.detach()) + difference.exp()
        return (weight * entropy).mean()


def shuffled_patches(images: Tensor, patches: int, generator: Generator) -> Tensor:
    """Return images cut into patches x patches, each with its own random order of them."""
    count, channels, *sides = images.shape
    patches = min(patches, *sides)
    height, width = (side // patches for side in sides)
    even = [height * patches, width * patches]
    if even != sides:
        images = _resized(images, even)
    grid = images.view(count, channels, patches, height, patches, width)
    tiles = grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (count, tiles, channels, h, w)
    order = torch.rand(count, patches**2, generator=generator).argsort(1).to(images.device)
    tiles = tiles[torch.arange(count, device=images.device)[:, None], order]
    grid = tiles.view(count, patches, patches, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    whole = grid.reshape(count, channels, *even)
    return whole if even == sides else _resized(whole, sides)


def _resized(images: Tensor, sides: list[int]) -> Tensor:
    """Return images of other sides; in float32 at least, since torch has no half for this."""
    wide = at_least_float32(images)
    return F.interpolate(wide, sides, mode="bilinear", antialias=True).to(images.dtype)
