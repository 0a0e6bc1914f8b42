"""`slr+it`: likelihood ratios, diverse predictions, and a trainable input transformation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ttapca._checks import BelowOne, Count, NotNegative, Positive, Seed
from ttapca.adaptation.optimisation import GradientSteps, Logits, class_marginal, negative_entropy
from ttapca.adaptation.surfaces import NormAffine, Surface
from ttapca.adaptation.surfaces.trainable import AroundForward, has_surface
from ttapca.errors import AttachError, ShapeError
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, register
from ttapca.spectral.stream import ParameterValues, Stream
from ttapca.support.inputs import map_first_tensor
from ttapca.support.modules import device_and_dtype
from ttapca.support.outputs import log_softmax

WIDTH = 16  # channels inside the residual network of an input transformation

Likelihood = Literal["soft", "hard"]


@register("slr+it", paper="Mummadi et al. (2021, arXiv 2106.14999)")
@dataclass(frozen=True, kw_only=True)
class SLR(GradientMethod):
    """An input transformation, scale and shift, learned by likelihood ratios and diversity.

    With y the predictions for a batch, m_t their mean, and p_t the running class marginal:

        p_t = kappa p_(t-1) + (1 - kappa) m_t
        L = sum_c p_t,c log p_t,c  -  delta mean sum_c y_c log(y_c / (1 - y_c))

    Gradients pass through m_t alone. p starts at the first batch's mean prediction, so that its
    gradient has the same size at every batch. The paper: https://arxiv.org/abs/2106.14999; learning
    rate, weight and momentum as quoted by github.com/westend11/dsait4205-reproduction-g8.

    Attributes:
        likelihood: `soft` weighs every class by its probability, `hard` takes the predicted one.
        confidence_weight: Weight of the likelihood ratio (delta).
        marginal_momentum: Weight of the past in the running class marginal (kappa).
        channels: Number of channels of the images; by default those of the first convolution.
        seed: Draws the weights of the input transformation.
    """

    outputs = CLASSES

    lr: Positive = 6e-4
    logits: Logits = "after"
    likelihood: Likelihood = "soft"
    confidence_weight: NotNegative = 0.025
    marginal_momentum: BelowOne = 0.9
    channels: Count | None = None
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """Return the transformation, scale and shift, moved by the objective."""
        transform = InputTransform(self.channels, seed=self.seed)
        predictor = GradientSteps(DiverseLikelihood(self), reads="classes", **self.stepping())
        return self.assembly(transform, NormAffine(), predictor=predictor)


class DiverseLikelihood:
    """Negative entropy of the running class marginal, plus a weighted likelihood ratio."""

    keeps = ("marginal",)

    def __init__(self, options: SLR) -> None:
        soft = options.likelihood == "soft"
        self.ratio = soft_likelihood_ratio if soft else hard_likelihood_ratio
        self.confidence = options.confidence_weight
        self.momentum = options.marginal_momentum
        self.marginal: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the objective on one batch, and update the running marginal."""
        batch = class_marginal(logits)  # (classes,)
        past = batch.detach() if self.marginal is None else self.marginal.to(batch)
        running = self.momentum * past + (1 - self.momentum) * batch
        # The step on a batch that is not finite is skipped, and must not spoil the past either.
        if bool(torch.isfinite(running).all()):
            self.marginal = running.detach()
        return negative_entropy(running) + self.confidence * self.ratio(logits).mean()


def soft_likelihood_ratio(logits: Tensor, *, clip: float | None = None) -> Tensor:
    """Return the expected log ratio of all other classes to one: sum_c p_c log((1 - p_c) / p_c)."""
    # Unlike the entropy it does not saturate: a certain prediction still has a gradient. Above
    # `clip`, probabilities count as that, and have none.
    log_probabilities = log_softmax(logits)
    if clip is not None:
        log_probabilities = log_probabilities.clamp(max=math.log(clip))
        rest = torch.log1p(-log_probabilities.exp())
    else:
        top = log_probabilities.argmax(1, keepdim=True)
        # 1 - p loses all digits where p is near 1, which only the first class can be.
        others = log_probabilities.exp().scatter(1, top, 0.0)
        rest = torch.log1p(-others).scatter(1, top, _log_rest(log_probabilities, top))
    return (log_probabilities.exp() * (rest - log_probabilities)).sum(1)


def hard_likelihood_ratio(logits: Tensor) -> Tensor:
    """Return the log ratio of all other classes to the predicted one: log((1 - p) / p)."""
    log_probabilities = log_softmax(logits)
    top = log_probabilities.argmax(1, keepdim=True)
    return (_log_rest(log_probabilities, top) - log_probabilities.gather(1, top)).squeeze(1)


def _log_rest(log_probabilities: Tensor, top: Tensor) -> Tensor:
    """Return the log probability of all classes but the predicted one, to full precision."""
    return log_probabilities.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)


class InputTransform(Surface):
    """A trainable change of the input: d(x) = scale (mix x + (1 - mix) r(x)) + shift.

    r is a small convolutional network, whose weights `seed` draws, `mix` (tau) a number, `scale`
    (gamma) and `shift` (beta) one number per channel. It starts as the identity, bit for bit.
    """

    mix: nn.Parameter
    scale: nn.Parameter
    shift: nn.Parameter

    def __init__(self, channels: int | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.channels = channels
        self.seed = seed
        self.residual: nn.Module = nn.Identity()
        self._inside = False  # whether a forward pass of the model is running

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Make the transformation, as the identity, and put it in front of the model."""
        super().attach(model, stream)
        if has_surface(model, InputTransform):
            raise AttachError(
                "A model has one input transformation; something has put one in front already. "
                "Call `detach()` on that first."
            )
        channels = self.channels if self.channels is not None else _channels_of(model)
        device, dtype = device_and_dtype(model, model)
        self.residual = _residual(channels, self.seed).to(device, dtype)
        one = torch.ones((), device=device, dtype=dtype)
        self.mix = nn.Parameter(one.clone())
        self.scale = nn.Parameter(one.repeat(channels))
        self.shift = nn.Parameter(torch.zeros_like(self.scale))
        self.patches.wrap(model, AroundForward(self, self.run))
        self.stream.keep("input transformation", ParameterValues(self.parameters()))

    def forward(self, images: Tensor) -> Tensor:
        """Transform a batch, shape (batch, channels, height, width)."""
        channels = len(self.scale)
        if images.dim() != 4 or images.shape[1] != channels:
            raise ShapeError(
                f"The input transformation takes images of shape (batch, {channels}, height, "
                f"width); found {tuple(images.shape)}. Give the number of channels by `channels=`, "
                "or choose a method that leaves the input as it is."
            )
        if images.device != self.scale.device:
            self.to(images.device)  # the model was moved without its adapter
        mixed: Tensor = self.mix * images + (1 - self.mix) * self.residual(images)
        return self.scale.view(-1, 1, 1) * mixed + self.shift.view(-1, 1, 1)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass on transformed images; nested passes are not transformed again."""
        if self._inside or not self.enabled:
            return forward(*args, **kwargs)

        def transformed() -> Any:
            changed, named = map_first_tensor(self, args, kwargs)
            return forward(*changed, **named)

        return self.run_with(transformed, _inside=True)


def _channels_of(model: nn.Module) -> int:
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return module.in_channels
    raise AttachError(
        "The input transformation takes as many channels as the model's first convolution; the "
        "model has no convolution. Give the number by `channels=`."
    )


def _residual(channels: int, seed: int) -> nn.Module:
    """Return the network r: two convolutions that keep the size of an image."""
    generator = torch.Generator().manual_seed(seed)
    # Made without values, so that torch draws none from the caller's random state.
    layers = [
        skip_init(nn.Conv2d, taken, given, 3, padding=1)  # type: ignore[no-untyped-call]
        for taken, given in ((channels, WIDTH), (WIDTH, channels))
    ]
    with torch.no_grad():
        for layer in layers:
            # He initialisation, always in float64 so that every precision has the same weights.
            draw = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
            layer.weight.copy_(draw * math.sqrt(2 / layer.weight[0].numel()))
            layer.bias.zero_()
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])
