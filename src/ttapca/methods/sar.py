"""`sar`: lower the entropy of reliable samples at its flat places, and recover from collapse."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ttapca._checks import NotNegative, Positive
from ttapca.adaptation.optimisation import ENTROPIES, MOMENTUM, Entropy, Run, Stepper, sgd
from ttapca.adaptation.surfaces.trainable import Slot, Weights, norm_affine
from ttapca.methods.method import Assembly, GradientMethod, register
from ttapca.methods.weights import put_back, with_values

# As in the official code: the last stage of a ResNet, the last three blocks of a ViT-Base and its
# last norm, which are near the output and drift first.
LAST_BLOCKS = ("*layer4*", "*blocks.9*", "*blocks.10*", "*blocks.11*", "norm", "*norm.*")
MEMORY = 0.9  # of the moving average
TINY = 1e-12  # added to the length of a gradient, which may be zero


@register("sar", paper="Niu et al. (ICLR 2023)")
@dataclass(frozen=True, kw_only=True)
class SAR(GradientMethod):
    """Scale and shift, learned by the entropy of reliable samples at the worst point nearby.

    With E the entropy, and S the samples whose entropy is below E_0 = 0.4 ln C for C classes, one
    step is

        probe    eps = rho g / |g|           g = gradient of mean_S E(x; theta)
        step     theta <- theta - eta * gradient of mean_{S, E < E_0} E(x; theta + eps)

    and theta returns to the source when the moving average of the second loss falls below 0.2: the
    network is then about to predict the same class for everything. The paper:
    https://arxiv.org/abs/2302.12400.

    Attributes:
        entropy_margin: Samples of lower entropy are reliable; as a share of the largest, ln C.
        radius: How far the probe goes (rho).
        recover_below: The weights return to the source when the moving average of the loss is
            below this; 0 for never.
        leave_out: Shell patterns of layers whose scale and shift stay as they are.
        entropy: As in `tent`.
    """

    descent: ClassVar[Any] = functools.partial(sgd, momentum=MOMENTUM)

    entropy_margin: Positive = 0.4
    radius: Positive = 0.05
    recover_below: NotNegative = 0.2
    leave_out: Sequence[str] = LAST_BLOCKS
    entropy: Entropy = "softmax"

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by reliable samples."""
        return self.assembly(affine_but(self.leave_out), predictor=SharpnessAwareSteps(self))


class SharpnessAwareSteps(Stepper):
    """Steps on reliable samples at the worst point nearby; see `SAR`."""

    keeps = ("average", "recoveries")
    remembers_start = True

    def __init__(self, options: SAR) -> None:
        super().__init__(**options.stepping())
        self.options = options
        self.entropy = ENTROPIES[options.entropy]
        self.recoveries = 0  # how often the weights returned to the source
        self.average: float | None = None  # moving, of the loss

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict, and step if there are reliable samples."""
        again = functools.partial(run, *inputs, **options)
        for _ in range(self.steps):
            logits = again()
            loss = self._step(logits, again)
            if loss is None:
                break  # nothing moved: a further step would repeat this one
            self._watch(float(loss.detach()))
        if self.logits == "before":
            return logits
        with torch.no_grad():
            return again()

    def _step(self, logits: Tensor, again: Callable[[], Tensor]) -> Tensor | None:
        """Take one step and return its loss, or None if nothing moved."""
        entropies = self.entropy(logits)  # (batch, ...)
        limit = self.options.entropy_margin * math.log(logits.shape[1])
        if not torch.isfinite(entropies).all():
            self.skipped += 1
            return None
        reliable = entropies < limit
        first = self.gradients(entropies[reliable].mean()) if reliable.any() else None
        if first is None:
            return None

        def at_probe() -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
            nearby = self.entropy(again())[reliable]
            kept = nearby[nearby < limit]
            if not len(kept) and torch.isfinite(nearby).all():
                return None, None  # no sample is reliable there
            loss = kept.mean()
            return loss, self.gradients(loss)

        loss, second = with_values(self.descent.parameters, self._probe(first), at_probe)
        if second is None:
            return None
        self.descent.move(second)
        self.updates += 1
        return loss

    def _probe(self, gradients: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the parameters at the highest point within the radius, to first order."""
        length = torch.stack([gradient.norm() for gradient in gradients]).norm()
        scale = self.options.radius / (length + TINY)
        return [
            parameter.detach() + scale * gradient
            for parameter, gradient in zip(self.descent.parameters, gradients, strict=True)
        ]

    def _watch(self, loss: float) -> None:
        """Follow the loss, and return to the source when it vanishes."""
        before = loss if self.average is None else self.average
        self.average = MEMORY * before + (1 - MEMORY) * loss
        if self.average < self.options.recover_below:
            # Only the weights, as in the paper. The official code means to restore the optimiser
            # too, but misses the one inside its wrapper, so that its momentum continues as here.
            put_back(self.descent.parameters, self.start)
            self.average = None
            self.recoveries += 1


def affine_but(leave_out: Sequence[str]) -> Weights:
    """Return a surface of scale and shift of the layers whose path fits no shell pattern."""
    select = functools.partial(_norm_affine_but, leave_out=tuple(leave_out))
    return Weights(select, "scale and shift of normalisation layers that are not left out")


def _norm_affine_but(model: nn.Module, leave_out: Sequence[str]) -> list[Slot]:
    """Return scale and shift of the normalisation layers whose path fits no shell pattern."""
    paths = {module: path for path, module in model.named_modules()}
    return [
        (module, name)
        for module, name in norm_affine(model)
        if not any(fnmatch.fnmatchcase(paths[module], pattern) for pattern in leave_out)
    ]
