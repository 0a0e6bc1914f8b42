"""`eata`: entropy of reliable, non-redundant samples, held back where the source is sensitive.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting" (ICML 2022). Without source
data there is no Fisher information, hence no penalty: the method is then the paper's ETA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.adaptation.objectives import mean_entropy
from ttapca.adaptation.optimisation import MOMENTUM, GradientSteps, Run, sgd
from ttapca.adaptation.surfaces import NormAffine
from ttapca.errors import LayerOutputError, NonFiniteError, NotEnoughDataError, OptionError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Statistics, Stepping, Wishes, statistics_surface
from ttapca.support.logits import log_softmax, softmax_entropy
from ttapca.support.modules import device_and_dtype, evaluation_mode

Source = Iterable[Any] | Tensor

# All are those of the official code on ImageNet.
LEARNING_RATE = 2.5e-4
ENTROPY_MARGIN = 0.4  # of the largest entropy, log C
REDUNDANCY_MARGIN = 0.05
FISHER_WEIGHT = 2000.0
MEAN_MOMENTUM = 0.9
SOURCE_BATCH = 64


def _eata(
    wishes: Wishes,
    *,
    source: Source | None = None,
    e_margin: float | None = None,
    d_margin: float = REDUNDANCY_MARGIN,
    fisher_alpha: float = FISHER_WEIGHT,
    statistics: Statistics = "batch",
    gain: AnyGain = "relu",
) -> Plan:
    mover = ReliableSteps(
        source,
        e_margin=e_margin,
        d_margin=d_margin,
        fisher_alpha=fisher_alpha,
        # The official code returns the logits from before the update.
        stepping=wishes.steps_by(
            functools.partial(sgd, momentum=MOMENTUM), lr=LEARNING_RATE, logits="before"
        ),
    )
    below = wishes.filter_below(gain)
    surfaces = [*statistics_surface(statistics, below), NormAffine(), *below]
    return Plan(surfaces, mover)


class ReliableSteps(GradientSteps):
    """Lower the entropy of samples that are worth it, and stay near the source where it matters.

    A sample x takes part when its entropy E is below a margin and its prediction p is no repetition
    of the running mean prediction m: |cos(p, m)| below another margin. The loss is

        mean of exp(e_margin - E) E  +  fisher_alpha sum_i F_i (w_i - w_i at the start)^2

    over these samples and over all that is moved. A batch in which no sample takes part moves
    nothing.

    Args:
        source: Unlabelled source data for the Fisher information F: batches, pairs whose first
            element is a batch, or one tensor of samples. Read once, when the adapter is made.
            Without, there is no penalty.
        e_margin: Of the entropy, in nats; 0.4 log(classes) by default.
        d_margin: Of the redundancy.
        fisher_alpha: Weight of the penalty.
        stepping: How to step.

    Raises:
        OptionError: When an option makes no sense.
    """

    keeps = (*GradientSteps.keeps, "mean")

    def __init__(
        self,
        source: Source | None,
        *,
        e_margin: float | None,
        d_margin: float,
        fisher_alpha: float,
        stepping: Stepping,
    ) -> None:
        super().__init__(mean_entropy, **stepping)
        if source is not None and not isinstance(source, Iterable):
            raise OptionError(
                f"`source` is batches of source data, or a tensor; found a {type(source).__name__}."
            )
        self.e_margin = None if e_margin is None else _positive("e_margin", e_margin)
        self.d_margin = _positive("d_margin", d_margin)
        self.fisher_alpha = _positive("fisher_alpha", fisher_alpha)
        self.fisher: list[Tensor] = []
        self.mean: Tensor | None = None
        self._source = source
        self.remembers_start = source is not None  # for the penalty alone
        self._next_mean: Tensor | None = None

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the parameters to move, and learn from the source which of them matter."""
        super().bind(model, parameters)
        if self._source is None:
            return
        self.fisher = fisher_information(model, parameters, self._source)
        self._source = None  # an adapter is copied and pickled without the data

    def reset(self) -> None:
        """Forget the optimiser's moments and the mean prediction; the Fisher information stays."""
        super().reset()
        self.mean = None

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """The loss over the samples that take part; None where there are none."""
        del run, inputs, options
        entropy = softmax_entropy(logits)
        if entropy.dim() != 1:
            raise LayerOutputError(
                "Samples are chosen by one prediction each, so logits have the shape (batch, "
                f"classes); found {tuple(logits.shape)}. Choose another method for dense "
                "predictions."
            )
        if not bool(torch.isfinite(entropy).all()):
            return entropy.mean()  # not finite: the step is skipped, and counted as such
        predictions = log_softmax(logits).detach().exp()  # (batch, classes)
        margin = self.e_margin or ENTROPY_MARGIN * math.log(logits.shape[1])
        chosen = entropy < margin
        if self.mean is not None:
            self.mean = self.mean.to(predictions)
            similarity = F.cosine_similarity(self.mean.unsqueeze(0), predictions, dim=1)
            chosen &= similarity.abs() < self.d_margin
        if not bool(chosen.any()):
            return None
        batch_mean = predictions[chosen].mean(0)
        self._next_mean = (
            batch_mean if self.mean is None else torch.lerp(batch_mean, self.mean, MEAN_MOMENTUM)
        )
        entropy = entropy[chosen]
        return (torch.exp(margin - entropy.detach()) * entropy).mean() + self._penalty()

    def moved(self) -> None:
        """Take the samples of the step into the mean prediction."""
        self.mean = self._next_mean

    def tensors(self) -> list[Tensor]:
        """The optimiser's state, the Fisher information and where it was taken, the mean."""
        mean = [] if self.mean is None else [self.mean]
        return [*super().tensors(), *self.fisher, *mean]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the Fisher information as well, and where it was taken."""
        super().apply(fn)
        self.fisher = [fn(value) for value in self.fisher]

    def _penalty(self) -> Tensor | float:
        return self.fisher_alpha * sum(
            (importance * (parameter - start).square()).sum()
            for importance, parameter, start in zip(
                self.fisher, self.descent.parameters, self.start, strict=False
            )
        )


def fisher_information(
    model: nn.Module, parameters: list[nn.Parameter], source: Source
) -> list[Tensor]:
    """Diagonal of the Fisher information: mean square of the gradient of the log-likelihood.

    As in the official code the labels are the model's own predictions, and the gradient is that of
    a batch's mean.

    Args:
        model: With its surfaces in place.
        parameters: What may be moved.
        source: Batches, pairs whose first element is a batch, or one tensor of samples.

    Raises:
        OptionError: When the source yields something else.
        NotEnoughDataError: When it yields nothing.
        NonFiniteError: When a gradient is not finite.
    """
    total = [torch.zeros_like(parameter) for parameter in parameters]
    count = 0
    device, _ = device_and_dtype(model, model)
    # A loader that shuffles draws from the caller's random state, which is put back.
    with (
        torch.random.fork_rng(devices=[]),
        evaluation_mode(model),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for samples in _batches_of(source):
            count += 1
            log_probabilities = log_softmax(model(samples.to(device)))
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


def _batches_of(source: Source) -> Iterator[Tensor]:
    batches = torch.split(source, SOURCE_BATCH) if isinstance(source, Tensor) else source
    for number, batch in enumerate(batches):
        samples = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(samples, Tensor):
            raise OptionError(
                "`source` yields tensors, or pairs whose first element is a tensor; batch "
                f"{number} (counting from 0) is a {type(batch).__name__}."
            )
        yield samples


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise OptionError(f"`{name}` is a finite number above 0; found {value!r}.")
    return value


EATA = Recipe(
    "scale and shift of the normalisation layers, learned by the entropy of reliable samples", _eata
)
