"""`eata`: entropy of reliable, non-redundant samples, with a penalty on sensitive weights.

`rdumb` is the same without the penalty, and with a fresh start after a number of batches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import Count, Positive
from ttapca.adaptation.optimisation import (
    ENTROPIES,
    MOMENTUM,
    Entropy,
    GradientSteps,
    Run,
    adam,
    log_predictions,
    mean_entropy,
    sgd,
)
from ttapca.adaptation.surfaces import NormAffine
from ttapca.errors import NonFiniteError, NotEnoughDataError
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, register
from ttapca.methods.weights import put_back
from ttapca.support.inputs import SourceData, source_batches
from ttapca.support.modules import evaluation_mode
from ttapca.support.outputs import Outputs, log_softmax

MEAN_MOMENTUM = 0.9  # of the running mean prediction


FEW_CLASSES = 100  # up to this number CIFAR's settings serve, beyond it ImageNet's
CIFAR, IMAGENET = (0.4, 1.0), (0.05, 2000.0)  # margin of redundancy and weight of the penalty


@register("eata", paper="Niu et al. (ICML 2022)")
@dataclass(frozen=True, kw_only=True)
class EATA(GradientMethod):
    """Scale and shift of the normalisation layers, learned by the entropy of reliable samples.

    With E the entropy and f(x) the prediction, samples take part if E < E_0 and the cosine of f(x)
    to the running mean m of the predictions that took part is below epsilon. The loss is

        mean exp(E_0 - E(x)) E(x)  +  beta sum_i omega_i (theta_i - theta_i^0)^2

    over these samples, with exp(.) as a constant, and all moved weights, whose importance omega_i
    is the diagonal of the Fisher information. A batch without such samples moves nothing. The
    paper: https://arxiv.org/abs/2204.02610.

    The defaults are those of the official code, which returns the logits from before the update.
    Two of them depend on the data: up to 100 classes they are the paper's for CIFAR-10, beyond them
    those for ImageNet. With ImageNet's margin hardly a sample of ten classes takes part: a sure
    prediction of one of ten is already similar to the mean of all. The learning rate is that for
    ImageNet; for CIFAR-10 the paper has 0.005.

    Attributes:
        optimiser: `sgd`, with momentum 0.9, is the official code's; the collection of
            mariodoebler/test-time-adaptation takes `adam`, with a learning rate of 0.001.
        source: Unlabelled source data for the Fisher information: batches, pairs whose first
            element is a batch, or one tensor of samples. Read once, when the adapter is made.
            Without them there is no penalty: the method is then the paper's ETA.
        entropy_margin: E_0, as a share of the largest entropy, log C.
        redundancy_margin: epsilon; by default 0.4, and 0.05 for more than 100 classes.
        fisher_weight: beta; by default 1, and 2,000 for more than 100 classes.
        entropy: As in `tent`.
    """

    outputs = CLASSES

    lr: Positive = 2.5e-4
    optimiser: Literal["sgd", "adam"] = "sgd"
    source: SourceData | None = None
    entropy_margin: Positive = 0.4
    redundancy_margin: Positive | None = None
    fisher_weight: Positive | None = None
    entropy: Entropy = "softmax"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.source is None:
            self.refuse("fisher_weight", "there is no penalty without `source=`")

    def stepping(self) -> dict[str, Any]:
        """Return the options of a `Stepper`, with the chosen optimiser."""
        make = adam if self.optimiser == "adam" else functools.partial(sgd, momentum=MOMENTUM)
        return super().stepping() | {"optimizer": make(self.lr)}

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by reliable samples."""
        return self.assembly(NormAffine(), predictor=ReliableSteps(self))


class ReliableSteps(GradientSteps):
    """Lowers the entropy of reliable samples, and keeps important weights near the source."""

    keeps: ClassVar[tuple[str, ...]] = ("mean",)
    fixed = ("start", "fisher")

    def __init__(self, options: EATA) -> None:
        super().__init__(mean_entropy, reads="classes", **options.stepping())
        self.remembers_start = options.source is not None  # for the penalty alone
        self._source = options.source
        if options.source is not None:  # an adapter is copied and pickled without the data
            options = replace(options, source=())
        self.options = options
        self.fisher: list[Tensor] = []
        self.mean: Tensor | None = None
        self._next_mean: Tensor | None = None

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the parameters to move, and compute from the source which of them matter."""
        super().bind(model, parameters)
        if self._source is not None:
            self.fisher = fisher_information(model, parameters, self._source, self.outputs)
        self._source = None

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Return the loss over the samples that take part; None if there are none."""
        del run, inputs, options
        predictions = log_predictions(logits).detach().exp()  # (batch, classes)
        entropy = ENTROPIES[self.options.entropy](logits)
        if not bool(torch.isfinite(entropy).all()):
            return entropy.mean()  # not finite: the step is skipped, and counted as such
        classes = logits.shape[1]
        redundancy_margin, fisher_weight = CIFAR if classes <= FEW_CLASSES else IMAGENET
        margin = self.options.entropy_margin * math.log(classes)
        chosen = entropy < margin
        if self.mean is not None:
            self.mean = self.mean.to(predictions)
            similarity = F.cosine_similarity(self.mean.unsqueeze(0), predictions, dim=1)
            chosen &= similarity.abs() < (self.options.redundancy_margin or redundancy_margin)
        if not bool(chosen.any()):
            return None
        batch_mean = predictions[chosen].mean(0)
        self._next_mean = (
            batch_mean if self.mean is None else torch.lerp(batch_mean, self.mean, MEAN_MOMENTUM)
        )
        entropy = entropy[chosen]
        penalty = (self.options.fisher_weight or fisher_weight) * self._distance()
        return (torch.exp(margin - entropy.detach()) * entropy).mean() + penalty

    def moved(self) -> None:
        """Update the mean prediction with the samples of the step."""
        self.mean = self._next_mean

    def _distance(self) -> Tensor | float:
        """Return how far important weights are from the source; 0 without source data."""
        if not self.fisher:
            return 0
        weights = zip(self.fisher, self.descent.parameters, self.start, strict=True)
        return sum((omega * (theta - start).square()).sum() for omega, theta, start in weights)


def fisher_information(
    model: nn.Module, parameters: list[nn.Parameter], source: SourceData, outputs: Outputs
) -> list[Tensor]:
    """Return the diagonal of the Fisher information: mean squared gradients of log-likelihoods."""
    # As in the official code labels are predictions, and the gradient is that of a batch's mean.
    total = [torch.zeros_like(parameter) for parameter in parameters]
    count = 0
    # A loader that shuffles draws from the caller's random state, which is then restored.
    with (
        torch.random.fork_rng(devices=[]),
        evaluation_mode(model),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for samples in source_batches(source, model):
            count += 1
            log_probabilities = log_softmax(outputs(model(samples)))
            loss = F.nll_loss(log_probabilities, log_probabilities.argmax(1))
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for sum_of_squares, gradient in zip(total, gradients, strict=True):
                sum_of_squares += gradient.square()
    if count == 0:
        raise NotEnoughDataError(
            "The Fisher information needs at least one batch of source data; `source` has none."
        )
    if not all(bool(torch.isfinite(value).all()) for value in total):
        raise NonFiniteError(
            "The Fisher information must be finite; on these source data it is not. Look for NaN "
            "or infinity among them."
        )
    return [value / count for value in total]


@register(
    "rdumb",
    paper="Press et al. (NeurIPS 2023)",
    fixed={"source": None, "fisher_weight": None},
)
@dataclass(frozen=True, kw_only=True)
class RDumb(EATA):
    """Scale and shift, learned by the entropy of reliable samples and reset now and then.

    With theta_0 the source's weights and t the number of the batch, the weights follow

        theta_{t+1} = theta_0 if t is a multiple of R, else one step of `eata` without its penalty

    On streams of millions of images this outlived all methods that never start anew. The paper:
    https://arxiv.org/abs/2306.05401.

    Attributes:
        reset_every: Batches until weights, optimiser and running mean start anew (R).
    """

    reset_every: Count = 1000

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by reliable samples, with fresh starts."""
        return self.assembly(NormAffine(), predictor=FreshStarts(self))


class FreshStarts(ReliableSteps):
    """Takes the steps of `eata`, and starts anew after a number of batches."""

    keeps: ClassVar[tuple[str, ...]] = (*ReliableSteps.keeps, "taken")

    def __init__(self, options: RDumb) -> None:
        super().__init__(options)
        self.remembers_start = True
        self.reset_every = options.reset_every
        self.taken = 0  # batches since the last fresh start

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict and step; start anew after the last batch of a period."""
        output = super().predict(run, *inputs, **options)
        self.taken += 1
        if self.taken == self.reset_every:
            put_back(self.descent.parameters, self.start)
            self.descent.reset()
            self.mean, self.taken = None, 0
        return output
