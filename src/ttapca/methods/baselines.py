"""`source`, `bn` and `tent`: the baselines of the paper; `come` is `tent` on opinions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ttapca._checks import NotNegative, Share
from ttapca.adaptation.optimisation import Entropy, GradientSteps, mean_entropy
from ttapca.adaptation.surfaces import BatchNormStatistics, NormAffine
from ttapca.errors import OptionError
from ttapca.methods.method import Assembly, GradientMethod, Method, register


@register("source")
@dataclass(frozen=True, kw_only=True)
class Source(Method):
    """The model as it is."""

    def assemble(self) -> Assembly:
        """Return nothing at all."""
        return Assembly([])


@register("bn", paper="Schneider et al. (NeurIPS 2020); Nado et al. (2020)")
@dataclass(frozen=True, kw_only=True)
class BN(Method):
    """BatchNorm with the statistics of the test batch.

    With mean and variance of the source (s) and of a test batch (t) of n samples:

        mu = (N mu_s + n mu_t) / (N + n)        sigma^2 likewise

    N = 0, the default, is the batch alone. The papers: https://arxiv.org/abs/2006.16971 and
    https://arxiv.org/abs/2006.10963.

    Attributes:
        alpha: Weight of the batch, from 0 (source) to 1 (batch), whatever its size; 1 by default.
        prior: How many samples the source statistics count for (N), in place of `alpha`.
    """

    alpha: Share | None = None
    prior: NotNegative | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.alpha is not None and self.prior is not None:
            raise OptionError(
                "`bn` takes `alpha`, the weight of any batch, or `prior`, by which the weight "
                "follows from the size of the batch; found both."
            )

    def assemble(self) -> Assembly:
        """Return statistics that nothing moves."""
        alpha = 1.0 if self.alpha is None else self.alpha
        return Assembly([BatchNormStatistics(alpha, prior=self.prior)])


@register(
    "come",
    summary="Scale and shift of the normalisation layers, learned by the entropy of opinions",
    paper="Zhang et al. (ICLR 2025)",
    fixed={"entropy": "opinion"},
)
@register("tent", paper="Wang et al. (ICLR 2021)")
@dataclass(frozen=True, kw_only=True)
class Tent(GradientMethod):
    """Scale and shift of the normalisation layers, learned by entropy.

    With y the predictions for a batch, gamma and beta take steps on the mean of the entropy

        H(y) = - sum_c p(y_c) log p(y_c)

    As in the official code, the logits are those from before the update. The paper:
    https://arxiv.org/abs/2006.10726.

    Attributes:
        entropy: Of the `softmax`; or of the `opinion`, which holds back where logits are small
            (COME, https://arxiv.org/abs/2410.10894).
    """

    entropy: Entropy = "softmax"

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by entropy."""
        objective = functools.partial(mean_entropy, kind=self.entropy)
        return self.assembly(NormAffine(), predictor=GradientSteps(objective, **self.stepping()))
