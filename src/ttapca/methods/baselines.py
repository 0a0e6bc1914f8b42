"""`source`, `bn` and `tent`: what the paper compares with."""

from __future__ import annotations

from dataclasses import dataclass

from ttapca.adaptation.objectives import mean_entropy
from ttapca.adaptation.optimisation import GradientSteps
from ttapca.adaptation.surfaces import BatchNormStatistics, NormAffine
from ttapca.errors import OptionError
from ttapca.methods.method import Assembly, GradientMethod, Method, NotNegative, Share, register


@register("source")
@dataclass(frozen=True, kw_only=True)
class Source(Method):
    """The model as it is."""

    def assemble(self) -> Assembly:
        """Nothing at all."""
        return Assembly([])


@register("bn", paper="Schneider et al. (NeurIPS 2020); Nado et al. (2020)")
@dataclass(frozen=True, kw_only=True)
class BN(Method):
    """BatchNorm with the statistics of the test batch.

    Attributes:
        alpha: Weight of the batch, the rest being the source's; 1 by default.
        prior: How many samples the source statistics count for: the weight of a batch then follows
            from its size. In place of `alpha`.
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
        """Statistics that nothing moves."""
        alpha = 1.0 if self.alpha is None else self.alpha
        return Assembly([BatchNormStatistics(alpha, prior=self.prior)])


@register("tent", paper="Wang et al. (ICLR 2021)")
@dataclass(frozen=True, kw_only=True)
class Tent(GradientMethod):
    """Scale and shift of the normalisation layers, learned by entropy.

    As in the official code, the logits are those from before the update.
    """

    def assemble(self) -> Assembly:
        """Entropy moves scale and shift."""
        return self.assembly(NormAffine(), GradientSteps(mean_entropy, **self.stepping()))
