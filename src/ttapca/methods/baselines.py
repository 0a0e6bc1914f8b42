"""`source`, `bn` and `tent`: what the paper compares with."""

from __future__ import annotations

from dataclasses import dataclass

from ttapca.adaptation.optimisation import GradientSteps, mean_entropy
from ttapca.adaptation.surfaces import BatchNormStatistics, NormAffine
from ttapca.errors import OptionError
from ttapca.methods.method import Assembly, GradientMethod, Method, NotNegative, Share, register


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

    Attributes:
        alpha: Weight of the batch, from 0 (source) to 1 (batch); 1 by default.
        prior: How many samples the source statistics count for, in place of `alpha`: the weight of
            a batch then follows from its size.
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


@register("tent", paper="Wang et al. (ICLR 2021)")
@dataclass(frozen=True, kw_only=True)
class Tent(GradientMethod):
    """Scale and shift of the normalisation layers, learned by entropy.

    As in the official code, the logits are those from before the update.
    """

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by entropy."""
        return self.assembly(NormAffine(), mover=GradientSteps(mean_entropy, **self.stepping()))
